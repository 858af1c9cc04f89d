"""Which records are exported, and in what order: a pass over the segments that keeps 56 bytes a record.

The order, the split and the choice go by hashes of what a record is (dataset, index), never by files or workers: the
same records give the same export, whoever wrote them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.records import Record, decode_record
from common.segments import NOT_JSON, count, lines_that_count
from common.turns import row_of as row_of_turn

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
    finish_reasons: Sequence[str] = ()
    min_tokens: int = 0  # of the answer
    max_tokens: int | None = None
    dedupe: bool = False  # of records with equal prompt and answer, the first stays
    shuffle: int | None = None  # a seed; without one the order is that of the sources
    held_out: float = 0.0  # the share of the samples that goes to `eval`
    caps: Mapping[str, int] = field(default_factory=dict)
    mix: Mapping[str, float] = field(default_factory=dict)  # shares by dataset, each cut down to what the least gives


@dataclass(slots=True)
class Chosen:
    """The picks in the order of writing; what was left out, by dataset and reason; caps that follow from a mix."""

    names: list[str]
    paths: list[Path]
    picks: NDArray[np.void]
    tallies: dict[str, Counter[str]]
    caps: dict[str, int]

    def records(self, split: Literal["train", "eval"]) -> Iterator[Record]:
        """The records of a split, in order; one at a time in memory. Raises DataError, OSError."""
        files: dict[int, BinaryIO] = {}
        try:
            for pick in self.picks[self.picks["held_out"] == (split == "eval")]:
                number = int(pick["path"])
                file = files.get(number)
                if file is None:
                    file = files[number] = self.paths[number].open("rb")
                file.seek(int(pick["offset"]))
                text = file.read(int(pick["size"]))
                try:
                    yield decode_record(text)
                except NOT_JSON as error:
                    raise DataError(
                        f"the record at byte {pick['offset']} of {self.paths[number]} cannot be read ({error}); "
                        "`tokenmill verify` names every such line"
                    ) from None
        finally:
            for file in files.values():
                file.close()


class _Seen(msgspec.Struct, frozen=True):
    dataset: str
    index: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    input_ids: msgspec.Raw
    output_ids: msgspec.Raw
    flags: tuple[str, ...] = ()
    turn: int | None = None


_decode_seen = msgspec.json.Decoder(_Seen).decode


def choose(output: Path, names: Sequence[str], wanted: Wanted) -> Chosen:
    """Look at every record that counts of `names`. Raises DataError for one that cannot be read; OSError."""
    chosen = Chosen([*names], [], np.zeros(0, _PICK), {name: Counter() for name in names}, dict(wanted.caps))
    parts = [np.fromiter(_picks(output, number, chosen, wanted), _PICK) for number in range(len(names))]
    picks = np.concatenate(parts)
    keys = ("index", "order", "dataset") if wanted.shuffle is None else ("index", "order")
    picks = picks[np.lexsort([picks[key] for key in keys])]
    chosen.picks = _without_equals(picks, chosen, wanted.dedupe)
    if wanted.mix:
        _mix(chosen, wanted.mix)
    return chosen


def _picks(output: Path, number: int, chosen: Chosen, wanted: Wanted) -> Iterator[tuple[int | bool, ...]]:
    name, tally = chosen.names[number], chosen.tallies[chosen.names[number]]
    counted = count(output, name)
    tally["faults"] = sum(not fault.torn for fault in counted.faults)
    numbers: dict[Path, int] = {}
    for path, offset, text in lines_that_count(counted):
        try:
            seen = _decode_seen(text)
        except NOT_JSON as error:
            raise DataError(
                f"the record at byte {offset} of {path} cannot be read ({error}); "
                "`tokenmill verify` names every such line"
            ) from None
        tally["records"] += 1
        if reason := _left_out(seen, wanted):
            tally[reason] += 1
            continue
        if path not in numbers:
            numbers[path] = len(chosen.paths)
            chosen.paths.append(path)
        # The turns of a conversation stay together, and on one side of the split.
        one = seen.index if seen.turn is None else row_of_turn(seen.index)
        order = 0 if wanted.shuffle is None else _hash(f"order {wanted.shuffle} {name} {one}")
        held_out = _hash(f"split {name} {one}") < wanted.held_out * 2**64
        yield number, numbers[path], offset, len(text), seen.index, order, seen.completion_tokens, held_out


def _left_out(seen: _Seen, wanted: Wanted) -> str:
    flags = set(seen.flags)
    checks: tuple[tuple[str, bool], ...] = (
        ("without_flag", not flags.issuperset(wanted.flags)),
        ("with_flag", not flags.isdisjoint(wanted.no_flags)),
        ("finish_reason", bool(wanted.finish_reasons) and seen.finish_reason not in wanted.finish_reasons),
        ("too_few_tokens", seen.completion_tokens < max(1, wanted.min_tokens)),
        ("too_many_tokens", wanted.max_tokens is not None and seen.completion_tokens > wanted.max_tokens),
    )
    return next((reason for reason, fails in checks if fails), "")


def _hash(text: str) -> int:
    """64 bits that are the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


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
    files = [path.open("rb") for path in paths]
    try:
        for pick in picks:
            file = files[int(pick["path"])]
            file.seek(int(pick["offset"]))
            seen = _decode_seen(file.read(int(pick["size"])))
            yield blake2b(bytes(seen.input_ids) + bytes(seen.output_ids), digest_size=16).digest()
    finally:
        for file in files:
            file.close()


def _mix(chosen: Chosen, mix: Mapping[str, float]) -> None:
    """Caps that give each dataset its share: the one that has least for its share is taken whole."""
    has = {
        name: int(chosen.picks["trained"][chosen.picks["dataset"] == number].sum())
        for number, name in enumerate(chosen.names)
    }
    has = {name: min(tokens, chosen.caps.get(name, tokens)) for name, tokens in has.items()}
    unit = min(has[name] / share for name, share in mix.items())
    for name, share in mix.items():
        chosen.caps[name] = int(unit * share)
