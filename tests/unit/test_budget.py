"""The admission rule: how many samples more a dataset may start, from a snapshot."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from workers.budget import ENDED, FAST, IN_FLIGHT, PRECISE, Rule, Snapshot, admit

M = 10_240
LOST = -1.0
NO_MARGIN = replace(PRECISE, z=0.0)


def ended_with(tokens: ArrayLike, clocks: ArrayLike | None = None, attempts: ArrayLike | None = None) -> np.ndarray:
    """Ended attempts; unless given, clocks are exact, and the attempts began one after the other."""
    ended = np.zeros(np.size(tokens), ENDED)
    ended["tokens"] = tokens
    ended["clock"] = tokens if clocks is None else clocks
    ended["attempt"] = np.arange(1, np.size(tokens) + 1) if attempts is None else attempts
    return ended


def flying_at(clocks: ArrayLike, attempts: ArrayLike | None = None) -> np.ndarray:
    """Attempts in flight; unless given, begun after all that ended."""
    in_flight = np.zeros(np.size(clocks), IN_FLIGHT)
    in_flight["clock"] = clocks
    in_flight["attempt"] = 1_000_000 + np.arange(np.size(clocks)) if attempts is None else attempts
    return in_flight


def snapshot(
    cap: int = 10_000_000,
    spent: int = 0,
    ended: np.ndarray | None = None,
    clocks: ArrayLike = (),
    max_new_tokens: int = M,
) -> Snapshot:
    return Snapshot(cap, spent, max_new_tokens, ended_with([]) if ended is None else ended, flying_at(clocks))


def lengths(count: int, mean: float = 2500, cv: float = 1.2, seed: int = 0) -> np.ndarray:
    sigma = np.sqrt(np.log1p(cv * cv))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.round(drawn), 1, M)


# Cold start


def test_before_the_first_answer_about_half_of_the_cap_is_started() -> None:
    verdict = admit(snapshot(cap=1_000_000))
    # The lognormal of mean M / 2 and cv 1, clipped at M, has a mean of 0.437 M.
    assert verdict.mean_tokens == pytest.approx(0.4366 * M, rel=0.001)
    assert 0.4 * 1_000_000 < verdict.room * verdict.mean_tokens < 0.6 * 1_000_000
    assert verdict.expected_tokens == 0


def test_a_cold_start_stays_closed_until_answers_are_known() -> None:
    started = admit(snapshot(cap=1_000_000)).room
    # A second later nothing has ended: what has been started fills the room.
    assert admit(snapshot(cap=1_000_000, clocks=[17.0] * started)).room <= 1


def test_the_configured_guess_stands_for_half_the_maximum() -> None:
    cold = snapshot(cap=1_000_000)
    guessed = admit(replace(cold, mean_tokens=1000.0))
    assert guessed.mean_tokens == pytest.approx(1000, rel=0.01)
    assert guessed.room > 3 * admit(cold).room
    # No guess can be above the longest answer.
    assert admit(replace(cold, mean_tokens=1e9)).mean_tokens <= M


def test_a_prior_is_outweighed_by_answers() -> None:
    known = admit(snapshot(ended=ended_with([1000.0] * 1000)))
    assert known.mean_tokens == pytest.approx(1000, rel=0.05)


# Caps


def test_a_cap_below_one_answer_starts_one_and_not_a_second() -> None:
    assert admit(snapshot(cap=1)).room == 1
    assert admit(snapshot(cap=1, clocks=[0.0])).room == 0


def test_the_last_answer_has_no_margin() -> None:
    # Half an answer and a token more are left, nothing is in flight: one more lands nearer than none.
    ended = ended_with([1000.0] * 1000)
    mean = admit(snapshot(ended=ended)).mean_tokens
    left = int(mean / 2) + 1
    verdict = admit(snapshot(cap=1_000_000 + left, spent=1_000_000, ended=ended))
    assert (verdict.room, verdict.margin_tokens) == (1, 0.0)
    assert admit(snapshot(cap=1_000_000 + left - 2, spent=1_000_000, ended=ended)).room == 0


def test_a_raised_cap_opens_and_a_lowered_one_closes() -> None:
    one = snapshot(cap=1_000_000, spent=1_000_000, ended=ended_with(lengths(400)), clocks=[100.0] * 20)
    assert admit(one).room == 0
    raised = admit(replace(one, cap_tokens=2_000_000))
    assert raised.room > 200
    assert not raised.over
    lowered = admit(replace(one, cap_tokens=900_000))
    assert (lowered.room, lowered.over) == (0, True)


def test_no_room_is_not_over() -> None:
    """Hysteresis: between what closes a dataset and what takes samples back lies the margin."""
    ended = ended_with(lengths(400))
    expected = admit(snapshot(spent=900_000, ended=ended, clocks=[100.0] * 40)).expected_tokens
    closed = admit(snapshot(cap=round(expected), spent=900_000, ended=ended, clocks=[100.0] * 40))
    assert (closed.room, closed.over) == (0, False)
    assert admit(snapshot(cap=round(expected - 10_000), spent=900_000, ended=ended, clocks=[100.0] * 40)).over


def test_the_margin_shrinks_as_answers_end() -> None:
    ended = ended_with(lengths(500))
    margins = [admit(snapshot(ended=ended, clocks=[500.0] * count)).margin_tokens for count in (150, 50, 10)]
    # With the room filled; so leave none.
    full = [
        admit(snapshot(cap=1, spent=1, ended=ended, clocks=[500.0] * count)).margin_tokens for count in (150, 50, 10, 0)
    ]
    assert margins[0] > 0
    assert full == sorted(full, reverse=True)
    assert full[-1] == 0


def test_fast_leaves_a_small_shortfall_that_precise_fills() -> None:
    one = snapshot(cap=10_000_000, spent=9_960_000, ended=ended_with(lengths(2000)))
    assert admit(one, PRECISE).room > 0
    assert admit(one, FAST).room == 0
    assert admit(replace(one, spent_tokens=9_940_000), FAST).room > 0


# What answers say


def test_what_is_expected_of_those_in_flight_is_the_mean_of_those_that_lasted_longer() -> None:
    tokens = [100.0] * 500 + [1000.0] * 300 + [5000.0] * 200
    verdict = admit(snapshot(ended=ended_with(tokens, attempts=[1] * 1000), clocks=[2000.0] * 10), NO_MARGIN)
    assert verdict.expected_tokens == pytest.approx(50_000, rel=0.02)
    early = admit(snapshot(ended=ended_with(tokens, attempts=[1] * 1000), clocks=[500.0] * 10), NO_MARGIN)
    assert early.expected_tokens == pytest.approx(10 * (300 * 1000 + 200 * 5000) / 500, rel=0.02)


def test_a_sample_that_is_claimed_and_not_started_is_expected_to_take_the_mean() -> None:
    verdict = admit(snapshot(spent=5, ended=ended_with(lengths(500)), clocks=[0.0] * 7))
    assert verdict.expected_tokens == pytest.approx(5 + 7 * verdict.mean_tokens)
    # It says nothing of lengths.
    assert verdict.mean_tokens == pytest.approx(admit(snapshot(ended=ended_with(lengths(500)))).mean_tokens, rel=0.01)


def test_truncated_answers_are_answers_of_the_longest_length() -> None:
    ended = ended_with([500.0] * 600 + [float(M)] * 400, attempts=[1] * 1000)
    verdict = admit(snapshot(ended=ended, clocks=[6000.0] * 5), NO_MARGIN)
    assert verdict.mean_tokens == pytest.approx((600 * 500 + 400 * M) / 1000, rel=0.01)
    assert verdict.expected_tokens == pytest.approx(5 * M, rel=0.01)


def test_rejected_answers_charge_nothing_but_take_their_time() -> None:
    good = [2000.0] * 500
    ended = ended_with(good + [0.0] * 500, clocks=[2000.0] * 1000, attempts=[1] * 1000)
    verdict = admit(snapshot(ended=ended, clocks=[1000.0] * 10), NO_MARGIN)
    assert verdict.mean_tokens == pytest.approx(1000, rel=0.03)
    assert verdict.expected_tokens == pytest.approx(10_000, rel=0.03)


def test_drift_is_followed() -> None:
    easy, hard = [500.0] * 3000, [5000.0] * 2000
    assert admit(snapshot(ended=ended_with(easy + hard))).mean_tokens == pytest.approx(5000, rel=0.03)
    # By the order of the starts, whatever the order in the ring.
    mixed = np.random.default_rng(1).permutation(ended_with(easy + hard))
    assert admit(snapshot(ended=mixed)).mean_tokens == pytest.approx(5000, rel=0.03)
    # Samples that were claimed together are equally old.
    together = ended_with(easy + hard, attempts=[1] * 5000)
    assert admit(snapshot(ended=together)).mean_tokens == pytest.approx(2300, rel=0.01)


def running(count: int, started: int, seed: int = 0, spread: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` slots, `started` starts so far, one answer after the other in each, at a speed of 1 +- spread.

    The true lengths of all, in the order of their starts; their clocks now; and for how long they have ended, negative
    while they are in flight.
    """
    rng = np.random.default_rng(seed)
    tokens = lengths(started, seed=seed)
    took = tokens / (1 + spread * rng.uniform(-1, 1, started))
    free, starts = [0.0] * count, np.zeros(started)
    for number in range(started):
        starts[number] = heapq.heappop(free)
        heapq.heappush(free, starts[number] + took[number])
    now = starts[-1]
    return tokens, np.minimum(now - starts, took), now - starts - took


