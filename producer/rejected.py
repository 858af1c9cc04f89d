"""What was rejected, summed up by reason: for `tokenmill rejects`."""

from bisect import insort
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.rejects import Reject, each_reject
from common.segments import Fault
from producer.datasets.reasons import REASONS

_EXAMPLES = 3


class Reason(msgspec.Struct, frozen=True):
    """The rows with one reason; `meaning` is empty for what happened to a sample after it was sent."""

    reason: str
    rows: int
    meaning: str
    examples: list[Reject]  # the first ones by index


class RejectedRows(msgspec.Struct, frozen=True):
    """The rejects of a dataset, the most frequent reason first; `faults` are lines of the file that are none."""

    name: str
    rejected: int
    reasons: list[Reason]
    faults: int


def rejected_rows(output: Path, datasets: Sequence[str]) -> list[RejectedRows]:
    """Sum up `<output>/<dataset>/rejects.jsonl` of each dataset. Raises OSError."""
    return [_rejected(output, name) for name in datasets]


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
