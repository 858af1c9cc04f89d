"""Draws the table of tests.benchmarks.budget as an SVG: miss by rule and cap, on a logarithmic axis."""

import math
from collections.abc import Sequence
from typing import Protocol


class Measured(Protocol):
    """A row of the table; distance (mean), over and under (worst) in % of the cap."""

    @property
    def scene(self) -> str: ...
    @property
    def cap(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def distance(self) -> float: ...
    @property
    def over(self) -> float: ...
    @property
    def under(self) -> float: ...


_COLOURS = {
    "plain stop": "#8c8c8c",
    "mean reserve": "#c9a227",
    "settled only": "#d9793b",
    "precise": "#1f6fb4",
    "fast": "#6fb1da",
}
_LOWEST, _HIGHEST = -2, 3  # powers of ten of the axis
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 900, 400, 62, 44, 320
_PANEL, _GAP, _BAR = 400, 24, 20


def draw(rows: Sequence[Measured]) -> str:
    """A panel for each scene, a group for each cap, a bar for each rule: its mean |miss|, and a tick at its worst."""
    parts = [_text(16, (_TOP + _BOTTOM) / 2, "miss of the cap, %", "middle", turned=True)]
    for number, scene in enumerate(dict.fromkeys(row.scene for row in rows)):
        parts += _panel([row for row in rows if row.scene == scene], _LEFT + number * (_PANEL + _GAP), number == 0)
    for number, (rule, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + number * 130
        parts.append(f'<rect x="{x}" y="358" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(x + 20, 370, rule))
    parts.append(_text(_LEFT, 392, "bar: mean distance from the cap; tick: the furthest from it, over or under"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    body = [f'{head} font-size="13" fill="#333">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>', *parts]
    return "\n".join([*body, "</svg>", ""])


def _panel(rows: Sequence[Measured], left: float, labelled: bool) -> list[str]:
    parts = [_text(left + _PANEL / 2, 24, rows[0].scene, "middle")]
    for power in range(_LOWEST, _HIGHEST + 1):
        y = _y(10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}h{_PANEL}" stroke="#ddd"/>')
        if labelled:
            parts.append(_text(left - 8, y + 4, f"{10.0**power:g}", "end"))
    caps = list(dict.fromkeys(row.cap for row in rows))
    group = _PANEL / len(caps)
    for number, cap in enumerate(caps):
        bars = [row for row in rows if row.cap == cap]
        x = left + number * group + (group - len(bars) * _BAR) / 2
        for row in bars:
            furthest = max(row.over, -row.under)
            y, worst = _y(row.distance), _y(furthest)
            size = f'width="{_BAR - 2}" height="{_BOTTOM - y:.1f}"'
            title = f"<title>{row.rule}: mean {row.distance:.3f} %, worst {furthest:.3f} %</title>"
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{_COLOURS[row.rule]}">{title}</rect>')
            middle = x + _BAR / 2 - 1
            parts.append(f'<path d="M{middle:.1f} {y:.1f}V{worst:.1f}m-5 0h10" stroke="#333" fill="none"/>')
            x += _BAR
        parts.append(_text(left + (number + 0.5) * group, _BOTTOM + 20, f"cap {cap}", "middle"))
    parts.append(f'<path d="M{left} {_BOTTOM}h{_PANEL}" stroke="#333"/>')
    return parts


def _y(percent: float) -> float:
    """The height of a miss; what is smaller than the axis lies on it."""
    share = (math.log10(max(percent, 10.0**_LOWEST)) - _LOWEST) / (_HIGHEST - _LOWEST)
    return _BOTTOM - min(1.0, share) * (_BOTTOM - _TOP)


def _text(x: float, y: float, words: str, anchor: str = "start", *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turned else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{turn}>{words}</text>'
