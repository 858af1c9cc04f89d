"""The screen of top as lines: it fits every terminal, whatever there is to show."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from producer.monitor.actions import cap_of, what_a_cap_does
from producer.monitor.board import LEAST_HEIGHT, LEAST_WIDTH, Board
from producer.monitor.figures import PLAIN, RICH
from producer.monitor.grid import Line

EVENT = {"at": "2026-01-31T12:00:00.000Z", "who": "me@here", "what": "paused", "dataset": "D1", "detail": "as I said"}


def dataset(number: int, **changes: Any) -> dict[str, Any]:
    figures = ("prompt_tokens", "queued", "in_flight", "failed", "rejected", "truncated", "no_think_end")
    lengths = {"mean_tokens": 8100.4, "p50_tokens": 7000, "p95_tokens": 10_100, "max_tokens": 10_240}
    own = {
        "name": f"D{number}" + "x" * (7 * number % 60),
        "state": ("open", "paused", "capped", "exhausted", "halted")[number % 5],
        "reason": "",
        "cap_tokens": None if number % 4 == 3 else 10_000_000,
        "count": "completion",
        "weight": 1.0,
        "spent_tokens": 1_234_567 * number,
        "done": 1234 * number,
        "flags": {"truncated": number},
        "rejects": {"too_long": number},
        "stopped": {"truncated": number} if number % 2 else {},
        "expired_leases": number,
        "tokens_per_second": 12.5 * number,
        "eta_seconds": None if number % 3 == 0 else 1000 * number,
    }
    return dict.fromkeys(figures, number) | lengths | own | changes


def seen(datasets: int, workers: int, servers: int, events: int, troubles: int) -> dict[str, Any]:
    found = [dataset(number) for number in range(datasets)]
    summed = ("spent_tokens", "done", "truncated", "no_think_end", "rejected", "failed", "in_flight")
    totals: dict[str, Any] = {key: sum(one[key] for one in found) for key in (*summed, "tokens_per_second")}
    return {
        "datasets": found,
        "workers": [
            {"name": f"w{number}@host", "state": "working", "seen_seconds_ago": 0.5, "limit": 9, "in_flight": 3}
            for number in range(workers)
        ],
        "servers": [
            {"url": f"http://gpu{number}:30000", "state": "up", "in_flight": 5, "answers": 10**number, "why": "steady"}
            for number in range(servers)
        ],
        "events": [EVENT] * events,
        "troubles": [f"trouble {number} \x1b[2J" for number in range(troubles)],
        "totals": totals | {"cap_tokens": 10**8, "eta_seconds": 10**6},
    }


def texts(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


COUNTS = st.integers(0, 60)


@given(
    size=st.tuples(st.integers(LEAST_WIDTH, 200), st.integers(LEAST_HEIGHT, 70)),
    counts=st.tuples(COUNTS, COUNTS, st.integers(0, 9), st.integers(0, 20), st.integers(0, 9)),
    moves=st.integers(-70, 70),
    notice=st.sampled_from(["", "D1: paused"]),
)
def test_it_fills_every_terminal_and_shows_what_is_selected(
    size: tuple[int, int], counts: tuple[int, int, int, int, int], moves: int, notice: str
) -> None:
    width, height = size
    board = Board(RICH)
    board.show(seen(*counts))
    board.notice = notice
    board.focus.move(moves)
    found = texts(board.lines(width, height))
    assert len(found) == height
    assert max(map(len, found)) <= width
    assert "\x1b" not in "".join(found)
    assert found[-1].startswith("q quit")
    assert notice in found[-2]
    if counts[0]:
        assert board.datasets.selected == seen(*counts)["datasets"][max(0, min(counts[0] - 1, moves))]
        (selected,) = [line for line in found if line.startswith(">")]
        assert board.datasets.selected is not None
        assert board.datasets.selected["name"][:10] in selected
    if counts[4]:
        assert found[1].startswith("! ")


@pytest.mark.parametrize("size", [(LEAST_WIDTH - 1, 40), (120, LEAST_HEIGHT - 1), (10, 2), (1, 1)])
def test_a_terminal_that_is_too_small_is_told_what_is_needed(size: tuple[int, int]) -> None:
    width, height = size
    board = Board(RICH)
    board.show(seen(3, 3, 3, 3, 0))
    found = texts(board.lines(width, height))
    assert len(found) <= height
    assert max(map(len, found)) <= width
    if width > 30:
        assert found[:2] == [f"this terminal has {width} x {height} characters", "top needs 60 x 16"]


def test_the_selection_stays_with_its_dataset() -> None:
    board = Board(PLAIN)
    board.show(seen(5, 0, 0, 0, 0))
    board.focus.move(3)
    name = (board.datasets.selected or {})["name"]
    fewer = seen(5, 0, 0, 0, 0)
    del fewer["datasets"][0]
    board.show(fewer)
    assert (board.datasets.selected or {})["name"] == name


def test_tab_goes_to_lists_that_have_something() -> None:
    board = Board(PLAIN)
    board.show(seen(2, 0, 1, 1, 0))
    visited = []
    for _ in range(4):
        visited.append(board.focus.name)
        board.next_pane()
    assert visited == ["datasets", "servers", "events", "datasets"]


def test_a_dataset_over_its_cap_is_marked_without_colour_too() -> None:
    board = Board(PLAIN)
    found = seen(1, 0, 0, 0, 0)
    found["datasets"] = [dataset(1, cap_tokens=1_000_000, spent_tokens=1_120_000)]
    board.show(found)
    assert " 112.0%! " in texts(board.lines(120, 30))[2]


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("12M", (12_000_000, False)),
        (" 12_000 ", (12_000, False)),
        ("none", (None, False)),
        ("+500k", (500_000, True)),
        ("- 1M", (-1_000_000, True)),
    ],
)
def test_caps_as_they_are_typed(text: str, cap: tuple[int | None, bool]) -> None:
    assert cap_of(text) == cap


@pytest.mark.parametrize("text", ["", "many", "0", "+none", "1.5", "12 M"])
def test_what_is_no_cap_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        cap_of(text)


def test_what_a_cap_does_is_said_in_advance() -> None:
    one = dataset(2, cap_tokens=3_000_000)  # of which 2,469,134 are spent, and which is capped
    assert what_a_cap_does(one, "4M") == "4,000,000 tokens: 1,530,866 more than are spent; it is opened again"
    assert what_a_cap_does(one, "-1M").startswith("2,000,000 tokens, and 2,469,134 are spent: what is there stays, 2 ")
    assert what_a_cap_does(one, "none") == "no cap: its whole source is answered"
    assert what_a_cap_does(one | {"cap_tokens": None}, "+1M") == "it has no cap that could be raised"
