"""Checks every byte that a run has written, and names each fault by file, line and byte.

Changes nothing; what producer/repair.py takes out are exactly the lines that are named here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import redis

from common import words
from common.flags import UNCOUNTED
from common.ledger import OPEN_STATES, DatasetState, Ledger
from common.records import VOID_PREFIX, Head, Record, decode_record
from common.rejects import Rejects, read_rejects
from common.segments import NOT_JSON, Counted, Entry, Fault, Line, count, lines, read
from common.turns import turn_of
from producer.recover import live_processes

FINISH_REASONS = ("stop", "length")


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of one dataset hold. Tokens and `truncated` are of the records that count, one a sample.

    What does not count against the cap (`uncounted` records and their tokens) is among them.
    `records` are all that stand in segments, `superseded` those of them that do not count. `rejects` are the rows that
    have a reject and no record that counts.
    """

    name: str
    segments: int
    bytes: int
    records: int
    samples: int
    superseded: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    truncated: int
    rejects: int
    uncounted: int = 0
    uncounted_prompt_tokens: int = 0
    uncounted_completion_tokens: int = 0


class Finding(msgspec.Struct, frozen=True):
    """What is wrong with one line: `line` counts from 1, `byte` is the line's first byte, from 0."""

    path: str
    line: int
    byte: int
    reason: str


class Difference(msgspec.Struct, frozen=True):
    """A sum on which files and ledger disagree."""

    dataset: str
    what: str
    files: int
    ledger: int


class Repair(msgspec.Struct, frozen=True):
    """What was taken out of one file, which is kept as it was under the name `kept`, in the same folder."""

    path: str
    kept: str
    bytes: int
    lines: list[Finding]


class Report(msgspec.Struct, kw_only=True):
    """All that a verification found. `notes` are no faults; `differences` stays empty where no ledger was compared.

    `repairs` is what was mended before it.
    """

    ledger_compared: bool
    repairs: list[Repair] = []
    datasets: list[Books] = []
    faults: list[Finding] = []
    differences: list[Difference] = []
    notes: list[str] = []


def verify(output: Path, datasets: Sequence[str], ledger: Ledger | None = None) -> Report:
    """Check all files of `datasets`, and compare their sums with `ledger` where there is one. Raises OSError."""
    report = Report(ledger_compared=ledger is not None)
    for dataset in datasets:
        before = None
        with _comparing(report):
            before = ledger.snapshot(dataset) if ledger else None
        counted, books = _check_files(output, dataset, report)
        report.datasets.append(books)
        if ledger and before:
            with _comparing(report):
                _compare(counted, books, before, ledger, report)
    return report


@contextlib.contextmanager
def _comparing(report: Report) -> Iterator[None]:
    """The check of the files goes on when Redis fails in the middle of it."""
    try:
        yield
    except redis.RedisError as error:
        report.ledger_compared = False
        report.notes.append(f"Redis failed, so a ledger was not compared: {error}")


@dataclass(frozen=True, slots=True)
class Checked:
    """One dataset's files, read whole: its books, its rejects, and every fault, torn last lines among them."""

    counted: Counted
    rejects: Rejects
    faults: list[Fault]


def check(output: Path, dataset: str) -> Checked:
    """Read all files of `dataset`. Raises OSError."""
    checker = _Checker()
    counted = count(output, dataset, checker.scan)
    rejects = read_rejects(output, dataset)
    return Checked(counted, rejects, [*counted.faults, *checker.voids_without_record(), *rejects.faults])


def _check_files(output: Path, dataset: str, report: Report) -> tuple[Counted, Books]:
    checked = check(output, dataset)
    for fault in checked.faults:
        if fault.torn:
            # Nothing was settled from it; in a running worker's segment it is a write in progress.
            place = f"{fault.path}:{fault.line} (byte {fault.offset})"
            report.notes.append(f"{place}: {fault.reason}, in the middle of its writing; it is not counted")
        else:
            report.faults.append(Finding(str(fault.path), fault.line, fault.offset, fault.reason))
    both = len(checked.rejects.rows.keys() & checked.counted.entries.keys())
    if both:
        report.notes.append(f"{dataset}: {words.counted(both, 'sample')} with a reject and a record; the record counts")
    return checked.counted, _books(dataset, checked.counted, len(checked.rejects.rows) - both)


def _books(dataset: str, counted: Counted, rejects: int) -> Books:
    prompt = completion = truncated = free = free_prompt = free_completion = 0
    for entry in counted.entries.values():
        head = entry.what
        assert isinstance(head, Head)
        prompt += head.prompt_tokens
        completion += head.completion_tokens
        truncated += "truncated" in head.flags
        if UNCOUNTED in head.flags:
            free += 1
            free_prompt += head.prompt_tokens
            free_completion += head.completion_tokens
    return Books(
        name=dataset,
        segments=len(counted.ends),
        bytes=sum(counted.ends.values()),
        records=len(counted.entries) + counted.superseded,
        samples=len(counted.entries),
        superseded=counted.superseded,
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        truncated=truncated,
        rejects=rejects,
        uncounted=free,
        uncounted_prompt_tokens=free_prompt,
        uncounted_completion_tokens=free_completion,
    )


