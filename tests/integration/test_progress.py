"""The progress of `run` and `enqueue --wait`: bars at the end of a terminal, through a resize; lines in a pipe."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from common.ledger import Ledger
from producer.monitor.progress import Progress
from producer.status import snapshot
from tests.terminals import Terminal
from tests.watched import begin, move

UP_AND_ERASED = "\x1b[1A\x1b[2K"


def console_of(width: int, height: int = 24, *, is_terminal: bool = True) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    return Console(file=stream, width=width, height=height, force_terminal=is_terminal, color_system=None), raw


def taken(raw: io.BytesIO) -> str:
    """What was written since it was last asked."""
    text = raw.getvalue().decode()
    raw.seek(0)
    raw.truncate()
    return text


def shown_lines(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9?]*[A-Za-z]|\r", "", text).split("\n")


def test_each_frame_stands_in_the_place_of_the_last(ledger: Ledger) -> None:
    begin(ledger)
    console, raw = console_of(80)
    progress = Progress(console)
    with progress.shown():
        taken(raw)
        progress.show(snapshot(ledger))
        first = taken(raw)
        lines = shown_lines(first)
        assert [line.split()[0] for line in lines] == ["dataset", "D0", "D1", "D2", "120"]
        assert all(len(line) <= 80 for line in lines)
        assert UP_AND_ERASED not in first
        move(ledger, 1)
        progress.show(snapshot(ledger))
        second = taken(raw)
        assert second.startswith("\r\x1b[2K" + 4 * UP_AND_ERASED)
        assert shown_lines(second)[-1].startswith("240 samples")
        console.print("said meanwhile")
        assert shown_lines(taken(raw))[:2] == ["said meanwhile", shown_lines(second)[0]]
    last = taken(raw)
    assert last.startswith("\r\x1b[2K" + 4 * UP_AND_ERASED)
    assert "D0" not in last


def test_a_terminal_made_narrower_has_more_rows_to_take_back(ledger: Ledger) -> None:
    begin(ledger)
    console, raw = console_of(80)
    progress = Progress(console)
    with progress.shown():
        progress.show(snapshot(ledger))
        widths = [len(line) for line in shown_lines(taken(raw))]
        console.width = 50
        progress.show(snapshot(ledger))
        text = taken(raw)
        rows = sum(-(-width // 50) for width in widths)
        assert rows > len(widths)
        assert text.count(UP_AND_ERASED) == rows - 1
        assert all(len(line) <= 50 for line in shown_lines(text))


def test_more_datasets_than_rows_are_counted(ledger: Ledger) -> None:
    begin(ledger, datasets=30)
    for number in range(20):
        ledger.transition(f"D{number}", "capped", ["open"])
    console, raw = console_of(80, 20)
    progress = Progress(console)
    with progress.shown():
        taken(raw)
        progress.show(snapshot(ledger))
        lines = shown_lines(taken(raw))
    assert len(lines) < 20
    assert [line.split()[0] for line in lines[1:11]] == [f"D{number}" for number in range(20, 30)]
    assert lines[11] == "and 20 more; `tokenmill status` shows them"


def test_what_is_logged_stands_above_the_bars(ledger: Ledger) -> None:
    begin(ledger)
    console, raw = console_of(80)
    progress = Progress(console)
    before = sys.stderr
    with progress.shown():
        progress.show(snapshot(ledger))
        taken(raw)
        print("a warning", file=sys.stderr)
        assert shown_lines(taken(raw))[0] == "a warning"
    assert sys.stderr is before


@pytest.mark.parametrize("term", ["", "dumb"])
def test_in_a_pipe_and_on_a_dumb_terminal_there_are_lines(ledger: Ledger, term: str) -> None:
    begin(ledger)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    console = Console(file=stream, force_terminal=bool(term), _environ={"TERM": term, "COLUMNS": "40"})
    progress = Progress(console, line_seconds=0)
    with progress.shown():
        progress.show(snapshot(ledger))
        progress.show(snapshot(ledger))
    line = "120 samples, 202,860 tokens, 330 tokens/s, 0 in flight, 3 rejected, 3 datasets open\n"
    assert re.sub("[0-9,]+ tokens,", "N tokens,", taken(raw)) == 2 * re.sub("[0-9,]+ tokens,", "N tokens,", line)
    progress = Progress(console)
    with progress.shown():
        progress.show(snapshot(ledger))
    assert taken(raw) == ""


# Shows bars for as long as it runs; its argument is the address of Redis.
CHILD = """
import sys, time
from rich.console import Console
from common.ledger import Ledger
from producer.monitor.progress import Progress
from producer.status import snapshot

ledger = Ledger.connect(sys.argv[1])
progress = Progress(Console(file=sys.stderr))
with progress.shown():
    while snapshot(ledger)["datasets"]:
        progress.show(snapshot(ledger))
        time.sleep(0.02)
print("done", file=sys.stderr)
"""


def test_in_a_real_terminal_the_bars_follow_its_size(tmp_path: Path, valkey: str, ledger: Ledger) -> None:
    begin(ledger)
    kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    terminal = Terminal([sys.executable, "-c", CHILD, valkey], tmp_path, kept | {"TERM": "xterm"}, 100, 30)
    try:
        terminal.wait_for("the bars are there", lambda: re.search("samples +flight", terminal.text()))
        terminal.resize(45, 20)
        at = len(terminal.written)
        terminal.wait_for(
            "they are narrower",
            lambda: len(terminal.written) > at + 4000 and not re.search("samples +flight", terminal.text(at + 2000)),
        )
        ledger.redis.flushall()
        assert terminal.end() == 0
        last = terminal.text(since=len(terminal.written) - 400)
        assert last.rstrip().endswith("done")
        assert terminal.written.rindex(b"\x1b[?25h") > terminal.written.rindex(b"\x1b[?25l")
    finally:
        terminal.close()
