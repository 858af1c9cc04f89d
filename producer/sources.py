"""Whether a source is still the file that a dataset's rows were read from.

A sample is known by its index, the position of its row in the source; a row that has a record is never read again, and
a resume goes on from a byte. So all of it holds as long as the bytes that were read stay what they are: they alone
decide which row has which index, and how many rows there are before the next. What comes behind them was never read:
rows may be appended, or changed there. Times say nothing: a copy has new ones, a changed file can have its old ones.

What is kept are the number of rows and bytes that were read, and SHA-256 of the first and the last 64 KiB of those
bytes. A hash of them all would have to read 100 GB again at each start. Rows put in or taken out shift the last part,
another file or order has another first one. What this cannot see is a change between the two that keeps every length:
there all other rows keep their index, unless rows of one length were exchanged.

It stands in `<output>/<dataset>/source.log`, not in Redis, which may be lost: after that the segments alone say which
rows are done, and they mean the same rows only in the same source. A line is appended for each step of the feed, before
its rows are queued, so that no record is of a row that it does not cover; the last whole line counts. Only the first is
forced to disk, since a sync would add some milliseconds to each step: a power cut may take the lines of the last
seconds, and what is left covers all rows but theirs.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.durable import make_folder, replace_file, write_all
from common.errors import DataError, UsageError
from common.ledger import Ledger
from common.sections import DatasetSettings
from common.segments import NOT_JSON
from common.settings import Settings
from producer.datasets.jsonl import Cursor
from producer.recover import live_processes, recover_dataset

_NAME = "source.log"
# A log that has grown to this is begun anew with its last line.
_LOG_BYTES = 64 * 1024
_PART_BYTES = 64 * 1024
# How much of what follows a last row without a newline is looked at: it may go on there.
_REST_BYTES = 4096


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a source: its first `rows` rows, which are its first `bytes` bytes; the file has `size`."""

    rows: int
    bytes: int
    size: int
    first_sha256: str
    last_sha256: str

    def change(self, path: Path) -> str | None:
        """What is no longer as it was read; None if all of it is. Raises OSError."""
        now = look(path, Cursor(self.rows, self.bytes))
        part = min(_PART_BYTES, self.bytes)
        if now.size < self.bytes:
            return f"it has {now.size:,} bytes, of which {self.bytes:,} were read"
        if now.first_sha256 != self.first_sha256:
            return f"its first {part:,} bytes are others"
        if now.last_sha256 != self.last_sha256:
            return f"the {part:,} bytes before its row {self.rows:,} (byte {self.bytes:,}) are others"
        if _goes_on(path, self.bytes):
            return f"its row {self.rows - 1:,}, which had no newline, goes on beyond byte {self.bytes:,}"
        return None


def look(path: Path, cursor: Cursor) -> Source:
    """The source as it is now, up to `cursor`. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(min(_PART_BYTES, cursor.offset))
        file.seek(max(0, cursor.offset - _PART_BYTES))
        last = file.read(min(_PART_BYTES, cursor.offset))
    return Source(
        rows=cursor.index,
        bytes=cursor.offset,
        size=size,
        first_sha256=hashlib.sha256(first).hexdigest(),
        last_sha256=hashlib.sha256(last).hexdigest(),
    )


def _goes_on(path: Path, end: int) -> bool:
    """Whether the row that ended at byte `end` with the file, and not with a newline, is longer by now."""
    with path.open("rb") as file:
        file.seek(max(0, end - 1))
        return end > 0 and file.read(1) != b"\n" and bool(file.readline(_REST_BYTES).strip())


def read_source(output: Path, dataset: str) -> Source | None:
    """What was read of the dataset's source; None if nothing was. Raises DataError if that cannot be read."""
    path = output / dataset / _NAME
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    for line in reversed(lines):
        try:
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=Source)
        except NOT_JSON:
            continue
    raise DataError(f"{path} has no whole line; remove it if the source of {dataset} was not replaced")


def keep_source(output: Path, dataset: str, seen: Source, known: Source | None) -> None:
    """Write down what was read, unless more than that is known. Raises OSError."""
    # After a recovery the source is read from its start: what was read before stays what counts.
    if seen == known or (known and seen.bytes < known.bytes):
        return
    path = output / dataset / _NAME
    line = msgspec.json.encode(seen) + b"\n"
    if known is None or path.stat().st_size >= _LOG_BYTES:
        make_folder(path.parent)
        replace_file(path, [line])
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        write_all(descriptor, line)
    finally:
        os.close(descriptor)


def refuse_replaced(output: Path, datasets: Sequence[DatasetSettings]) -> None:
    """Raises UsageError if the source of one of `datasets` is not the one that its samples were read from."""
    changes = [f"{one.path} of dataset {one.name}: {change}" for one in datasets if (change := _change(output, one))]
    if changes:
        raise UsageError(
            f"a source is not the one that was read before, so that its rows would get the indices of others: "
            f"{'; '.join(changes)}; put the earlier file back, choose another name for the dataset, or go on with "
            "--accept-changes, which keeps what is answered and reads all other rows from the new file"
        )


def follow_sources(settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings]) -> list[str]:
    """Take over what has become of the sources, before `datasets` are registered; says in a sentence each what.

    A source that was replaced was accepted before this is called: rows with a record or a reject are kept by their
    index, and the others are read from the new file. A source that has grown is read on. Raises UsageError if one was
    replaced while workers may have its old rows in flight; OSError, redis.RedisError.
    """
    notes = []
    for dataset in datasets:
        known = read_source(settings.output, dataset.name)
        if change := _change(settings.output, dataset):
            _read_anew(settings, ledger, dataset)
            notes.append(f"{dataset.name}: its source was replaced ({change}); rows that are not done are read from it")
        elif known and (size := dataset.path.stat().st_size) > known.size:
            _read_on(ledger, dataset.name)
            notes.append(f"{dataset.name}: its source has grown from {known.size:,} to {size:,} bytes")
    return notes


def _change(output: Path, dataset: DatasetSettings) -> str | None:
    known = read_source(output, dataset.name)
    return known.change(dataset.path) if known else None


def _read_anew(settings: Settings, ledger: Ledger, dataset: DatasetSettings) -> None:
    # With an embedded Redis the lock of `run` says that nobody else is there.
    live = {} if settings.embedded else live_processes(ledger)
    if live:
        raise UsageError(
            f"the source of dataset {dataset.name} was replaced, and {', '.join(sorted(live))} may have its old rows "
            "in flight; stop them, or wait a minute if they are dead, and repeat the command"
        )
    # In this order: one that is killed in between is refused again, and accepted again.
    recover_dataset(settings.output, dataset, ledger)
    (settings.output / dataset.name / _NAME).unlink()


def _read_on(ledger: Ledger, name: str) -> None:
    """Feed a dataset again whose source had ended; the other states keep their reasons."""
    state = ledger.snapshot(name)
    if state.ended:
        ledger.feed(name, before=state.cursor, after=state.cursor, ended=False, rejected=[], samples=[])
        ledger.transition(name, "open", ["exhausted"])
