"""What the budget's estimate is made of, on a real ledger: how far answers have come, and how attempts ended."""

import struct
from pathlib import Path

import numpy as np

from common.ledger import LOST, Ended, InFlight, Ledger, pack_in_flight
from common.ledger._keys import keys_of
from common.ledger._outcomes import KEPT_OUTCOMES
from common.sections import TokenizerSettings
from common.settings import Settings
from tests.integration.ledger_steps import HOUR, KEYS, admit, claim, feed, pair, record, settings
from workers.budget import ENDED, IN_FLIGHT
from workers.in_flight import in_flight, snapshot, told


def rows(ledger: Ledger) -> list[tuple[float, ...]]:
    return [tuple(map(float, row)) for row in np.frombuffer(ledger.progress("b1").outcomes, ENDED).tolist()]


def test_outcomes_are_kept_as_they_were_told(ledger: Ledger) -> None:
    ledger.observe("b1", [Ended(0, 1_764_000_000_123, 99.5, 120), Ended(1, 7, 3.0, LOST)])
    ledger.observe("b1", [Ended(2, 8, 4.0, 0)])
    assert rows(ledger) == [(1_764_000_000_123, 99.5, 120), (7, 3, -1), (8, 4, 0)]


def test_the_newest_outcomes_take_the_place_of_the_oldest(ledger: Ledger) -> None:
    number = 0
    for size in (KEPT_OUTCOMES - 3, 5, 1, 700, KEPT_OUTCOMES + 11):
        ledger.observe("b1", [Ended(n, number + n, 1.0, 1) for n in range(size)])
        number += size
        kept = rows(ledger)
        assert {attempt for attempt, _, _ in kept} == set(range(max(0, number - KEPT_OUTCOMES), number))
        assert len(kept) == min(number, KEPT_OUTCOMES)


def test_clocks_are_those_of_the_leases_and_the_newest_attempt_counts(ledger: Ledger) -> None:
    feed(ledger, 4)
    first, second = claim(ledger, 0, 1)
    (third,) = claim(ledger, 2, owner="w2")
    ledger.settle("b1", [record(second)])
    ledger.tell("b1", "w1", pack_in_flight([InFlight(0, first.attempt, 50.0, 0.0), InFlight(1, second.attempt, 9, 0)]))
    # One that was frozen, and still tells of an attempt that went to another.
    ledger.tell("b1", "frozen", pack_in_flight([InFlight(0, first.attempt - 5, 800.0, 0.0)]))
    progress = ledger.progress("b1")
    assert told(progress)[0] == (first.attempt, 50.0)
    nobody_told_of = (float(third.attempt), 0.0)
    assert sorted(in_flight(progress, HOUR).tolist()) == sorted([(float(first.attempt), 50.0), nobody_told_of])
    ledger.tell("b1", "w1", b"")
    assert "w1" not in ledger.progress("b1").clocks


def test_a_clock_goes_on_at_its_speed_since_it_was_told_but_not_for_long(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    packed = pack_in_flight([InFlight(0, sample.attempt, 100.0, 20.0)])
    ledger.tell("b1", "w1", packed)
    now_ms = ledger.progress("b1").now_ms
    for seconds, clock in ((2.0, 140.0), (3600.0, 180.0)):
        ledger.redis.hset(KEYS.clocks, "w1", struct.pack(">d", now_ms - 1000 * seconds) + packed)
        seen = told(ledger.progress("b1"))[0][1]
        assert clock <= seen <= clock + 20  # the second at most that this test takes


def test_one_that_nobody_told_of_yet_runs_at_the_speed_of_the_others(ledger: Ledger) -> None:
    feed(ledger, 3)
    first, second, _ = claim(ledger, 0, 1, 2)
    ledger.tell("b1", "w1", pack_in_flight([InFlight(0, first.attempt, 7.0, 30.0), InFlight(1, 1, 7.0, 10.0)]))
    claimed_ms = first.attempt - 2000  # two seconds ago
    ledger.redis.zadd(KEYS.leases, {"2": claimed_ms + HOUR * 1000})
    rows = in_flight(ledger.progress("b1"), HOUR).tolist()
    clocks = [clock for attempt, clock in rows if attempt == claimed_ms]
    assert len(clocks) == 1
    assert 40 <= clocks[0] <= 60
    assert second.index == 1


def test_the_prompts_that_count_are_those_of_the_samples_in_flight_and_next(ledger: Ledger) -> None:
    ledger.register(settings(cap_tokens=10_000, count="total"))
    samples = [(index, b"x") for index in range(5)]
    ledger.feed(
        "b1",
        before="",
        after="5",
        ended=True,
        rejected=[],
        samples=samples,
        prompts={index: 100 + index for index in range(5)},
    )
    admit(ledger)
    one, _, lost = claim(ledger, 0, 1, 4)
    ledger.settle("b1", [record(one, 10)])
    ledger.reject("b1", [(4, lost.attempt, "worker_lost")])
    job = Settings(tokenizer=TokenizerSettings(path=Path("none")))
    given = snapshot(ledger.snapshot("b1"), ledger.progress("b1"), job)
    assert (given.spent_tokens, given.cap_tokens, given.prompts_in_flight) == (110, 10_000, 101)
    assert list(given.next_prompts) == [102, 103]
    assert given.in_flight.dtype == IN_FLIGHT
    assert len(given.in_flight) == 1
    assert ledger.redis.hlen(keys_of("b1").prompts) == 3


def test_the_furthest_lost_clock_of_a_sample_is_kept_until_it_ends(ledger: Ledger) -> None:
    feed(ledger, 5)
    first, second, third, _ = claim(ledger, 0, 1, 2, 3)
    ledger.observe("b1", [Ended(one.index, one.attempt, 100.5 + one.index, LOST) for one in (first, second, third)])
    ledger.observe("b1", [Ended(0, 1, 7.0, LOST), Ended(1, 1, 300.0, LOST), Ended(3, 1, 9.0, 12)])
    assert ledger.progress("b1").lost == {0: 100.5, 1: 300.0, 2: 102.5}
    ledger.release("b1", [pair(second)], failed=False)
    ledger.settle("b1", [record(third)])
    job = Settings(tokenizer=TokenizerSettings(path=Path("none")))
    given = snapshot(ledger.snapshot("b1"), ledger.progress("b1"), job)
    assert (list(given.lost_in_flight), list(given.next_lost)) == ([100.5, 0.0], [300.0])
    ledger.observe("b1", [Ended(2, 1, 900.0, LOST)])  # late news of one that has ended
    assert ledger.progress("b1").lost == {0: 100.5, 1: 300.0}


def test_claims_after_the_snapshot_have_taken_of_the_room(ledger: Ledger) -> None:
    feed(ledger, 9)
    claim(ledger, 0, 1)
    seen = ledger.snapshot("b1")
    claim(ledger, 2, 3, 4)
    ledger.admit("b1", room=5, starts=seen.starts, window=9, tokens_per_second=0)
    assert ledger.snapshot("b1").room == 2
    ledger.admit("b1", room=2, starts=seen.starts, window=9, tokens_per_second=0)
    assert (ledger.snapshot("b1").room, ledger.snapshot("b1").state) == (0, "open")
    assert ledger.claim("b1", "w", 60, [5])[1] == {5: "capped"}