def test_lost_attempts_stay_as_censored_ones_for_the_long_answers_among_them() -> None:
    """All in flight are lost at one time: those are the long ones. Without them the rest looks short."""
    kept, dropped = [], []
    for seed in range(20):
        tokens, clocks, ago = running(150, 600, seed)
        done = ago >= 0
        charged = np.where(done, tokens, LOST)
        kept.append(admit(snapshot(ended=ended_with(charged, clocks))).mean_tokens)
        dropped.append(admit(snapshot(ended=ended_with(charged[done], clocks[done]))).mean_tokens)
    truth = float(np.mean([lengths(600, seed=seed).mean() for seed in range(20)]))
    assert np.mean(kept) == pytest.approx(truth, rel=0.05)
    assert np.mean(dropped) < 0.75 * truth


def test_lost_attempts_that_never_began_say_nothing() -> None:
    answers = ended_with(lengths(500), attempts=[1] * 500)
    lost = ended_with([LOST] * 500, clocks=[0.0] * 500, attempts=[1] * 500)
    mean = admit(snapshot(ended=answers)).mean_tokens
    assert admit(snapshot(ended=np.concatenate((answers, lost)))).mean_tokens == pytest.approx(mean)


def test_a_sample_whose_attempt_was_lost_late_is_expected_to_be_long_again() -> None:
    one = snapshot(cap=2_000_000, spent=1_000_000, ended=ended_with(lengths(500)), clocks=[6000.0] * 20)
    lost = replace(one, in_flight=flying_at([6000.0] * 10 + [0.0] * 10), lost_in_flight=[0.0] * 10 + [6000.0] * 10)
    assert admit(lost).expected_tokens == pytest.approx(admit(one).expected_tokens, rel=0.01)
    fresh = replace(lost, lost_in_flight=())
    assert admit(fresh).expected_tokens < admit(lost).expected_tokens - 10 * 4000
    # It is the same for those that wait to be started again.
    waiting = replace(one, next_lost=[6000.0] * 100)
    assert 20 < admit(waiting).room < admit(one).room - 100


