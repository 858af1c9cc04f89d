"""Which records are exported, and in what order: a pass over the segments that keeps 56 bytes a record.

The order goes by a hash of what a record is (dataset, index), the split by one of its prompt, neither by files or
workers: the same records give the same export, whoever wrote them.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.records import Head
from common.segments import Counted, Entry, Fault, count, lines, read
from common.turns import row_of as row_of_turn
from producer.export.id_texts import Apart, apart, are_ids, together
from producer.export.rows import NOT_A_ROW, Row, row_of, rows_of

SplitName = Literal["train", "eval"]
_PICK = np.dtype(
    [
        ("dataset", "i4"),
        ("path", "i4"),
        ("offset", "i8"),
        ("size", "i8"),
        ("index", "i8"),
        ("order", "u8"),
        ("trained", "i8"),
        ("held_out", "?"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an export takes. Lengths are tokens; `caps` and `mix` are of tokens that a model wrote."""

    flags: Sequence[str] = ()  # only records with all of these
    no_flags: Sequence[str] = ()  # none with one of these
    others: Mapping[str, str] = field(default_factory=dict)  # datasets that are not exported, and as what it is counted
    gated: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by dataset, the flags its gates leave out
    finish_reasons: Sequence[str] = ()
    min_tokens: int = 0  # of the answer
    max_tokens: int | None = None
    dedupe: bool = False  # of records with equal prompt and answer, the first stays
    shuffle: int | None = None  # a seed; without one the order is that of the sources
    held_out: float = 0.0  # the share of the prompts that goes to `eval`
    caps: Mapping[str, int] = field(default_factory=dict)  # of `train`, as is `mix`: nothing is cut of what is held out
    mix: Mapping[str, float] = field(default_factory=dict)  # shares by dataset, each cut down to what the least gives


@dataclass(slots=True)
class Chosen:
    """The picks in the order of writing; what was left out, by dataset and reason."""

    names: list[str]
    paths: list[Path]
    picks: NDArray[np.void]
    tallies: dict[str, Counter[str]]

    def of(self, split: SplitName) -> NDArray[np.void]:
        """The picks of a split."""
        picks: NDArray[np.void] = self.picks[self.picks["held_out"] == (split == "eval")]
        return picks

    def rows(self, split: SplitName) -> Iterator[tuple[Row, int | None]]:
        """The rows of a split, each with the index of its parent, in order; one at a time in memory.

        Raises DataError for a record that cannot be read; OSError.
        """
        places = _places(self.of(split))
        with _Files(self.paths) as files:
            for group in together(places, lambda place: place[2]):
                found = [files.line(*place) for place in group]
                if (rows := rows_of(found)) is not None:
                    yield from rows
                    continue
                for (path, offset, _), line in zip(group, found, strict=True):
                    try:
                        yield row_of(line)
                    except NOT_A_ROW as error:
                        raise _unreadable(self.paths[path], offset, error) from None


def _places(picks: NDArray[np.void]) -> Iterator[tuple[int, int, int]]:
    """File, byte and size of each pick's line. Some at a time: as Python's objects they take four times the memory."""
    for start in range(0, len(picks), 1000):
        yield from picks[["path", "offset", "size"]][start : start + 1000].tolist()


def _unreadable(path: Path, offset: int, error: Exception) -> DataError:
    return DataError(
        f"the record at byte {offset} of {path} cannot be read ({error}); `tokenmill verify` names every such line"
    )


class _Files:
    """Segments that lines are read from in any order; each is opened at its first line."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def line(self, path: int, offset: int, size: int) -> bytes:
        """The line at byte `offset` of the file number `path`. Raises OSError."""
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = self._paths[path].open("rb", buffering=0)
        try:
            return os.pread(file.fileno(), size, offset)
        except OSError as error:
            error.filename = str(self._paths[path])
            raise


class _Told(Head, frozen=True, kw_only=True):
    """What a record is chosen by."""

    finish_reason: str


class _Prompt(msgspec.Struct, frozen=True):
    input_ids: msgspec.Raw


class _Ids(_Prompt, frozen=True):
    output_ids: msgspec.Raw


_decode_told = msgspec.json.Decoder(_Told).decode
_decode_prompt = msgspec.json.Decoder(_Prompt).decode
_decode_ids = msgspec.json.Decoder(_Ids).decode


class _Scan:
    """What common.segments.scan gives, with the ids checked many lines at a time instead of skipped one by one.

    If it is to be `hashed`, 64 bits of each line's prompt are kept, by which the split goes.
    """

    def __init__(self, *, hashed: bool = False) -> None:
        self._hashed = hashed
        self._prompts: dict[Path, array[int]] = {}

    def __call__(self, path: Path, dataset: str) -> Iterator[Entry | Fault]:
        prompts = self._prompts[path] = array("Q")
        for group in together(lines(path), lambda line: len(line.text)):
            parts = [apart(line.text) for line in group]
            plain = are_ids([text for one in parts if one is not None for text in one[1:]])
            for line, one in zip(group, parts, strict=True):
                if self._hashed:
                    prompts.append(_prompt_hash(line.text, one))
                yield read(line, dataset, _decode_told if one is None or not plain else _TakenApart(one.rest).told)

    def prompts(self, counted: Counted) -> dict[int, int]:
        """By index, 64 bits of the prompt; of a turn, those of the first turn of its conversation."""
        own = {index: self._prompts[entry.path][entry.line - 1] for index, entry in counted.entries.items()}
        first: dict[int, int] = {}  # by row
        turns = [index for index, entry in counted.entries.items() if _told(entry).turn is not None]
        for index in sorted(turns):
            own[index] = first.setdefault(row_of_turn(index), own[index])
        return own


def _prompt_hash(line: bytes, parts: Apart | None) -> int:
    """64 bits of a prompt's ids, however they are spelt; 0 of a line that has none."""
    try:
        text = parts.input_ids if parts is not None else bytes(_decode_prompt(line).input_ids)
    except NOT_A_ROW:
        return 0
    return _hash(b"split " + text.translate(None, b"[] \t\r\n"))


