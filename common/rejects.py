"""Rows that ended without a record: `<output>/<dataset>/rejects.jsonl`, one JSON object a line.

A reject is durable here before the ledger counts it, so after a crash a row may stand here twice (the first line
counts), or stand here and have a record as well: its reject was refused by the ledger, because the sample had settled
elsewhere. Therefore a record that counts wins over a reject, here as in the ledger.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.durable import make_folder, sync_folder, write_all
from common.records import Index, Turn
from common.segments import NOT_JSON, REJECTS, Fault, lines
from common.turns import turn_of

# How far back the end of the last whole line is searched at a time.
_TAIL_BYTES = 65536


class Reject(msgspec.Struct, frozen=True):
    """Why the row at `index` of its source got no record; `id` is the row's own id, where it has one.

    Where it was a turn of a conversation that had begun (common/turns.py), `turns` says how many that was to have.
    """

    index: Index
    reason: str
    detail: str = ""
    id: Any = None
    turns: Turn | msgspec.UnsetType = msgspec.UNSET

    @property
    def turns_left(self) -> int:
        """How many turns of its conversation are not made, with this one rejected."""
        return 0 if isinstance(self.turns, msgspec.UnsetType) else max(0, self.turns - turn_of(self.index) - 1)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Reject).decode


@dataclass(frozen=True, slots=True)
class Rejects:
    """A rejects file as read: the reject that counts for each index, and lines that are none."""

    path: Path
    rows: dict[int, Reject]
    faults: list[Fault]


def append_rejects(output: Path, dataset: str, rows: Sequence[Reject]) -> None:
    """Append `rows` and force them to disk; any number of processes may do so at once.

    Raises OSError with nothing appended. A torn last line of a writer that died is cut first: the lock says that
    nobody is within a write, and a line appended behind it would be lost with it.
    """
    folder = output / dataset
    make_folder(folder)
    descriptor = os.open(folder / REJECTS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = _end_of_last_line(descriptor)
        os.ftruncate(descriptor, size)
        try:
            write_all(descriptor, b"".join(_encode(row) + b"\n" for row in rows))
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        if size == 0:
            sync_folder(folder)
    finally:
        os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """The byte after the last newline."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_rejects(output: Path, dataset: str) -> Rejects:
    """The dataset's rejects, each index once; none if the file does not exist."""
    read = Rejects(output / dataset / REJECTS, {}, [])
    for item in each_reject(output, dataset):
        if isinstance(item, Fault):
            read.faults.append(item)
        else:
            read.rows.setdefault(item.index, item)
    return read


def each_reject(output: Path, dataset: str) -> Iterator[Reject | Fault]:
    """Every line of the dataset's rejects, one at a time; of an index the first counts. Raises OSError."""
    path = output / dataset / REJECTS
    if not path.exists():
        return
    for line in lines(path):
        if line.torn:
            yield line.torn_fault()
            continue
        try:
            yield _decode(line.text)
        except NOT_JSON as error:
            yield line.fault(f"not a reject: {error}")
