"""`tokenmill top`: the live screen."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import redis
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.message import Message

from common.errors import TokenmillError
from common.ledger import Ledger
from common.settings import Settings
from producer.monitor.actions import Actions
from producer.monitor.board import Board
from producer.monitor.figures import PLAIN, Look
from producer.monitor.grid import Entry, Line
from producer.monitor.lines import LinesWidget
from producer.monitor.looking import Looker
from producer.monitor.screens import AskScreen, CapScreen, SampleScreen
from producer.monitor.watcher import Watcher

if TYPE_CHECKING:
    from common.chat_template import Tokenizer
    from common.segments import Entry as SegmentEntry

# How long a snapshot may take before it is said that Redis does not answer.
_SILENT_SECONDS = 3.0
_NOTICE_SECONDS = 10.0


class Seen(Message):
    """A snapshot."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        super().__init__()
        self.snapshot = snapshot


class Lost(Message):
    """Why there is no snapshot."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error


class BoardWidget(LinesWidget):
    """The whole screen. The keys are its own, so that a window above it has others."""

    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "app.quit"),
        ("p", "app.pause"),
        ("r", "app.resume"),
        ("c", "app.cap"),
        ("d", "app.drain"),
        ("enter", "app.sample"),
        ("tab", "app.pane(1)"),
        ("shift+tab", "app.pane(-1)"),
        ("up,k", "app.move(-1)"),
        ("down,j", "app.move(1)"),
        ("pageup", "app.move(-10)"),
        ("pagedown", "app.move(10)"),
        ("home", "app.move(-1000000)"),
        ("end", "app.move(1000000)"),
    ]

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def made(self, width: int, height: int) -> list[Line]:
        return self._board.lines(width, height)


class Top(App[None]):
    """Shows snapshots, and carries out what the keys ask."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [("ctrl+c", "quit")]

    def __init__(self, settings: Settings, ledger: Ledger, look: Look) -> None:
        """`ledger` is the watcher's own from now on."""
        super().__init__(ansi_color=True)
        self._settings = settings
        self._look = look
        self._actions = Actions(settings)
        self._board = Board(look)
        self._widget = BoardWidget(self._board)
        self._seen_at = time.monotonic()
        self._noticed_at = 0.0
        self._watcher = Watcher(
            ledger, lambda seen: self.post_message(Seen(seen)), lambda error: self.post_message(Lost(error))
        )
        self._tokenizer = cache(lambda: load_tokenizer(settings))

    def compose(self) -> ComposeResult:
        yield self._widget

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Not in a thread, and not everywhere.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._watcher.start()
        self.set_interval(1.0, self._look_at_the_clock)

    def on_unmount(self) -> None:
        self._watcher.stop()

    # What is seen

    def on_seen(self, message: Seen) -> None:
        self._seen_at = time.monotonic()
        self._board.lost = ""
        self._board.show(message.snapshot)
        self._widget.changed()

    def on_lost(self, message: Lost) -> None:
        self._lose(message.error)

    def _look_at_the_clock(self) -> None:
        silent = time.monotonic() - self._seen_at
        if silent > _SILENT_SECONDS and not self._board.lost:
            self._lose("Redis does not answer")
        if self._board.notice and time.monotonic() - self._noticed_at > _NOTICE_SECONDS:
            self._board.notice = ""
            self._widget.changed()

    def _lose(self, what: str) -> None:
        then = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - self._seen_at)))
        self._board.lost = f"{what}; these figures are of {then}, and it is asked again every second"
        self._widget.changed()

    # What is asked

    def action_move(self, steps: int) -> None:
        self._board.focus.move(steps)
        self._widget.changed()

    def action_pane(self, step: int) -> None:
        self._board.next_pane(step)
        self._widget.changed()

    def action_pause(self) -> None:
        self._steer(lambda dataset: self._actions.pause(dataset["name"]))

    def action_resume(self) -> None:
        self._steer(lambda dataset: self._actions.resume(dataset["name"]))

    def action_cap(self) -> None:
        dataset = self._board.datasets.selected
        if dataset is None:
            self._say("there is no dataset yet")
            return

        def act(text: str | None) -> None:
            if text is not None:
                self._in_thread(lambda: self._actions.cap(dataset["name"], text, dataset["cap_tokens"]))

        self.push_screen(CapScreen(dataset), act)

    def action_drain(self) -> None:
        worker = self._board.workers.selected
        if worker is None:
            self._say("there is no worker")
            return
        if self._board.focus is not self._board.workers:
            self._board.focus = self._board.workers
            self._say("select the worker, then press d again")
            return

        def act(sure: bool | None) -> None:
            if sure:
                self._in_thread(lambda: self._actions.drain(worker["name"]))

        question = f"Let {worker['name']} end what it has in flight ({worker.get('in_flight', 0):,}), and then itself?"
        self.push_screen(AskScreen(question), act)

    def action_sample(self) -> None:
        dataset = self._board.datasets.selected
        if dataset is None:
            self._say("there is no dataset yet")
            return
        self.push_screen(SampleScreen(Samples(self._settings, dataset["name"], self._tokenizer).lines, self._look))

    def _steer(self, act: Callable[[Entry], str]) -> None:
        dataset = self._board.datasets.selected
        if dataset is None:
            self._say("there is no dataset yet")
        else:
            self._in_thread(lambda: act(dataset))

    def _in_thread(self, act: Callable[[], str]) -> None:
        def work() -> None:
            sentence = act()
            self._watcher.look_now()
            with contextlib.suppress(RuntimeError):  # the screen was left meanwhile
                self.call_from_thread(self._say, sentence)

        self.run_worker(work, thread=True)

    def _say(self, sentence: str) -> None:
        self._board.notice, self._noticed_at = sentence, time.monotonic()
        self._widget.changed()


class Samples:
    """Samples of one dataset, decoded; `tokenizer` loads it when it is first wanted, which takes seconds."""

    def __init__(self, settings: Settings, dataset: str, tokenizer: Callable[[], "Tokenizer"]) -> None:
        self._settings = settings
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._entry: SegmentEntry | None = None

    def lines(self, which: str, ids: bool) -> Sequence[Line]:
        """The newest, any, or the newest truncated one, or the same `again`; a sentence where there is none."""
        from producer.monitor.sample import read_sample, told  # noqa: PLC0415 - with the tokenizer's libraries

        try:
            if which != "again" or self._entry is None:
                self._entry = self._found(which)
            return told(read_sample(self._entry, self._tokenizer()), ids=ids)
        except (TokenmillError, redis.RedisError, OSError) as error:
            return [[(str(error), "warn")]]

    def _found(self, which: str) -> "SegmentEntry":
        with closing(Ledger.connect(self._settings.redis_url)) as ledger:
            looker = Looker(self._settings, ledger, self._dataset)
            return looker.drawn() if which == "any" else looker.newest("truncated" if which == "truncated" else None)


def load_tokenizer(settings: Settings) -> "Tokenizer":
    """The job's tokenizer. Raises TokenizerUnavailable."""
    from common.chat_template import Tokenizer  # noqa: PLC0415 - only who opens a sample waits for it

    return Tokenizer(settings.tokenizer)


def watch(settings: Settings, ledger: Ledger, look: Look) -> None:
    """Show the screen until it is left."""
    if look is PLAIN:
        os.environ.setdefault("NO_COLOR", "1")
    for name in ("COLUMNS", "LINES"):  # the terminal itself knows its size better, and when it changes
        os.environ.pop(name, None)
    Top(settings, ledger, look).run(mouse=False)  # so that text can be selected and copied
