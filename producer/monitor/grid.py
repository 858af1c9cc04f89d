"""Tables that fit a width: columns are left out, the least needed first, before a figure is cut.

A line is a list of (text, style) parts, which costs little to make, and goes to a stream as well as to a full screen.
Styles are those of STYLES.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.text import Text

from producer.monitor.figures import Look, bar, cut, printable

Entry = Mapping[str, Any]
Line = list[tuple[str, str]]
# Nothing is told by colour alone: whatever has one says it in words as well.
STYLES = {
    "": "",
    "head": "bold",
    "good": "green",
    "ended": "blue",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
    "think": "magenta",
    "tool": "cyan",
    "mark": "yellow",
    "selected": "reverse",
}
_LEAST_BAR, _WIDEST_BAR = 6, 30


def _no_style(_: Entry) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: of the columns that do not fit, those with the highest `rank` are left out first, and 0 never.

    A text wider than `widest` is folded or cut. With `part` the column is a bar (0 to 1; None: empty), as wide as there
    is room for. A `rest` column, the last one, takes what is left of the line and is cut there.
    """

    head: str
    text: Callable[[Entry], str] = _no_style
    style: Callable[[Entry], str] = _no_style
    left: bool = False
    rank: int = 0
    widest: int = 200
    part: Callable[[Entry], float | None] | None = None
    rest: bool = False


def grid(
    columns: Sequence[Column], entries: Sequence[Entry], width: int, look: Look, *, fold: bool = False, gap: int = 1
) -> list[list[Line]]:
    """The head and one row an entry, each of one line, or of more where a long text is folded (`fold`) and not cut."""
    cells = {column.head: [printable(column.text(entry)) for entry in entries] for column in columns if not column.part}
    widths = _widths(columns, cells, width, gap)
    shown = [column for column in columns if column.head in widths]
    rows = [[_line(shown, widths, [column.head for column in shown], ["head"] * len(shown), gap)]]
    for number, entry in enumerate(entries):
        styles = [column.style(entry) for column in shown]
        texts = [
            _bar(column.part(entry), widths[column.head], look) if column.part else cells[column.head][number]
            for column in shown
        ]
        rows.append(
            [_line(shown, widths, part, styles, gap) for part in _fitted(texts, shown, widths, look, fold=fold)]
        )
    return rows


def lines_of(rows: Sequence[Sequence[Line]]) -> list[Line]:
    """All lines of a grid."""
    return [line for row in rows for line in row]


def cut_line(line: Line, width: int, look: Look) -> Line:
    """The line in at most `width` characters."""
    kept: Line = []
    room = width
    for text, style in line:
        if room > 0:
            kept.append((cut(text, room, look), style))
            room -= len(kept[-1][0])
    return kept


def as_text(line: Line) -> Text:
    """The line for a stream; its end has no spaces, so that a copy or a pipe has none."""
    text = Text.assemble(*((part, STYLES[style]) for part, style in line), no_wrap=True)
    text.rstrip()
    return text


def _bar(part: float | None, width: int, look: Look) -> str:
    return " " * width if part is None else bar(part, width, look)


def _widths(columns: Sequence[Column], cells: Mapping[str, Sequence[str]], width: int, gap: int) -> dict[str, int]:
    """The columns that are shown, by head, and their widths."""
    wanted = {
        column.head: min(column.widest, max(map(cell_len, (column.head, *cells[column.head]))))
        if column.part is None
        else _LEAST_BAR
        for column in columns
    }
    ranks = {column.head: column.rank for column in columns}
    for column in columns:
        if column.rest:
            wanted[column.head] = min(wanted[column.head], len(column.head) + 8)
    while sum(wanted.values()) + gap * (len(wanted) - 1) > width:
        expendable = [head for head in wanted if ranks[head]]
        if not expendable:
            break
        del wanted[max(expendable, key=lambda head: ranks[head])]
    left = max(0, width - sum(wanted.values()) - gap * (len(wanted) - 1))
    for column in columns:
        if column.head in wanted and (column.part or column.rest):
            full = _WIDEST_BAR if column.part else max(map(cell_len, (column.head, *cells[column.head])))
            more = min(left, max(0, full - wanted[column.head]))
            wanted[column.head] += more
            left -= more
    return wanted


def _fitted(
    texts: Sequence[str], shown: Sequence[Column], widths: Mapping[str, int], look: Look, *, fold: bool
) -> Iterator[Sequence[str]]:
    """The texts of a row, in as many lines as its longest needs."""
    parts = []
    for text, column in zip(texts, shown, strict=True):
        width = widths[column.head]
        parts.append(chop_cells(text, width) if fold and not column.rest else [cut(text, width, look)])
    for number in range(max(map(len, parts), default=0)):
        yield [part[number] if number < len(part) else "" for part in parts]


def _line(
    shown: Sequence[Column], widths: Mapping[str, int], texts: Sequence[str], styles: Sequence[str], gap: int
) -> Line:
    line: Line = []
    for number, (column, text, style) in enumerate(zip(shown, texts, styles, strict=True)):
        width = widths[column.head]
        space = " " * gap if number else ""
        room = " " * max(0, width - cell_len(text))
        if column.left or column.part:
            line.append((space, ""))
            line.append((text, style))
            line.append((room, ""))
        else:
            line.append((space + room, ""))
            line.append((text, style))
    return [(text, style) for text, style in line if text]