# One clock


def test_events_and_those_in_flight_are_told_by_one_clock() -> None:
    """300 requests begin together and decode 10 % faster or slower than their clocks say.

    Told by their exact lengths, fast ones end "beyond" all that run, and of the long ones too little is expected.
    """
    by_clock, by_length, truth = 0.0, 0.0, 0.0
    for seed in range(20):
        tokens = lengths(300, mean=3793, cv=1.0, seed=seed)
        took = tokens / (1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, 300))
        done, clocks = took <= 5000, np.minimum(took, 5000)
        one = replace(snapshot(), in_flight=flying_at(clocks[~done]))
        by_clock += admit(replace(one, ended=ended_with(tokens[done], clocks[done]))).expected_tokens
        by_length += admit(replace(one, ended=ended_with(tokens[done]))).expected_tokens
        truth += float(tokens[~done].sum())
    assert truth <= by_clock < 1.1 * truth
    assert by_length < 0.95 * truth


def test_what_a_full_server_will_charge_is_told_from_clocks_with_errors() -> None:
    """150 in flight: what they will charge in the end, by clocks that are 30 % wrong either way."""
    expected, truth = [], []
    for seed in range(20):
        tokens, clocks, ago = running(150, 2000, seed, spread=0.3)
        done = ago >= 0
        one = snapshot(ended=ended_with(tokens[done], clocks[done], np.flatnonzero(done)))
        one = replace(one, in_flight=flying_at(clocks[~done], np.flatnonzero(~done)))
        expected.append(admit(one).expected_tokens)
        truth.append(tokens[~done].sum())
    assert sum(expected) == pytest.approx(sum(truth), rel=0.05)


