"""Figures as a person reads them, the same in `status`, `top` and the progress of `run`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Terminals that show ASCII alone, or of which it is not known.
_PLAIN_TERMINALS = frozenset({"dumb", "vt100", "vt102", "vt220", "unknown"})


@dataclass(frozen=True, slots=True)
class Look:
    """The characters that a terminal can show: `blocks` from empty to full."""

    blocks: str = " ▏▎▍▌▋▊▉█"
    rest: str = "·"
    levels: str = " ▁▂▃▄▅▆▇█"
    cut: str = "…"
    dot: str = "·"


PLAIN = Look(blocks=" #", rest="-", levels=" .-=#", cut="~", dot="|")
RICH = Look()


def look_of(stream: IO[str], environment: Mapping[str, str] = os.environ) -> Look:
    """What may be written to `stream`: ASCII where its encoding or TERM allow no more."""
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return PLAIN if encoding != "utf8" or environment.get("TERM", "") in _PLAIN_TERMINALS else RICH


def duration(seconds: float | None) -> str:
    """`3h07m`, `12m30s`, `40s`; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def short(number: float) -> str:
    """`9,999`, `12.3k`, `1.23M`: at most six characters below ten billion."""
    if number < 9999.5:
        return f"{number:,.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if number < 999.5 * size or unit == "G":
            scaled = number / size
            return f"{scaled:,.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    raise AssertionError


def share(spent: float, cap: float | None) -> str:
    """`45.2%`; `no cap`."""
    return f"{100 * spent / cap:.1f}%" if cap else "no cap"


def bar(part: float, width: int, look: Look) -> str:
    """A bar of `width` characters of which `part` (0 to 1) is filled; 0 and 1 are told from almost 0 and almost 1."""
    steps = len(look.blocks) - 1
    filled = round(max(0.0, min(1.0, part)) * width * steps)
    if 0 < part < 1:
        filled = min(max(filled, 1), width * steps - 1)
    whole, left = divmod(filled, steps)
    text = look.blocks[-1] * whole + (look.blocks[left] if left else "")
    return text + look.rest * (width - len(text))


def sparkline(values: Sequence[float], width: int, look: Look) -> str:
    """The last `width` values, the highest of them at full height; what is not 0 does not look like 0."""
    shown = values[-width:] if width > 0 else []
    top, highest = max(shown, default=0), len(look.levels) - 1
    levels = (max(1, round(value / top * highest)) if value > 0 else 0 for value in shown)
    return "".join(look.levels[level] for level in levels).rjust(width)


def cut(text: str, width: int, look: Look) -> str:
    """`text` in at most `width` characters; what is cut off is marked."""
    return text if len(text) <= width else text[: max(0, width - 1)] + look.cut if width > 0 else ""


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would obey (an escape in a server's words) written out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
