"""The admission rule: how many samples more a dataset may start."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ledger import DatasetState
from workers.budget import NO_LIMIT, expected_tokens, room

MAX_NEW_TOKENS = 1000


def state(**changes: Any) -> DatasetState:
    """A dataset that has begun; completion tokens are what its cap counts."""
    fields: dict[str, Any] = {
        "name": "A",
        "now_ms": 0,
        "spec": {},
        "state": "open",
        "reason": "",
        "cap_tokens": None,
        "count": "completion",
        "weight": 1.0,
        "cursor": "",
        "ended": False,
        "room": 0,
        "window": 0,
        "per_message": 1,
        "tokens_per_second": 0.0,
        "done": 0,
        "rejected": 0,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "squared_tokens": 0,
        "max_tokens": 0,
        "expired": 0,
        "queued": 0,
        "in_flight": 0,
    }
    return DatasetState(**(fields | changes))


@st.composite
def states(draw: st.DrawFn) -> tuple[DatasetState, int]:
    """A dataset in any state that a ledger can be in, and its max_new_tokens."""
    max_new_tokens = draw(st.integers(2, 200_000))
    done = draw(st.integers(0, 100_000))
    return state(
        cap_tokens=draw(st.integers(1, 10**10)),
        count=draw(st.sampled_from(["completion", "total"])),
        done=done,
        # The least that an answer can have is one id, the most max_new_tokens.
        completion_tokens=draw(st.integers(done, done * max_new_tokens)),
        prompt_tokens=draw(st.integers(done, done * 200_000)),
        in_flight=draw(st.integers(0, 5000)),
    ), max_new_tokens


def changed(known: DatasetState, **changes: Any) -> DatasetState:
    return state(**({name: getattr(known, name) for name in DatasetState.__dataclass_fields__} | changes))


def test_without_a_cap_there_is_always_room() -> None:
    assert room(state(done=10**6, completion_tokens=10**12, in_flight=5000), MAX_NEW_TOKENS) == NO_LIMIT


@pytest.mark.parametrize(
    ("cap_tokens", "in_flight", "admitted"),
    [
        # Nothing is known: an answer is expected to take half the maximum, 500 tokens.
        pytest.param(10_000, 0, 20, id="cold"),
        pytest.param(10_000, 15, 5, id="cold, 15 of 20 in flight"),
        pytest.param(10_000, 20, 0, id="cold, all that fit are in flight"),
        pytest.param(1, 0, 1, id="a cap below one answer starts one"),
        pytest.param(1, 1, 0, id="and not a second"),
    ],
)
def test_a_dataset_that_knows_nothing_yet(cap_tokens: int, in_flight: int, admitted: int) -> None:
    assert room(state(cap_tokens=cap_tokens, in_flight=in_flight), MAX_NEW_TOKENS) == admitted


@pytest.mark.parametrize(
    ("changes", "admitted"),
    [
        # 96 answers of 250 tokens and the prior's 4 of 500: expected (24,000 + 2,000) / 100 = 260.
        pytest.param({"cap_tokens": 50_000}, 100, id="(50,000 - 24,000) / 260 is 100"),
        pytest.param({"cap_tokens": 50_000, "in_flight": 60}, 40, id="60 of the 100 are in flight"),
        pytest.param({"cap_tokens": 24_000 + 129}, 0, id="less than half an answer is left"),
        pytest.param({"cap_tokens": 24_000 + 130}, 1, id="half an answer is left"),
        pytest.param({"cap_tokens": 24_000 + 389}, 1, id="less than one and a half"),
        pytest.param({"cap_tokens": 24_000}, 0, id="the cap is reached"),
        pytest.param({"cap_tokens": 10_000}, 0, id="the cap was lowered below what is spent"),
        # Prompts of 100 tokens count too: spent 33,600, expected 360.
        pytest.param({"cap_tokens": 69_600, "count": "total"}, 100, id="(69,600 - 33,600) / 360 is 100"),
        pytest.param({"cap_tokens": 50_000, "prompt_tokens": 10**9}, 100, id="prompts cost nothing in completions"),
    ],
)
def test_a_dataset_of_answers_of_250_tokens(changes: dict[str, Any], admitted: int) -> None:
    known = {"done": 96, "completion_tokens": 24_000, "prompt_tokens": 9_600}
    assert room(state(**(known | changes)), MAX_NEW_TOKENS) == admitted


def test_the_expectation_of_a_total_holds_the_mean_prompt() -> None:
    known = state(done=4, completion_tokens=2000, prompt_tokens=800)
    assert expected_tokens(known, MAX_NEW_TOKENS) == 500
    assert expected_tokens(changed(known, count="total"), MAX_NEW_TOKENS) == 700


@given(states())
def test_room_is_never_negative_and_never_more_than_the_cap_holds(drawn: tuple[DatasetState, int]) -> None:
    known, max_new_tokens = drawn
    admitted = room(known, max_new_tokens)
    assert known.cap_tokens is not None
    assert 0 <= admitted <= max(1, known.cap_tokens)


@given(states())
def test_a_cap_that_is_reached_leaves_no_room(drawn: tuple[DatasetState, int]) -> None:
    known, max_new_tokens = drawn
    assert known.cap_tokens is not None
    if known.spent_tokens >= known.cap_tokens:
        assert room(known, max_new_tokens) == 0


@given(states(), st.integers(1, 10**9))
def test_the_more_is_spent_the_less_room_is_left(drawn: tuple[DatasetState, int], tokens: int) -> None:
    known, max_new_tokens = drawn
    more = changed(known, completion_tokens=known.completion_tokens + tokens)
    assert room(more, max_new_tokens) <= room(known, max_new_tokens)


@given(states(), st.integers(1, 1000))
def test_the_more_is_in_flight_the_less_room_is_left(drawn: tuple[DatasetState, int], samples: int) -> None:
    known, max_new_tokens = drawn
    more = changed(known, in_flight=known.in_flight + samples)
    assert room(more, max_new_tokens) <= room(known, max_new_tokens)


@given(states(), st.integers(1, 10**9))
def test_a_raised_cap_never_leaves_less_room(drawn: tuple[DatasetState, int], tokens: int) -> None:
    known, max_new_tokens = drawn
    assert known.cap_tokens is not None
    raised = changed(known, cap_tokens=known.cap_tokens + tokens)
    assert room(raised, max_new_tokens) >= room(known, max_new_tokens)


@given(states())
def test_a_dataset_with_nothing_spent_and_nothing_in_flight_may_start_one(drawn: tuple[DatasetState, int]) -> None:
    known, max_new_tokens = drawn
    empty = changed(known, done=0, completion_tokens=0, prompt_tokens=0, in_flight=0)
    assert room(empty, max_new_tokens) >= 1


@given(states())
def test_what_is_admitted_and_in_flight_is_expected_to_end_within_half_an_answer_of_the_cap(
    drawn: tuple[DatasetState, int],
) -> None:
    known, max_new_tokens = drawn
    admitted = room(known, max_new_tokens)
    if admitted and (known.spent_tokens or known.in_flight):
        expected = expected_tokens(known, max_new_tokens)
        assert known.cap_tokens is not None
        ends_at = known.spent_tokens + (known.in_flight + admitted) * expected
        assert ends_at <= known.cap_tokens + expected / 2 + 1e-6 * ends_at
        assert ends_at + expected > known.cap_tokens - expected / 2 - 1e-6 * ends_at
