"""Fair shares: who is next, how many samples may be out, and both in virtual time."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.shares import FOUR, Load, Setup, Simulation
from workers.shares import Shares, Standing, to_send


def standing(weight: float = 1.0, **changes: Any) -> Standing:
    """An open dataset that holds nothing and has enough of everything."""
    fields: dict[str, Any] = {"in_flight": 0, "sent": 0, "available": 1000, "ended": 0, "open": True}
    return Standing(weight=weight, **(fields | changes))


def chosen(messages: Sequence[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, count in messages:
        counts[name] += count
    return dict(counts)


def order(messages: Sequence[tuple[str, int]]) -> str:
    return "".join(name * count for name, count in messages)


@st.composite
def many_standings(draw: st.DrawFn) -> dict[str, Standing]:
    one = st.builds(
        Standing,
        weight=st.floats(0.01, 100),
        in_flight=st.integers(0, 500),
        sent=st.integers(0, 500),
        available=st.integers(0, 60),
        ended=st.integers(0, 10**6),
        open=st.booleans(),
        per_message=st.integers(1, 32),
    )
    return draw(st.dictionaries(st.sampled_from("ABCDEFGH"), one, max_size=8))


# Who is next


@pytest.mark.parametrize(
    ("standings", "samples", "messages"),
    [
        pytest.param({"A": standing(), "B": standing()}, 4, "ABAB", id="equal weights take turns, names break ties"),
        pytest.param({"B": standing(), "A": standing()}, 4, "ABAB", id="whatever order they are told in"),
        # Keys of A 0.5, 1.5, 2.5; of B 1/6, 1/2, 5/6, 7/6, 3/2.
        pytest.param({"A": standing(1), "B": standing(3)}, 8, "BABBBABB", id="by weight, spread evenly"),
        pytest.param({"A": standing(in_flight=3), "B": standing()}, 4, "BBBA", id="what is in flight counts"),
        pytest.param({"A": standing(sent=3), "B": standing()}, 4, "BBBA", id="what is out counts"),
        pytest.param({"A": standing(available=1), "B": standing()}, 4, "ABBB", id="the rest goes to whoever has some"),
        pytest.param({"A": standing(open=False), "B": standing()}, 2, "BB", id="nothing for a closed one"),
        pytest.param({"A": standing(available=2)}, 9, "AA", id="no more than there are"),
        pytest.param({"A": standing(open=False)}, 9, "", id="nobody is open"),
        pytest.param({}, 9, "", id="no datasets"),
        pytest.param({"A": standing()}, 0, "", id="none wanted"),
    ],
)
def test_the_one_that_holds_least_for_its_weight_is_next(
    standings: dict[str, Standing], samples: int, messages: str
) -> None:
    assert order(Shares().choose(samples, standings)) == messages


def test_messages_are_filled_and_do_not_stand_before_each_other() -> None:
    standings = {"A": standing(per_message=4), "B": standing(per_message=4), "C": standing(per_message=1)}
    sent = Shares().choose(15, standings)
    assert sent == [("C", 1)] * 3 + [("A", 4), ("B", 4), ("C", 1), ("C", 1), ("A", 1), ("B", 1)]


@settings(max_examples=30)
@given(many_standings(), st.integers(0, 300))
def test_every_slot_that_can_be_filled_is_filled(standings: dict[str, Standing], samples: int) -> None:
    sent = Shares().choose(samples, standings)
    could = {name: one.available for name, one in standings.items() if one.open}
    counts = chosen(sent)
    assert sum(counts.values()) == min(samples, sum(could.values()))
    assert all(counts[name] <= could.get(name, 0) for name in counts)
    assert all(0 < count <= standings[name].per_message for name, count in sent)


@settings(max_examples=30)
@given(many_standings(), st.integers(1, 300))
def test_nobody_is_given_a_sample_while_another_is_further_below_its_share(
    standings: dict[str, Standing], samples: int
) -> None:
    counts = chosen(Shares().choose(samples, standings))
    after = {name: one.in_flight + one.sent + counts.get(name, 0) for name, one in standings.items()}
    for name, count in counts.items():
        for other, one in standings.items():
            if count and one.open and counts.get(other, 0) < one.available:
                last = (after[name] - 0.5) / standings[name].weight
                assert last <= (after[other] + 0.5) / one.weight * (1 + 1e-9)


# Credit


def test_credit_pays_back_what_was_held_too_little() -> None:
    shares = Shares()
    # Of 8 slots 4 are fair: for 60 s A held 2 too few, so 2 slots are owed to A, and B owes 2.
    shares.advance(60, {"A": standing(in_flight=2), "B": standing(in_flight=6)})
    assert order(shares.choose(6, {"A": standing(in_flight=4), "B": standing(in_flight=4)})) == "AAAAAB"


def test_credit_is_bounded_by_five_slots() -> None:
    shares = Shares()
    shares.advance(3600, {"A": standing(in_flight=0), "B": standing(in_flight=100)})
    # A is 5 slots above B's level, and B 5 below it: 10 are A's, then they take turns.
    assert order(shares.choose(12, {"A": standing(), "B": standing()})) == "AAAAAAAAAAAB"


def test_a_closed_dataset_saves_no_credit_and_loses_what_it_had() -> None:
    shares = Shares()
    shares.advance(60, {"A": standing(in_flight=2), "B": standing(in_flight=6)})
    shares.advance(1, {"A": standing(open=False), "B": standing(open=False)})
    assert order(shares.choose(4, {"A": standing(), "B": standing()})) == "ABAB"


def test_what_a_closed_dataset_still_holds_is_owed_to_nobody() -> None:
    shares = Shares()
    closed = standing(in_flight=100, open=False)
    shares.advance(60, {"A": standing(in_flight=5), "B": standing(in_flight=5), "C": closed})
    assert order(shares.choose(4, {"A": standing(), "B": standing()})) == "ABAB"


# Samples that are out, where answers are short


def seconds_of(shares: Shares, seconds: int, *per_second: Mapping[str, tuple[int, int]], sent: int = 0) -> None:
    """Let time pass; for each dataset its samples in flight and those that end in a second."""
    for second in range(seconds + 1):
        for state in per_second:
            shares.advance(
                1.0 if second else 0.0,
                {
                    name: standing(in_flight=held, ended=second * ends, sent=sent)
                    for name, (held, ends) in state.items()
                },
            )


def test_samples_that_are_out_count_by_how_long_their_answers_take() -> None:
    shares = Shares()
    # Both hold 50 slots; A's answers take 1 s, B's 0.1 s. Half of the wait of 10 s A's would be served by count.
    seconds_of(shares, 60, {"A": (50, 50), "B": (50, 500)}, sent=1)
    assert shares.starts_per_second == pytest.approx(550)
    counts = chosen(shares.choose(5500, {"A": standing(available=9999), "B": standing(available=9999)}))
    assert counts["B"] / counts["A"] == pytest.approx(10, rel=0.01)


def test_where_answers_are_long_all_that_are_out_count_in_full() -> None:
    shares = Shares()
    seconds_of(shares, 60, {"A": (1000, 1), "B": (1000, 2)}, sent=1)
    counts = chosen(shares.choose(10, {"A": standing(), "B": standing()}))
    assert counts == {"A": 5, "B": 5}


def test_the_rate_doubles_while_messages_run_out_and_answers_come_at_once() -> None:
    shares = Shares()
    shares.advance(0, {"A": standing()})
    shares.advance(1, {"A": standing(ended=100)})
    assert shares.starts_per_second == 200
    shares.advance(1, {"A": standing(ended=500)})
    assert shares.starts_per_second == 800


def test_the_rate_does_not_double_where_those_in_flight_end_together() -> None:
    shares = Shares()
    shares.advance(0, {"A": standing(in_flight=150)})
    shares.advance(1, {"A": standing(ended=150)})
    assert shares.starts_per_second == pytest.approx(45)


def test_counts_that_fall_are_no_rate() -> None:
    shares = Shares()
    shares.advance(0, {"A": standing(ended=100)})
    shares.advance(1, {"A": standing(ended=0), "B": standing(ended=10**6)})
    assert shares.starts_per_second == 0


# How many may be out


@pytest.mark.parametrize(
    ("slots_free", "starts_per_second", "sent", "held", "samples"),
    [
        pytest.param(150, 0.0, 0, 0, 154, id="a start: all slots, and z^2/6 = 3.8"),
        pytest.param(0, 2.25, 0, 0, 16, id="3.4 in 1.5 s, 8.7 for chance, 3.8"),
        pytest.param(0, 2.25, 10, 0, 6, id="10 are out"),
        pytest.param(3, 2.25, 10, 0, 9, id="and three slots are free now"),
        pytest.param(0, 2.25, 10, 30, 36, id="15 other workers may hold 2 messages each"),
        pytest.param(0, 2.25, 100, 0, 0, id="enough are out"),
    ],
)
def test_how_many_to_send(slots_free: int, starts_per_second: float, sent: int, held: int, samples: int) -> None:
    assert to_send(slots_free, starts_per_second, sent, held) == samples


@pytest.mark.parametrize("starts_per_second", [0.01, 0.1, 1, 2.25, 25, 300])
def test_more_starts_than_are_out_come_once_in_a_million_ticks(starts_per_second: float) -> None:
    mean = 1.5 * starts_per_second
    out = to_send(0, starts_per_second, 0, 0)
    tail = sum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(out + 1, out + 500))
    assert tail <= 2e-6


# In virtual time; the whole tables: python -m tests.benchmarks.shares

STARTED_SECONDS = 30


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_token_shares_are_within_one_percent_after_3000_s_and_no_slot_waits(seed: int) -> None:
    run = Simulation(Setup(), seed)
    run.until(3000)
    assert max(run.errors()) < 1
    assert run.waiting_seconds == 0


def test_no_slot_of_16_workers_waits_for_messages_that_others_hold() -> None:
    run = Simulation(Setup(workers=16), 0)
    run.until(900)
    assert run.waiting_seconds == 0
    assert max(run.errors()) < 3


@pytest.mark.parametrize(
    "setup", [pytest.param(Setup(speed=16), id="25/s"), pytest.param(Setup(slots=40, speed=1000), id="400/s")]
)
def test_shares_and_slots_where_answers_are_fast(setup: Setup) -> None:
    run = Simulation(setup, 0)
    run.until(STARTED_SECONDS)
    waiting = run.waiting_seconds
    run.until(60)
    assert run.waiting_seconds == waiting
    # Where samples in messages count like those in flight, it is 60 at 400/s, for ever.
    assert max(run.errors()) < 10


def test_long_prompts_and_answers_do_not_starve_short_ones() -> None:
    long, short = Load("long", 1, 8000, 0.5, prompt_tokens=32_000), Load("short", 1, 200, 1.0, prompt_tokens=50)
    run = Simulation(Setup(loads=(long, short), slots=40), 0)
    held = []
    for seconds in range(600, 3000, 10):
        run.until(seconds)
        held.append(run.in_flight["short"] / 40)
    assert sum(held) / len(held) == pytest.approx(0.5, abs=0.01)
    assert run.started["short"] > 20 * run.started["long"]
    assert run.waiting_seconds == 0
    # A slot reads 32,000 prompt tokens for 4 s of some 470: so much less is decoded.
    assert max(run.errors()) < 1.5


def test_a_dataset_that_ends_gives_its_share_to_the_others() -> None:
    run = Simulation(Setup(loads=(*FOUR[:3], replace(FOUR[3], samples=200))), 0)
    run.until(1500)
    assert run.started["D"] == run.ended["D"] == 200
    assert sum(run.in_flight.values()) == 150
    assert run.waiting_seconds == 0
    # What is left is shared 1:1:2.
    assert [run.in_flight[name] / 150 for name in "ABC"] == pytest.approx([0.25, 0.25, 0.5], abs=0.03)


@pytest.mark.parametrize("speed", [1, 16])
def test_a_dataset_that_is_paused_starts_nothing_and_no_slot_waits(speed: float) -> None:
    """Paused, capped and halted are one case: closed, and the claims get nothing for what is out."""
    run = Simulation(Setup(speed=speed), 0)
    run.until(100.6)
    run.closed = {"D"}
    started, waiting = dict(run.started), run.waiting_seconds
    run.until(160)
    assert run.started["D"] == started["D"]
    assert all(run.started[name] > started[name] for name in "ABC")
    assert sum(run.in_flight.values()) == 150
    assert run.waiting_seconds == waiting


def test_a_dataset_that_is_resumed_starts_after_what_is_out() -> None:
    run = Simulation(Setup(), 0)
    run.closed = {"D"}
    run.until(100.6)
    run.closed = set()
    ticks = len(run.out)
    while len(run.out) == ticks:
        run.until(run.now + 0.05)
    before, out = sum(run.started.values()), run.out[-1]
    while not run.started["D"]:
        run.until(run.now + 0.05)
    assert sum(run.started.values()) - before <= out


def test_half_as_many_slots_again_are_full_at_the_next_tick() -> None:
    run = Simulation(Setup(), 0)
    run.until(100.6)
    run.grow(75)
    run.until(101.5)
    assert sum(run.in_flight.values()) == 225


def test_slots_that_a_governor_adds_one_by_one_do_not_wait() -> None:
    run = Simulation(Setup(), 0)
    for seconds in range(100, 250, 2):
        run.until(seconds)
        run.grow(1)
    run.until(300)
    assert sum(run.in_flight.values()) == run.slots == 225
    assert run.waiting_seconds == 0


def test_with_ten_slots_a_weight_of_1_to_40_does_not_starve() -> None:
    run = Simulation(Setup(slots=10, loads=(*FOUR[:3], replace(FOUR[3], weight=40))), 0)
    run.until(3000)
    # Of a weight of 1 that is 680 slot-seconds: B's answers take 220 on average.
    assert max(run.errors()) < 60
    assert run.waiting_seconds == 0


@pytest.mark.parametrize(("rings", "percent"), [(False, 0.5), (True, 0.02)])
def test_answers_that_end_together_wait_for_a_tick_or_for_a_ring(rings: bool, percent: float) -> None:
    loads = [Load("A", 1, 2048, 0), Load("B", 1, 2048, 0)]
    run = Simulation(Setup(loads=loads, spread=0.0, rings=rings), 0)
    run.until(600)
    assert 0 < run.waiting_percent() < percent