# Edges of the estimate


def test_where_no_answer_has_lasted_so_long_the_longest_is_expected() -> None:
    no_prior = replace(NO_MARGIN, kappa=0.0)
    one = snapshot(ended=ended_with([100.0] * 50), clocks=[3000.0, 4000.0])
    assert admit(one, no_prior).expected_tokens == 2 * M


def test_clocks_beyond_every_bucket() -> None:
    """A nominal speed ten times too fast: all clocks are above four times the maximum."""
    tokens = lengths(500)
    ended = ended_with(tokens, clocks=1_000_000 + 10 * tokens, attempts=[1] * 500)
    verdict = admit(snapshot(ended=ended, clocks=[2_000_000.0] * 10))
    assert verdict.mean_tokens == pytest.approx(tokens.mean(), rel=0.05)
    assert verdict.expected_tokens == pytest.approx(10 * tokens.mean(), rel=0.05)
    assert admit(snapshot(clocks=[2_000_000.0])).expected_tokens == M  # and before any ended


def test_a_memory_longer_than_what_the_ledger_kept() -> None:
    long = Rule(z=3.0, h=16.0, tolerance=0.0, memory=1e6)
    tokens = lengths(8192)
    verdict = admit(snapshot(ended=ended_with(tokens)), long)
    assert verdict.mean_tokens == pytest.approx(tokens.mean(), rel=0.02)


def test_thousands_in_flight_and_a_ledger_that_keeps_the_last_8192_ends() -> None:
    expected, truth, means = 0.0, 0.0, []
    for seed in range(3):
        tokens, clocks, ago = running(2000, 20_000, seed)
        flying, ring = np.flatnonzero(ago < 0), np.argsort(np.where(ago < 0, np.inf, ago))[:8192]
        one = snapshot(cap=100_000_000, ended=ended_with(tokens[ring], clocks[ring], ring))
        verdict = admit(replace(one, in_flight=flying_at(clocks[flying], flying)))
        expected += verdict.expected_tokens
        truth += float(tokens[flying].sum())
        means.append(verdict.mean_tokens)
    assert expected == pytest.approx(truth, rel=0.05)
    assert np.mean(means) == pytest.approx(lengths(20_000).mean(), rel=0.04)


# count = total


