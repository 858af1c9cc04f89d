"""The progress of `run` and `enqueue --wait`: bars that stay at the end of a terminal, lines now and then in a pipe."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text

from common.ledger import ENDED_STATES
from producer import display
from producer.monitor.columns import PROGRESS, troubles
from producer.monitor.figures import cut, duration, look_of, printable
from producer.monitor.grid import as_text, grid, lines_of

_LINE_SECONDS = 10.0


class Progress:
    """Shows snapshots, one after the other, in the way that suits the console."""

    def __init__(self, console: Console, line_seconds: float = _LINE_SECONDS) -> None:
        """Where bars cannot be shown there is a line every `line_seconds`."""
        self._console = console
        self._line_seconds = line_seconds
        self._said = time.monotonic()
        # A dumb terminal cannot go back to what it has written.
        self._pinned = _Pinned(console) if console.is_terminal and not console.is_dumb_terminal else None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """From here to the end of the block; the bars are gone afterwards."""
        if self._pinned is None:
            yield
            return
        with self._pinned.shown():
            yield

    def show(self, seen: Mapping[str, Any]) -> None:
        """Show this snapshot in place of the last."""
        if self._pinned is not None:
            self._pinned.show(lambda options: frame(seen, self._console, options))
        elif time.monotonic() - self._said >= self._line_seconds:
            self._said = time.monotonic()
            for line in (display.line(seen), *(f"! {trouble}" for trouble in seen["troubles"])):
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def frame(seen: Mapping[str, Any], console: Console, options: ConsoleOptions) -> list[Text]:
    """The bars, what all datasets make together, and what is wrong: never as high as the terminal.

    Where there is no room for all datasets, those that have ended are left out first, and are counted.
    """
    width, look = options.max_width, look_of(console.file)
    wrong = [Text(cut(f"! {printable(one)}", width, look), style="yellow") for one in troubles(seen)]
    wrong = wrong[: max(1, options.size.height // 4)]
    datasets = seen["datasets"]
    room = options.size.height - len(wrong) - 4
    shown = datasets if len(datasets) <= room else [d for d in datasets if d["state"] not in ENDED_STATES][:room]
    lines = [as_text(line) for line in lines_of(grid(PROGRESS, shown, width, look))]
    if left_out := len(datasets) - len(shown):
        lines.append(Text(f"and {left_out} more; `tokenmill status` shows them", style="dim", no_wrap=True))
    totals = seen["totals"]
    all_of_it = f"{display.line(seen)}, ends in {duration(totals['eta_seconds'])}"
    return [*lines, Text(cut(all_of_it, width, look), style="bold"), *wrong]


class _Pinned(RenderHook):
    """Lines that stay below whatever else is printed.

    rich.live does that, too, and leaves torn lines behind when the terminal is made narrower: terminals then break the
    lines that are there, so that what has to be taken back has more rows than were written.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._make: Any = None
        self._widths: list[int] = []  # of the lines that stand there, in characters

    @contextmanager
    def shown(self) -> Iterator[None]:
        before = sys.stderr
        # What is logged meanwhile goes above the lines.
        sys.stderr = FileProxy(self._console, before)
        self._console.push_render_hook(self)
        self._console.show_cursor(False)
        try:
            yield
        finally:
            self._make = None
            self._console.print(Control())
            self._console.pop_render_hook()
            self._console.show_cursor(True)
            sys.stderr = before

    def show(self, make: Any) -> None:
        """Show the lines that `make` gives for the console's options."""
        self._make = make
        self._console.print(Control())

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Raw(self._back()), *renderables, self]

    def _back(self) -> str:
        """To the first row of the lines that stand there, each row erased.

        Row by row: tmux keeps a copy of what is erased at one stroke from the top of the screen.
        """
        width = self._console.width
        rows = sum(max(1, math.ceil(one / width)) for one in self._widths)
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (rows - 1) if rows else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        made: Sequence[RenderableType] = self._make(options) if self._make else ()
        lines = [line for one in made for line in console.render_lines(one, options, pad=False)]
        self._widths = [sum(part.cell_length for part in line) for line in lines]
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line


class _Raw:
    """Text that steers the terminal."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        if self._text:
            yield Segment(self._text, None, [(ControlType.CARRIAGE_RETURN,)])
