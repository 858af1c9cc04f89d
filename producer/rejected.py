"""What was rejected, summed up by reason: for `tokenmill rejects`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.rejects import Reject, read_rejects
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
    read = read_rejects(output, name)
    by_reason: dict[str, list[Reject]] = {}
    for index in sorted(read.rows):
        by_reason.setdefault(read.rows[index].reason, []).append(read.rows[index])
    reasons = [
        Reason(reason, len(rows), REASONS.get(reason, ""), rows[:_EXAMPLES])
        for reason, rows in sorted(by_reason.items(), key=lambda one: (-len(one[1]), one[0]))
    ]
    return RejectedRows(name, len(read.rows), reasons, len(read.faults))
