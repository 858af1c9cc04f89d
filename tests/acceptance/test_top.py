"""`tokenmill top` in a real terminal: it comes up, can be left in every way, and leaves the terminal as it was."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.ledger import Ledger
from tests.acceptance.commands import TOKENMILL, environment, tokenmill
from tests.lines import write_config
from tests.terminals import Terminal
from tests.watched import begin

ALTERNATE_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def top(
    folder: Path, valkey: str, variables: Mapping[str, str], size: tuple[int, int] = (80, 24)
) -> Iterator[Terminal]:
    config = write_config(folder, valkey)
    terminal = Terminal([*TOKENMILL, "top", "-c", str(config)], folder, environment(folder, **variables), *size)
    try:
        yield terminal
    finally:
        terminal.close()


def assert_left_clean(terminal: Terminal) -> None:
    assert terminal.end() == 0
    assert terminal.is_restored()
    assert terminal.written.rindex(MAIN_SCREEN) > terminal.written.rindex(ALTERNATE_SCREEN)
    assert SHOW_CURSOR in terminal.written[terminal.written.rindex(ALTERNATE_SCREEN) :]
    assert b"Traceback" not in terminal.written


@pytest.mark.parametrize("leave", ["q", "\x03", "TERM"])
def test_it_comes_up_and_leaves_the_terminal_as_it_was(tmp_path: Path, valkey: str, ledger: Ledger, leave: str) -> None:
    begin(ledger)
    with top(tmp_path, valkey, {"TERM": "xterm-256color"}) as terminal:
        terminal.wait_for("the figures are there", lambda: "D2 " in terminal.text() and "gpu1" in terminal.text())
        assert not terminal.is_restored()
        if leave == "TERM":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.type(leave)
        assert_left_clean(terminal)


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "vt100"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_it_works_without_colours(tmp_path: Path, valkey: str, ledger: Ledger, variables: dict[str, str]) -> None:
    begin(ledger)
    with top(tmp_path, valkey, variables) as terminal:
        terminal.wait_for("the figures are there", lambda: "D2 " in terminal.text())
        terminal.type("q")
        assert_left_clean(terminal)
        sets_colour = [part for part in terminal.written.split(b"\x1b[")[1:] if part.partition(b"m")[0] in COLOURS]
        assert sets_colour == []


# SGR sequences that set one of the eight colours, and nothing else.
COLOURS = {str(code).encode() for base in (30, 40, 90, 100) for code in range(base, base + 8)}


def test_it_follows_the_size_of_the_terminal(tmp_path: Path, valkey: str, ledger: Ledger) -> None:
    begin(ledger)
    with top(tmp_path, valkey, {"TERM": "xterm"}, (100, 30)) as terminal:
        terminal.wait_for("the figures are there", lambda: "D2 " in terminal.text())
        terminal.resize(50, 12)
        terminal.wait_for("it says that it is too small", lambda: "this terminal has 50 x 12" in terminal.text())
        at = len(terminal.written)
        terminal.resize(80, 24)
        terminal.wait_for("the figures are back", lambda: "D2 " in terminal.text(since=at))
        terminal.type("q")
        assert_left_clean(terminal)


def test_without_a_terminal_it_says_what_to_use(tmp_path: Path, valkey: str, ledger: Ledger) -> None:
    write_config(tmp_path, valkey)
    done = tokenmill("top", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tokenmill: top needs a terminal for its input and its output; use `tokenmill status --follow` in a pipe\n"
    )


def test_where_nothing_runs_it_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    terminal = Terminal([*TOKENMILL, "top", "-c", str(config)], tmp_path, environment(tmp_path, TERM="xterm"))
    try:
        assert terminal.end() == 2
        assert "nothing runs on " in terminal.text()
        assert ALTERNATE_SCREEN not in terminal.written
    finally:
        terminal.close()
