"""Reading segments: `<output>/<dataset>/<worker>-<n>.jsonl`, append-only, one record or void a line.

Which record of a sample counts needs no ledger: of those that no void takes back, the one with the highest attempt
(a later attempt is only handed out while no earlier one is settled, and an earlier one can not settle after that).
A last line without its newline is torn: its writer died within the write, nothing was settled, and readers skip it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.records import VOID_PREFIX, Head, Record, Voided, decode_head, decode_record, decode_void

REJECTS = "rejects.jsonl"


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is neither a record nor a void of its dataset; `torn` if it is a last line without its newline."""

    path: Path
    line: int
    offset: int
    reason: str
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One good line: where it starts and ends (bytes), and what it holds."""

    path: Path
    line: int
    offset: int
    end: int
    what: Head | Voided


def segment_paths(output: Path, dataset: str) -> list[Path]:
    """The dataset's segments, in the order of their names."""
    return sorted(path for path in (output / dataset).glob("*.jsonl") if path.name != REJECTS)


def scan(path: Path, dataset: str, start: int = 0) -> Iterator[Entry | Fault]:
    """Every line of a segment from byte `start`, in order. Lines are split at newlines alone; `line` counts from 1."""
    offset = start
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            end = offset + len(line)
            if not line.endswith(b"\n"):
                yield Fault(path, number, offset, f"torn last line of {len(line)} bytes", torn=True)
            else:
                yield _read(path, dataset, number, offset, line)
            offset = end


def _read(path: Path, dataset: str, number: int, offset: int, line: bytes) -> Entry | Fault:
    try:
        if line.startswith(VOID_PREFIX):
            return Entry(path, number, offset, offset + len(line), decode_void(line).void)
        head = decode_head(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Fault(path, number, offset, f"not a record: {error}")
    if head.dataset != dataset:
        return Fault(path, number, offset, f"a record of dataset {head.dataset!r}")
    return Entry(path, number, offset, offset + len(line), head)


@dataclass(slots=True)
class Counted:
    """A dataset's books as its segments give them."""

    entries: dict[int, Entry]  # index -> the entry that counts
    superseded: int  # records that do not count, voided or outdone
    faults: list[Fault]
    ends: dict[Path, int]  # segment -> the byte after its last whole line


def count(output: Path, dataset: str) -> Counted:
    """Read all segments of `dataset` and find the record that counts for each index."""
    best: dict[int, Entry] = {}
    voided: set[tuple[Path, int, int]] = set()
    records: list[Entry] = []
    faults: list[Fault] = []
    ends: dict[Path, int] = {}
    for path in segment_paths(output, dataset):
        ends[path] = 0
        for item in scan(path, dataset):
            if isinstance(item, Fault):
                faults.append(item)
                if not item.torn:
                    ends[path] = max(ends[path], item.offset)
                continue
            ends[path] = item.end
            if isinstance(item.what, Voided):
                voided.add((path, item.what.index, item.what.attempt))
            else:
                records.append(item)
    for entry in records:
        head = entry.what
        assert isinstance(head, Head)
        if (entry.path, head.index, head.attempt) in voided:
            continue
        other = best.get(head.index)
        if other is None or _attempt(other) < head.attempt:
            best[head.index] = entry
    return Counted(best, len(records) - len(best), faults, ends)


def _attempt(entry: Entry) -> int:
    assert isinstance(entry.what, Head)
    return entry.what.attempt


def records(output: Path, dataset: str) -> Iterator[Record]:
    """The records that count, each index once, in the order of their files."""
    counted = {(entry.path, entry.offset) for entry in count(output, dataset).entries.values()}
    for path in segment_paths(output, dataset):
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if (path, offset) in counted:
                    yield decode_record(line)
                offset += len(line)