def test_prompts_count_where_the_cap_is_on_both() -> None:
    answers = ended_with(lengths(1000))
    plain = snapshot(cap=2_000_000, spent=1_000_000, ended=answers, clocks=[100.0] * 20)
    total = replace(plain, prompts_in_flight=50_000, next_prompts=[1000] * 10)
    assert admit(total).expected_tokens == pytest.approx(admit(plain).expected_tokens + 50_000)
    assert admit(total).limit_tokens == pytest.approx(admit(plain).limit_tokens + 500)
    # Beyond the ten that are known the mean prompt is assumed: as if each answer were 1,000 tokens longer.
    assert admit(total).room < admit(plain).room
    mean = admit(plain).mean_tokens
    filled = admit(total).expected_tokens + admit(total).room * (mean + 1000) + admit(total).margin_tokens
    assert total.cap_tokens - mean < filled <= admit(total).limit_tokens


def test_a_huge_next_prompt_blocks() -> None:
    one = snapshot(cap=1_000_000, spent=900_000, ended=ended_with([1000.0] * 1000))
    assert admit(replace(one, next_prompts=[100] * 50)).room > 10
    assert admit(replace(one, next_prompts=[150_000, *[100] * 50])).room == 0
    assert admit(replace(one, next_prompts=[100, 100, 150_000])).room == 2


# For every snapshot


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    most = draw(st.integers(1, 200_000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, flying = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    clock_error = draw(st.sampled_from([0.0, 0.1, 1.0, 100.0]))
    ended = ended_with(rng.integers(-1, most + 1, count).astype(float), rng.uniform(0, 1 + clock_error, count) * most)
    in_flight = flying_at(rng.uniform(0, 1 + clock_error, flying) * most, draw(st.integers(0, 400)) + np.arange(flying))
    return Snapshot(
        draw(st.integers(1, 10**10)),
        draw(st.integers(0, 10**10)),
        most,
        ended,
        in_flight,
        mean_tokens=draw(st.none() | st.floats(1, 1e6)),
        prompts_in_flight=draw(st.integers(0, 10**7)),
        next_prompts=draw(st.lists(st.integers(1, 200_000), max_size=20)),
    )


@given(snapshots(), st.sampled_from([PRECISE, FAST]))
def test_figures_are_finite_and_the_room_is_never_negative(one: Snapshot, rule: Rule) -> None:
    verdict = admit(one, rule)
    assert verdict.room >= 0
    assert verdict.margin_tokens >= 0
    assert verdict.expected_tokens >= one.spent_tokens
    assert 0 < verdict.mean_tokens <= one.max_new_tokens * (1 + 1e-9)
    assert np.isfinite([verdict.expected_tokens, verdict.margin_tokens, verdict.limit_tokens]).all()


@given(snapshots(), st.sampled_from([PRECISE, FAST]), st.integers(1, 10**9))
def test_a_raised_cap_never_leaves_less_room(one: Snapshot, rule: Rule, tokens: int) -> None:
    assert admit(replace(one, cap_tokens=one.cap_tokens + tokens), rule).room >= admit(one, rule).room


@given(snapshots(), st.sampled_from([PRECISE, FAST]), st.integers(0, 10**9))
def test_a_cap_that_is_reached_leaves_no_room(one: Snapshot, rule: Rule, tokens: int) -> None:
    assert admit(replace(one, spent_tokens=one.cap_tokens + tokens), rule).room == 0


@given(snapshots(), st.integers(1, 10**9))
def test_the_more_is_spent_the_less_room_is_left(one: Snapshot, tokens: int) -> None:
    assert admit(replace(one, spent_tokens=one.spent_tokens + tokens)).room <= admit(one).room


@given(snapshots())
def test_the_room_is_the_most_that_stays_within_the_limit(one: Snapshot) -> None:
    verdict = admit(one)
    if verdict.room and (one.spent_tokens or len(one.in_flight)) and not one.next_prompts:
        filled = verdict.expected_tokens + verdict.room * verdict.mean_tokens + verdict.margin_tokens
        assert filled <= verdict.limit_tokens * (1 + 1e-9)


@given(snapshots())
def test_a_dataset_with_nothing_spent_and_nothing_in_flight_may_start_one(one: Snapshot) -> None:
    empty = replace(one, spent_tokens=0, in_flight=flying_at([]), prompts_in_flight=0)
    assert admit(empty).room >= 1