def _compare(counted: Counted, books: Books, before: DatasetState, ledger: Ledger, report: Report) -> None:
    """Name the sums that differ; a ledger at work has counted a little less, or more, than was read a moment ago."""
    after = ledger.snapshot(books.name)
    files = (
        books.samples,
        books.rejects,
        books.prompt_tokens,
        books.completion_tokens,
        books.uncounted_prompt_tokens,
        books.uncounted_completion_tokens,
    )
    if files == _sums(after):
        return
    unfinished = after.in_flight > 0 or after.state in OPEN_STATES
    if _sums(before) != _sums(after) or (unfinished and live_processes(ledger)):
        report.ledger_compared = False
        report.notes.append(
            f"{books.name}: a run is at work, so its ledger was not compared; verify again when it rests"
        )
        return
    for what, ours, theirs in zip(_COMPARED, files, _sums(after), strict=True):
        if ours != theirs:
            report.differences.append(Difference(books.name, what, ours, theirs))
    settled = ledger.committed()
    late = sum(e.end > settled.get(f"{books.name}/{e.path.name}", 0) for e in counted.entries.values())
    if late:
        report.notes.append(f"{books.name}: {words.counted(late, 'record')} written, but never settled in the ledger")


_COMPARED = (
    "done",
    "rejected",
    "prompt_tokens",
    "completion_tokens",
    "uncounted_prompt_tokens",
    "uncounted_completion_tokens",
)


def _sums(state: DatasetState) -> tuple[int, ...]:
    return tuple(getattr(state, name) for name in _COMPARED)


class _Checker:
    """Reads one dataset's segments whole, ids included; hands the books every record that a recovery would count."""

    def __init__(self) -> None:
        self._whole: set[tuple[int, int]] = set()  # (index, attempt) of records without a fault
        self._faulty: set[tuple[int, int]] = set()  # the same of others, as far as they can be read
        self._voids: list[Entry] = []

    def scan(self, path: Path, dataset: str) -> Iterator[Entry | Fault]:
        """As common.segments.scan, with one more fault for each thing that is wrong with a line."""
        for line in lines(path):
            if line.torn or line.text.startswith(VOID_PREFIX):
                item = read(line, dataset)
                yield item
                if isinstance(item, Entry):
                    # A second void of one record is no fault: its worker and the keeper may both have written it.
                    self._voids.append(item)
            else:
                yield from self._record(line, dataset)

    def voids_without_record(self) -> Iterator[Fault]:
        """After all segments: the voids that take nothing back, or a record that is itself at fault."""
        for entry in self._voids:
            index, attempt = entry.what.index, entry.what.attempt
            if (index, attempt) not in self._whole:
                kind = "whose record is at fault" if (index, attempt) in self._faulty else "without a record"
                reason = f"void {kind}: index {index}, attempt {attempt}"
                yield Fault(entry.path, entry.line, entry.offset, entry.end, reason)

    def _record(self, line: Line, dataset: str) -> Iterator[Entry | Fault]:
        try:
            record = decode_record(line.text)
        except NOT_JSON as error:
            item = read(line, dataset)
            if isinstance(item, Entry):
                self._faulty.add((item.what.index, item.what.attempt))
                yield line.fault(f"not a whole record: {error}")
            yield item
            return
        if record.dataset != dataset:
            yield line.fault(f"a record of dataset {record.dataset!r}")
            return
        yield Entry(line.path, line.number, line.offset, line.end, _head(record))
        key = record.index, record.attempt
        wrong = list(_wrong(record))
        # Of two equal records the first stays; one that is at fault does not make the whole one behind it a second.
        if key in self._whole:
            wrong.append(f"index {record.index}, attempt {record.attempt} a second time")
        for reason in wrong:
            yield line.fault(reason)
        (self._faulty if wrong else self._whole).add(key)


def _head(record: Record) -> Head:
    return Head(
        dataset=record.dataset,
        index=record.index,
        attempt=record.attempt,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
        flags=tuple(record.flags),
        turn=record.turn,
        turns=record.turns,
    )


def _wrong(record: Record) -> Iterator[str]:
    """What a record says of itself that is not so; negative ids do not get here."""
    if len(record.input_ids) != record.prompt_tokens:
        yield f"{len(record.input_ids)} input_ids, but prompt_tokens is {record.prompt_tokens}"
    if len(record.output_ids) != record.completion_tokens:
        yield f"{len(record.output_ids)} output_ids, but completion_tokens is {record.completion_tokens}"
    if record.finish_reason not in FINISH_REASONS:
        yield f"finish_reason {record.finish_reason!r} is neither stop nor length"
    if record.turn is not None and record.turn != turn_of(record.index):
        yield f"turn {record.turn}, but index {record.index} is that of turn {turn_of(record.index)}"
    if record.parent != (record.index - 1 if record.turn else None):
        yield f"its parent is {record.parent}, not the turn before it"
