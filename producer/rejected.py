"""What was rejected, summed up by reason: for `tokenmill rejects`."""

from bisect import insort
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.records import Head
from common.registered import read_kept
from common.rejects import Reject, each_reject
from common.segments import Fault, count
from common.settings import Settings
from common.turns import row_of
from producer.datasets.reasons import REASONS
from producer.datasets.standard_input import source_of
from producer.whereabouts import places

_EXAMPLES = 3
# What is spent on finding the examples of a dataset in its source.
_LOOKING_SECONDS = 3.0


class Reason(msgspec.Struct, frozen=True):
    """The rows with one reason; `meaning` is empty for what happened to a sample after it was sent."""

    reason: str
    rows: int
    meaning: str
    examples: list[Reject]  # the first ones by index


class RejectedRows(msgspec.Struct, frozen=True):
    """The rejects of a dataset, the most frequent reason first; `faults` are lines of the file that are none.

    `places` say by index where in its files the rows of the examples stand, as far as that was found. Where every turn
    of conversations is made anew, of all `turns` of those that were begun so many are `unmade`: without a record.
    """

    name: str
    rejected: int
    reasons: list[Reason]
    faults: int
    places: dict[int, str] = {}
    turns: int = 0
    unmade: int = 0


def rejected_rows(settings: Settings, datasets: Sequence[str]) -> list[RejectedRows]:
    """Sum up `<output>/<dataset>/rejects.jsonl` of each dataset. Raises OSError, DataError."""
    return [_with_source(settings, _rejected(settings.output, name)) for name in datasets]


def _with_source(settings: Settings, found: RejectedRows) -> RejectedRows:
    """What its source and its segments say beyond the rejects."""
    kept = read_kept(settings.output, found.name)
    dataset = kept[0] if kept else next((one for one in settings.datasets if one.name == found.name), None)
    if dataset is None:
        return found
    all_turns = dataset.turns == "all"
    rows = {one.index: row_of(one.index) if all_turns else one.index for why in found.reasons for one in why.examples}
    source = source_of(settings.output, dataset)
    where = places(source, set(rows.values()), dataset.max_row_bytes, _LOOKING_SECONDS)
    known = {index: where[row] for index, row in rows.items() if row in where}
    turns, made = _turns(settings.output, found.name) if all_turns else (0, 0)
    return msgspec.structs.replace(found, places=known, turns=turns, unmade=turns - made)


def _turns(output: Path, name: str) -> tuple[int, int]:
    """How many turns the conversations have that were begun, and how many of these have a record."""
    entries = count(output, name).entries
    begun = {row_of(index): entry.what for index, entry in entries.items()}
    return sum(head.turns or 1 for head in begun.values() if isinstance(head, Head)), len(entries)


def _rejected(output: Path, name: str) -> RejectedRows:
    """In the memory of a bit for each index: a row may be rejected twice, and there may be millions of them."""
    seen = bytearray()
    rows: dict[str, int] = {}
    first: dict[str, list[Reject]] = {}
    faults = 0
    for one in each_reject(output, name):
        if isinstance(one, Fault):
            faults += 1
            continue
        byte, bit = one.index // 8, 1 << one.index % 8
        if byte >= len(seen):
            seen.extend(bytes(byte + 1 - len(seen)))
        if not seen[byte] & bit:
            seen[byte] |= bit
            rows[one.reason] = rows.get(one.reason, 0) + 1
            examples = first.setdefault(one.reason, [])
            insort(examples, one, key=_index)
            del examples[_EXAMPLES:]
    reasons = [
        Reason(reason, count, REASONS.get(reason, ""), first[reason])
        for reason, count in sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    ]
    return RejectedRows(name, sum(rows.values()), reasons, faults)


def _index(reject: Reject) -> int:
    return reject.index
