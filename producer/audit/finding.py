"""One finding of an audit: a sentence with the likely cause and what to do; and how shares become alarms."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from producer.audit.counts import Counts

Level = Literal["wrong", "warning", "note"]


class Finding(msgspec.Struct, frozen=True):
    """`says` is what was seen, with its numbers; `cause` what it most likely comes from; `fix` what to do.

    `wrong` and `warning` are alarms; a `note` is something to know.
    """

    level: Level
    name: str
    says: str
    cause: str = ""
    fix: str = ""
    examples: tuple[str, ...] = ()

    @property
    def alarm(self) -> bool:
        return self.level != "note"


def share(count: int, of: int) -> str:
    """`96 %`, or with a digit behind the point where it matters."""
    part = 100 * count / of if of else 0.0
    if 0 < part < 0.05:
        return "under 0.1 %"
    return f"{part:.1f} %" if part < 10 or (part > 99 and count < of) else f"{part:.0f} %"


def level_of(count: int, of: int, wrong: float, warning: float = 0.0) -> Level:
    """By the share; at or below `warning` it is a note."""
    part = count / of if of else 0.0
    return "wrong" if part >= wrong else "warning" if part > warning else "note"


def each(
    counts: Counts, table: dict[str, tuple[str, str, str, float, float]], of: int, rows: str = "rows"
) -> Iterator[Finding]:
    """A finding for each count in `table`: what it says, cause, fix, shares from which it is wrong, or an alarm."""
    for name, (says, cause, fix, wrong, warning) in table.items():
        if counts[name]:
            count = counts[name]
            text = f"{count:,} of {of:,} {rows} ({share(count, of)}): {says}."
            level = level_of(count, of, wrong, warning)
            yield Finding(level, name.replace(":", "_"), text, cause, fix, counts.told(name))
