"""Reading segments: `<output>/<dataset>/<worker>-<n>.jsonl`, append-only, one record or void a line.

Which record of a sample counts needs no ledger: of those that no void takes back, the one with the highest attempt
(a later attempt is only handed out while no earlier one is settled, and an earlier one cannot settle after that).
A void counts in whichever segment of the dataset it stands: a writer whose segment was full or failed goes on in the
next, the keeper voids what a dead worker can no longer void, and an attempt belongs to one writer alone.
A last line without its newline is torn: its writer died within the write, nothing was settled, and readers skip it.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.errors import DataError
from common.records import VOID_PREFIX, Head, Record, Voided, decode_head, decode_record, decode_void

REJECTS = "rejects.jsonl"
# Lines are some 10 to 100 KB; the default buffer of 8 KB would cost a third of the speed.
_BUFFER_BYTES = 1024 * 1024
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding a line of foreign bytes raises


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is not what it must be; `torn` if it is a last line without its newline."""

    path: Path
    line: int
    offset: int
    end: int
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


@dataclass(frozen=True, slots=True)
class Line:
    """One line as it stands in a file, its newline included; `number` counts from 1 where the reading began."""

    path: Path
    number: int
    offset: int
    text: bytes

    @property
    def end(self) -> int:
        """The byte after the line."""
        return self.offset + len(self.text)

    @property
    def torn(self) -> bool:
        """Whether this is a last line without its newline."""
        return not self.text.endswith(b"\n")

    @property
    def nul_bytes(self) -> int:
        """How many NUL bytes it begins with: a power cut leaves them where a file had grown and its data was lost."""
        return len(self.text) - len(self.text.lstrip(b"\0"))

    def fault(self, reason: str) -> Fault:
        """What is wrong with the line, and where it stands."""
        return Fault(self.path, self.number, self.offset, self.end, reason, self.torn)

    def torn_fault(self) -> Fault:
        """The fault of a last line without its newline."""
        nul = f", which begins with {self.nul_bytes:,} NUL bytes, as a power cut leaves them" if self.nul_bytes else ""
        return self.fault(f"torn last line of {len(self.text)} bytes{nul}")


class _Prompt(msgspec.Struct, frozen=True):
    index: int
    input_ids: msgspec.Raw


_decode_prompt = msgspec.json.Decoder(_Prompt).decode


def segment_paths(output: Path, dataset: str) -> list[Path]:
    """The dataset's segments, in the order of their names."""
    return sorted(path for path in (output / dataset).glob("*.jsonl") if path.name != REJECTS)


def lines(path: Path, start: int = 0) -> Iterator[Line]:
    """Every line of a file from byte `start`, in order, split at newlines alone. Raises OSError."""
    offset = start
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        file.seek(start)
        for number, text in enumerate(file, 1):
            yield Line(path, number, offset, text)
            offset += len(text)


def scan(path: Path, dataset: str, start: int = 0) -> Iterator[Entry | Fault]:
    """Every line of a segment from byte `start`, in order; `line` counts from 1 there."""
    for line in lines(path, start):
        yield read(line, dataset)


def read(line: Line, dataset: str, decode: Callable[[bytes], Head] = decode_head) -> Entry | Fault:
    """What the books see in a line; the ids of a record are skipped over, not looked at.

    `decode` may give more of a record than its head.
    """
    if line.torn:
        return line.torn_fault()
    try:
        what = decode_void(line.text).void if line.text.startswith(VOID_PREFIX) else decode(line.text)
    except NOT_JSON as error:
        nul = f"it begins with {line.nul_bytes:,} NUL bytes, as a power cut leaves them"
        return line.fault(f"not a record: {nul if line.nul_bytes else error}")
    if isinstance(what, Head) and what.dataset != dataset:
        return line.fault(f"a record of dataset {what.dataset!r}")
    return Entry(line.path, line.number, line.offset, line.end, what)


@dataclass(slots=True)
class Counted:
    """A dataset's books as its segments give them."""

    entries: dict[int, Entry]  # index -> the entry that counts
    superseded: int  # records that do not count, voided or outdone
    faults: list[Fault]
    ends: dict[Path, int]  # segment -> the byte after its last whole line


Scan = Callable[[Path, str], Iterator[Entry | Fault]]


def count(output: Path, dataset: str, scan: Scan = scan) -> Counted:
    """Read all segments of `dataset` with `scan` and find the record that counts for each index.

    Holds some 500 bytes a record in memory. Raises OSError.
    """
    first: dict[int, Entry] = {}
    others: dict[int, list[Entry]] = {}  # further records of an index: rare
    voided: set[tuple[int, int]] = set()
    counted = Counted(first, 0, [], {})
    records = 0
    for path in segment_paths(output, dataset):
        counted.ends[path] = 0
        for item in scan(path, dataset):
            if not (isinstance(item, Fault) and item.torn):
                counted.ends[path] = item.end
            if isinstance(item, Fault):
                counted.faults.append(item)
            elif isinstance(item.what, Voided):
                voided.add((item.what.index, item.what.attempt))
            else:
                records += 1
                if first.setdefault(item.what.index, item) is not item:
                    others.setdefault(item.what.index, []).append(item)
    for index in others.keys() | {index for index, _ in voided if index in first}:
        standing = [e for e in (first[index], *others.get(index, ())) if (index, e.what.attempt) not in voided]
        if standing:
            first[index] = max(standing, key=lambda entry: entry.what.attempt)
        else:
            del first[index]
    counted.superseded = records - len(first)
    return counted


def records(output: Path, dataset: str, counted: Counted | None = None) -> Iterator[Record]:
    """The records that count, each index once, in the order of their files; one at a time in memory.

    `counted` are the dataset's books, where the caller has them. Raises OSError, and DataError where a record that
    counts cannot be read.
    """
    for path, offset, text in lines_that_count(counted or count(output, dataset)):
        yield _decode(path, offset, text)


def prompts(counted: Counted) -> Iterator[tuple[int, bytes]]:
    """The index of each record that counts, and its input_ids as JSON; one at a time. Raises OSError."""
    for _, _, text in lines_that_count(counted):
        with contextlib.suppress(*NOT_JSON):  # `verify` names a record without ids
            asked = _decode_prompt(text)
            yield asked.index, bytes(asked.input_ids)


def lines_that_count(counted: Counted) -> Iterator[tuple[Path, int, bytes]]:
    """File, byte and text of each line whose record counts, in the order of the files. Raises OSError."""
    offsets = {path: array("q") for path in counted.ends}
    for entry in counted.entries.values():
        offsets[entry.path].append(entry.offset)
    for path, wanted in offsets.items():
        with path.open("rb", buffering=_BUFFER_BYTES) as file:
            for offset in sorted(wanted):
                file.seek(offset)
                yield path, offset, file.readline()


def record_at(entry: Entry) -> Record:
    """The whole record of an entry. Raises OSError, and DataError where it cannot be read."""
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return _decode(entry.path, entry.offset, file.read(entry.end - entry.offset))


def _decode(path: Path, offset: int, text: bytes) -> Record:
    try:
        return decode_record(text)
    except NOT_JSON as error:
        raise DataError(
            f"the record at byte {offset} of {path} cannot be read ({error}); `tokenmill verify` names every such line"
        ) from None
