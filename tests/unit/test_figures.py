"""Figures, bars and tables as they stand in status and on the screen of top."""

import io
from typing import Any

import pytest

from producer.monitor.figures import PLAIN, RICH, bar, cut, duration, look_of, printable, share, short, sparkline
from producer.monitor.grid import Column, Line, grid, lines_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (990, "16m30s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (360_000, "100h00m"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (9999.5, "10.0k"),
        (12_345, "12.3k"),
        (99_949, "99.9k"),
        (999_499, "999k"),
        (999_500, "1.00M"),
        (123_456_789, "123M"),
        (1_234_567_890, "1.23G"),
    ],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


def test_shares() -> None:
    assert [share(452, 1000), share(1032, 1000), share(5, None)] == ["45.2%", "103.2%", "no cap"]


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "····"), (0.0001, "▏···"), (0.5, "██··"), (0.53, "██▏·"), (0.9999, "███▉"), (1.0, "████"), (1.3, "████")],
)
def test_a_bar_tells_nothing_from_almost_nothing_and_all_from_almost_all(part: float, text: str) -> None:
    assert bar(part, 4, RICH) == text


def test_bars_of_ascii() -> None:
    assert [bar(part, 4, PLAIN) for part in (0.0, 0.5, 0.99, 1.0)] == ["----", "##--", "###-", "####"]


def test_a_sparkline_shows_the_last_values_and_tells_little_from_nothing() -> None:
    assert sparkline([9, 0, 1, 50, 100], 4, RICH) == " ▁▄█"
    assert sparkline([100], 3, RICH) == "  █"
    assert sparkline([0, 0], 2, RICH) == "  "
    assert sparkline([1, 2], 0, RICH) == ""


def test_a_text_that_is_cut_says_so() -> None:
    assert [cut("abcdef", width, RICH) for width in (6, 5, 1, 0)] == ["abcdef", "abcd…", "…", ""]


def test_what_would_steer_a_terminal_is_written_out() -> None:
    assert printable("ä\x1b[2J\n\u202eb") == r"ä\x1b[2J\n\u202eb"


@pytest.mark.parametrize(
    ("encoding", "term", "is_plain"),
    [("utf-8", "xterm", False), ("UTF8", "", False), ("ascii", "xterm", True), ("utf-8", "vt100", True)],
)
def test_the_look_is_what_stream_and_terminal_can_show(encoding: str, term: str, is_plain: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert (look_of(stream, {"TERM": term}) is PLAIN) == is_plain


# Tables

COLUMNS = (
    Column("name", lambda e: e["name"], left=True, widest=6),
    Column("", part=lambda e: e["part"], rank=1),
    Column("n", lambda e: str(e["n"])),
    Column("more", lambda e: e["more"], rank=2),
)
ENTRIES: list[dict[str, Any]] = [
    {"name": "abcdefgh", "part": 0.5, "n": 1, "more": "x"},
    {"name": "b", "part": None, "n": 222, "more": "y"},
]


def texts(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def test_a_bar_takes_what_is_left_of_the_width() -> None:
    assert texts(lines_of(grid(COLUMNS, ENTRIES, 26, RICH))) == [
        "name                n more",
        "abcde… █████·····   1    x",
        "b                 222    y",
    ]


def test_the_least_needed_columns_are_left_out_first() -> None:
    assert texts(lines_of(grid(COLUMNS, ENTRIES, 17, RICH))) == [
        "name            n",
        "abcde… ███···   1",
        "b             222",
    ]
    assert texts(lines_of(grid(COLUMNS, ENTRIES, 10, RICH))) == ["name     n", "abcde…   1", "b      222"]


def test_a_long_text_is_folded_where_nothing_may_be_lost() -> None:
    rows = grid(COLUMNS, ENTRIES, 10, RICH, fold=True)
    assert [texts(row) for row in rows] == [["name     n"], ["abcdef   1", "gh        "], ["b      222"]]
