"""The windows of `top`: the question for a cap, the question whether to drain, and one sample."""

import contextlib
from collections.abc import Callable, Sequence

from rich.cells import cell_len, chop_cells
from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from producer.monitor.actions import what_a_cap_does
from producer.monitor.figures import Look, cut
from producer.monitor.grid import Entry, Line
from producer.monitor.lines import LinesWidget

_PAGE_KEYS = "Esc back  n newest  r any other  t truncated  i ids  arrows, PgUp, PgDn, Home, End"


class CapScreen(ModalScreen[str | None]):
    """Asks for a cap, and says what it would do; answers what was typed, or None."""

    DEFAULT_CSS = """
    CapScreen { align: center middle; }
    CapScreen Vertical { width: 76; max-width: 100%; height: auto; border: ascii; padding: 0 1; }
    CapScreen Input, CapScreen Input:focus { border: none; height: 1; padding: 0; }
    CapScreen Label { width: 100%; }
    """

    def __init__(self, dataset: Entry) -> None:
        super().__init__()
        self._dataset = dataset

    def compose(self) -> ComposeResult:
        dataset = self._dataset
        cap = "no cap" if dataset["cap_tokens"] is None else f"a cap of {dataset['cap_tokens']:,}"
        with Vertical():
            spent = f"{dataset['spent_tokens']:,} are spent"
            yield Label(f"{dataset['name']} has {cap} {dataset['count']} tokens; {spent}", markup=False)
            yield Label("Its new cap, as 12000000, 12M, +500k or none (Esc: as it is):", markup=False)
            yield Input(id="cap")
            yield Label("", id="what", markup=False)

    def on_input_changed(self, changed: Input.Changed) -> None:
        text = what_a_cap_does(self._dataset, changed.value) if changed.value.strip() else ""
        self.query_one("#what", Label).update(text)

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        self.dismiss(submitted.value if submitted.value.strip() else None)

    def key_escape(self) -> None:
        self.dismiss(None)


class AskScreen(ModalScreen[bool]):
    """A question that `y` answers with yes, and any other key with no."""

    DEFAULT_CSS = """
    AskScreen { align: center middle; }
    AskScreen Label { width: 76; max-width: 100%; height: auto; border: ascii; padding: 0 1; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(f"{self._question} (y: yes, any other key: no)", markup=False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss(event.key == "y")


class SampleScreen(ModalScreen[None]):
    """One sample after the other; `load` gives the lines of one, from a thread: it may take seconds."""

    def __init__(self, load: Callable[[str, bool], Sequence[Line]], look: Look) -> None:
        """`load` is called with newest, any or truncated, or again for the same sample, and whether to show the ids."""
        super().__init__()
        self._load = load
        self._look = look
        self._pager = Pager(look)
        self._ids = False

    def compose(self) -> ComposeResult:
        yield self._pager

    def on_mount(self) -> None:
        self._ask("newest")

    def _ask(self, which: str) -> None:
        self._pager.show([[("looking for it, and loading the tokenizer", "")]])
        self.run_worker(lambda: self._fetch(which), thread=True, exclusive=True)

    def _fetch(self, which: str) -> None:
        lines = self._load(which, self._ids)
        with contextlib.suppress(RuntimeError):  # the screen was left meanwhile
            self.app.call_from_thread(self._pager.show, lines)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        which = {"n": "newest", "r": "any", "t": "truncated"}.get(event.key)
        if which is not None:
            self._ask(which)
        elif event.key == "i":
            self._ids = not self._ids
            self._ask("again")
        elif event.key in {"escape", "q", "ctrl+c"}:
            self.dismiss(None)
        else:
            self._pager.scroll_by(event.key)


class Pager(LinesWidget):
    """Long lines, broken at the edge of the screen, with a line of keys below."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look
        self._whole: Sequence[Line] = ()
        self._top = 0

    def show(self, lines: Sequence[Line]) -> None:
        """Show these, from the first."""
        self._whole, self._top = lines, 0
        self.changed()

    def scroll_by(self, key: str) -> None:
        """Move as the key says."""
        page = max(1, self.size.height - 2)
        steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": page, "space": page, "pageup": -page}
        steps |= {"home": -self._top, "end": 1_000_000_000}
        if key in steps:
            self._top = max(0, self._top + steps[key])
            self.changed()

    def made(self, width: int, height: int) -> list[Line]:
        lines = [part for line in self._whole for part in _broken(line, width)]
        room = max(1, height - 1)
        self._top = max(0, min(self._top, len(lines) - room))
        shown = lines[self._top : self._top + room]
        where = f"  {self._top + 1}-{self._top + len(shown)} of {len(lines)}"
        keys = cut(_PAGE_KEYS, max(0, width - len(where)), self._look)
        return [*shown, *([] for _ in range(room - len(shown))), [(keys + where, "dim")]]


def _broken(line: Line, width: int) -> list[Line]:
    """The line in parts of at most `width` cells."""
    parts: list[Line] = [[]]
    room = width
    for text, style in line:
        for number, piece in enumerate(_pieces(text.expandtabs(4), room, width)):
            if number:
                parts.append([])
                room = width
            parts[-1].append((piece, style))
            room -= cell_len(piece)
    return parts


def _pieces(text: str, room: int, width: int) -> list[str]:
    first = chop_cells(text, room)[0] if room > 0 and text else ""
    if cell_len(first) > room:
        first = ""
    rest = text[len(first) :]
    return [first, *chop_cells(rest, width)] if rest else [first]