def _told(entry: Entry) -> "_Told":
    assert isinstance(entry.what, _Told)
    return entry.what


@dataclass(slots=True)
class _TakenApart:
    """A line whose ids were found good, without them."""

    rest: bytes

    def told(self, _line: bytes) -> _Told:
        return _decode_told(self.rest)


def choose(output: Path, names: Sequence[str], wanted: Wanted) -> Chosen:
    """Look at every record that counts of `names`, and count those of `wanted.others`.

    Raises DataError for one that cannot be read; OSError.
    """
    chosen = Chosen([*names], [], np.zeros(0, _PICK), {name: Counter() for name in names})
    for name, reason in wanted.others.items():
        n = len(count(output, name, _Scan()).entries)
        chosen.tallies[name] = Counter({"records": n, reason: n})
    parts = [np.fromiter(_picks(output, number, chosen, wanted), _PICK) for number in range(len(names))]
    picks = np.concatenate(parts)
    keys = ("index", "order", "dataset") if wanted.shuffle is None else ("index", "order")
    picks = picks[np.lexsort([picks[key] for key in keys])]
    chosen.picks = _without_equals(picks, chosen, wanted.dedupe)
    return chosen


def _picks(output: Path, number: int, chosen: Chosen, wanted: Wanted) -> Iterator[tuple[int | bool, ...]]:
    name, tally = chosen.names[number], chosen.tallies[chosen.names[number]]
    scan = _Scan(hashed=wanted.held_out > 0)
    counted = count(output, name, scan)
    prompts = scan.prompts(counted) if wanted.held_out > 0 else {}
    tally["faults"] = sum(not fault.torn for fault in counted.faults)
    numbers: dict[Path, int] = {}
    for entry in counted.entries.values():
        told = _told(entry)
        tally["records"] += 1
        if reason := _left_out(told, wanted, wanted.gated.get(name, frozenset())):
            tally[reason] += 1
            continue
        if entry.path not in numbers:
            numbers[entry.path] = len(chosen.paths)
            chosen.paths.append(entry.path)
        one = told.index if told.turn is None else row_of_turn(told.index)  # the turns of a conversation stay together
        order = 0 if wanted.shuffle is None else _hash(f"order {wanted.shuffle} {name} {one}".encode())
        held_out = wanted.held_out > 0 and prompts[told.index] < wanted.held_out * 2**64
        size = entry.end - entry.offset
        yield number, numbers[entry.path], entry.offset, size, told.index, order, told.completion_tokens, held_out


def _left_out(told: _Told, wanted: Wanted, gated: frozenset[str]) -> str:
    if (told.flags or wanted.flags) and (reason := _left_out_by_flags(set(told.flags), wanted, gated)):
        return reason
    if wanted.finish_reasons and told.finish_reason not in wanted.finish_reasons:
        return "finish_reason"
    if told.completion_tokens < max(1, wanted.min_tokens):
        return "too_few_tokens"
    if wanted.max_tokens is not None and told.completion_tokens > wanted.max_tokens:
        return "too_many_tokens"
    return ""


def _left_out_by_flags(flags: set[str], wanted: Wanted, gated: frozenset[str]) -> str:
    if not flags.issuperset(wanted.flags):
        return "without_flag"
    if not flags.isdisjoint(wanted.no_flags):
        return "with_flag"
    return "" if flags.isdisjoint(gated) else "left_out_by_gate"


def _hash(text: bytes) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def _without_equals(picks: NDArray[np.void], chosen: Chosen, dedupe: bool) -> NDArray[np.void]:
    """The picks whose ids no earlier pick has, in the order of writing. Holds 16 bytes a pick, and a pass over all."""
    if not dedupe:
        return picks
    seen: set[bytes] = set()
    keep = np.ones(len(picks), bool)
    for number, digest in enumerate(_digests(picks, chosen.paths)):
        if digest in seen:
            keep[number] = False
            chosen.tallies[chosen.names[int(picks[number]["dataset"])]]["duplicate"] += 1
        seen.add(digest)
    return picks[keep]


def _digests(picks: NDArray[np.void], paths: Sequence[Path]) -> Iterator[bytes]:
    with _Files(paths) as files:
        for path, offset, size in _places(picks):
            try:
                seen = _decode_ids(files.line(path, offset, size))
            except NOT_A_ROW as error:
                raise _unreadable(paths[path], offset, error) from None
            yield blake2b(bytes(seen.input_ids) + bytes(seen.output_ids), digest_size=16).digest()
