"""The screen of `top` as lines: four lists with a row selected in each, below a headline and what is wrong.

It knows nothing of the terminal: producer/monitor/top.py draws it and passes on the keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from producer.monitor.columns import EVENTS, ON_SCREEN, ON_SMALL_SCREEN, SERVERS, WORKERS, details, headline, troubles
from producer.monitor.figures import Look, cut, printable
from producer.monitor.grid import Column, Entry, Line, cut_line, grid

LEAST_WIDTH, LEAST_HEIGHT = 60, 16
KEYS = "q quit  p pause  r resume  c cap  d drain worker  Enter sample  Tab next list"
_WIDE = 100
# Of datasets, workers, servers and events, as long as there is room.
_LEAST_LINES = (5, 3, 3, 3)


class Pane:
    """One list: its head, and as many rows as there is room for, around the selected one."""

    def __init__(self, name: str, columns: Sequence[Column], key: str) -> None:
        """`name` is a list of the snapshot, `key` what tells its entries from each other."""
        self.name = name
        self._columns = columns
        self._key = key
        self.entries: Sequence[Entry] = ()
        self._selected: Any = None
        self._top = 0

    @property
    def at(self) -> int:
        """The number of the selected entry; the first where the selected one is gone."""
        return next((n for n, entry in enumerate(self.entries) if entry[self._key] == self._selected), 0)

    @property
    def selected(self) -> Entry | None:
        """The selected entry; None in an empty list."""
        return self.entries[self.at] if self.entries else None

    def move(self, steps: int) -> None:
        """Select the entry `steps` below, or the last one there is."""
        if self.entries:
            self._selected = self.entries[max(0, min(len(self.entries) - 1, self.at + steps))][self._key]

    def lines(self, width: int, height: int, look: Look, *, focused: bool) -> list[Line]:
        """The head and `height - 1` rows at most."""
        columns = ON_SMALL_SCREEN if self._columns is ON_SCREEN and width < _WIDE else self._columns
        head, *rows = (row[0] for row in grid(columns, self.entries, width - 1, look))
        room, at = height - 1, self.at
        self._top = max(0, min(self._top, at, len(rows) - room))
        self._top = max(self._top, at - room + 1)
        end = self._top + room
        lines: list[Line] = [[(" ", ""), *head]]
        where = f"{self._top + 1}-{end} of {len(rows)}"
        taken = sum(len(text) for text, _ in head) + len(where) + 2
        if end < len(rows) and taken <= width:
            lines[0] += [(" " * (width - taken + 1), ""), (where, "dim")]
        for number, row in enumerate(rows[self._top : end], self._top):
            if focused and number == at:
                lines.append([(">", "selected"), *((text, "selected") for text, _ in row)])
                continue
            more = "^" if number == self._top > 0 else "v" if number == end - 1 < len(rows) - 1 else " "
            lines.append([(look.dot if number == at else more, "dim"), *row])
        return lines


class Board:
    """The lists of one snapshot after the other."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self.datasets = Pane("datasets", ON_SCREEN, "name")
        self.workers = Pane("workers", WORKERS, "name")
        self.servers = Pane("servers", SERVERS, "url")
        self.events = Pane("events", EVENTS, "at")
        self._panes = (self.datasets, self.workers, self.servers, self.events)
        self.focus = self.datasets
        self.seen: Mapping[str, Any] | None = None
        self.rates: list[float] = []
        self.lost = ""  # what to say while Redis is away
        self.notice = ""  # what an action has answered

    def show(self, seen: Mapping[str, Any]) -> None:
        """Take a snapshot in."""
        self.seen = seen
        self.rates = [*self.rates[-600:], seen["totals"]["tokens_per_second"]]
        for pane in self._panes:
            pane.entries = seen[pane.name]
        self.events.entries = seen["events"][::-1]  # the newest first

    def next_pane(self, step: int = 1) -> None:
        """Let the keys go to the next list that has entries."""
        for _ in self._panes:
            self.focus = self._panes[(self._panes.index(self.focus) + step) % len(self._panes)]
            if self.focus.entries:
                return

    def lines(self, width: int, height: int) -> list[Line]:
        """The whole screen: `height` lines at most, none wider than `width`."""
        if width < LEAST_WIDTH or height < LEAST_HEIGHT:
            small = f"this terminal has {width} x {height} characters", f"top needs {LEAST_WIDTH} x {LEAST_HEIGHT}"
            return [[(cut(text, width, self._look), "")] for text in (*small, "make it larger, or press q")][:height]
        if self.seen is None:
            return [[("waiting for the first figures", "")]]
        wrong = [self.lost] if self.lost else []
        wrong += troubles(self.seen)
        most = max(1, height // 8)
        if len(wrong) > most:
            wrong = [*wrong[: most - 1], f"{len(wrong) - most + 1} more: {wrong[most - 1]}"]
        above: list[Line] = [headline(self.seen, self.rates, width, self._look)]
        above += [[(f"! {printable(one)}", "bad" if self.lost else "warn")] for one in wrong]
        below: list[Line] = [[(printable(self.notice), "head")]] if self.notice else []
        below.append([(KEYS, "dim")])
        selected = self.datasets.selected
        about: list[Line] = [[("nothing was enqueued yet", "")]]
        if selected is not None:
            about = details(selected, width, self._look)[: height // 6]
        heights = self._heights(height - len(above) - len(about) - len(below))
        lists = [
            pane.lines(width, rows, self._look, focused=pane is self.focus) if rows else []
            for pane, rows in zip(self._panes, heights, strict=True)
        ]
        middle = [*lists[0], *about, *lists[1], *lists[2], *lists[3]]
        blank: list[Line] = [[] for _ in range(height - len(above) - len(middle) - len(below))]
        return [cut_line(line, width, self._look) for line in (*above, *middle, *blank, *below)]

    def _heights(self, room: int) -> list[int]:
        """How many lines each list gets, its head included: a few for each, then the first ones what they need."""
        wanted = [len(pane.entries) + 1 if pane.entries else 0 for pane in self._panes]
        heights = [min(one, least) for one, least in zip(wanted, _LEAST_LINES, strict=True)]
        for number in reversed(range(len(heights))):
            # A head without a row says nothing.
            while sum(heights) > room and heights[number]:
                heights[number] -= 1 if heights[number] > 2 else heights[number]
        for number, one in enumerate(wanted):
            heights[number] += max(0, min(one - heights[number], room - sum(heights)))
        return heights
