"""Counts records that a worker made durable but did not live to settle.

The ledger knows of each segment up to which byte it is settled. What lies beyond was written by a worker that died
between its fsync and its settle call, or is alive and about to settle; a settle is idempotent, so both are safe to do.
What a worker is writing at this moment is not durable and may be taken back: a segment that it has locked is left for
the next time (workers/segment_writer.py).
"""

import logging
import os
from pathlib import Path

from common.durable import try_lock
from common.ledger import Ledger
from common.logs import about
from common.records import Void, Voided, encode_line
from common.segments import Entry, Fault, scan, segment_paths
from common.settled import settled_of
from workers.segment_writer import SegmentWriter

log = logging.getLogger(__name__)


def adopt(ledger: Ledger, writer: SegmentWriter, output: Path, dataset: str) -> int:
    """Settle what lies beyond the settled bytes of the dataset's segments; answers how many records count.

    A record whose sample another attempt has by now is voided, in a segment of the keeper's own.
    """
    committed = ledger.committed()
    counted = 0
    for path in segment_paths(output, dataset):
        name = f"{dataset}/{path.name}"
        start = committed.get(name, 0)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # it held nothing: its writer, whose disk is full, took it back
        try:
            longer = os.fstat(descriptor).st_size > start
            # One that its writer has taken back while it was opened has no name any more.
            if longer and try_lock(descriptor, shared=True) and os.fstat(descriptor).st_nlink > 0:
                counted += _adopt_tail(ledger, writer, path, dataset, start, descriptor)
        finally:
            os.close(descriptor)
    return counted


def _adopt_tail(ledger: Ledger, writer: SegmentWriter, path: Path, dataset: str, start: int, descriptor: int) -> int:
    name = f"{dataset}/{path.name}"
    entries: dict[tuple[int, int], Entry] = {}
    end = start
    for item in scan(path, dataset, start):
        if isinstance(item, Fault):
            end = end if item.torn else item.end
            continue
        end = item.end
        _note(item, entries)
    if end == start:
        return 0
    try:
        os.fsync(descriptor)  # durable before counted, whoever counts
    except OSError as error:
        # The next sync would say "ok" of pages that never reached the disk. Readers take the copies for one record.
        text = "%s cannot be forced to disk (%s); its lines from byte %d on are written again"
        log.error(text, path, error, start, extra=about(dataset))
        writer.append(dataset, [os.pread(descriptor, end - start, start)])
    records = [settled_of(entry) for entry in entries.values()]
    counted = ledger.settle(dataset, records, segment=name, committed_bytes=end)
    voids = [
        encode_line(Void(Voided(record.index, record.attempt)))
        for record, counts in zip(records, counted, strict=True)
        if not counts
    ]
    if voids:
        segment, size = writer.append(dataset, voids)
        ledger.set_committed(name, end)
        ledger.set_committed(segment, size)
    return sum(counted)


def _note(item: Entry, entries: dict[tuple[int, int], Entry]) -> None:
    what = item.what
    if isinstance(what, Voided):
        entries.pop((what.index, what.attempt), None)
    else:
        entries[what.index, what.attempt] = item
