"""The life of a claimed sample, from its claim to its end, on a real Valkey."""

import pytest

from common.ledger import Ledger, Settled
from tests.integration.ledger_steps import (
    HOUR,
    KEYS,
    admit,
    claim,
    counts,
    every_key,
    feed,
    given_back,
    lapse,
    pair,
    record,
    settings,
)

# Settle


def test_a_settled_sample_counts_and_leaves_nothing_waiting(ledger: Ledger) -> None:
    feed(ledger, 2)
    first, second = claim(ledger, 0, 1)

    assert ledger.settle("b1", [record(first, 7), record(second, 9)]) == [True, True]

    now = ledger.snapshot("b1")
    assert (now.done, now.prompt_tokens, now.completion_tokens, now.cached_tokens) == (2, 200, 16, 120)
    assert counts(ledger) == (0, 0, 2, 0)
    assert every_key(ledger).isdisjoint({KEYS.payloads, KEYS.owners, KEYS.leases, KEYS.queued, KEYS.tries})


def test_a_settle_that_is_asked_again_answers_the_same_and_counts_nothing(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    ledger.settle("b1", [record(sample, 7, ["loop"])])
    before = ledger.snapshot("b1")

    assert ledger.settle("b1", [record(sample, 7, ["loop"]), record(sample, 8)]) == [True, True]
    after = ledger.snapshot("b1")
    assert (after.done, after.completion_tokens, after.max_tokens) == (1, 7, 7)
    assert (after.lengths, after.flags) == (before.lengths, {"loop": 1})


def test_a_superseded_attempt_does_not_count(ledger: Ledger) -> None:
    feed(ledger, 1)
    (late,) = claim(ledger, 0)
    lapse(ledger, late)
    ledger.expire("b1", max_tries=3)
    (current,) = claim(ledger, 0, owner="w2")

    assert ledger.settle("b1", [record(late, 5)]) == [False]
    assert counts(ledger) == (0, 1, 0, 0)
    assert ledger.settle("b1", [record(current, 6)]) == [True]
    assert ledger.settle("b1", [record(late, 5)]) == [False]
    assert ledger.snapshot("b1").completion_tokens == 6


def test_a_late_settle_counts_while_nobody_else_has_the_sample(ledger: Ledger) -> None:
    feed(ledger, 1)
    (late,) = claim(ledger, 0)
    lapse(ledger, late)
    ledger.expire("b1", max_tries=3)

    assert ledger.settle("b1", [record(late)]) == [True]
    assert counts(ledger) == (0, 0, 1, 0)


def test_a_settle_after_a_reject_is_superseded(ledger: Ledger) -> None:
    feed(ledger, 1)
    (frozen,) = claim(ledger, 0)
    ledger.reject("b1", [(0, frozen.attempt, "tries")])

    assert ledger.settle("b1", [record(frozen)]) == [False]
    assert counts(ledger) == (0, 0, 0, 1)
    assert ledger.snapshot("b1").completion_tokens == 0


def test_a_record_counts_although_redis_has_forgotten_its_claim(ledger: Ledger) -> None:
    """A machine that crashes takes the last second of Redis with it; the answer is durable."""
    feed(ledger, 1)

    assert ledger.settle("b1", [Settled(0, 1, 1, 1, 0, ())]) == [True]
    assert counts(ledger) == (0, 0, 1, 0)


def test_a_record_of_an_older_attempt_never_counts(ledger: Ledger) -> None:
    """Its worker may have been told so before, and be about to void it."""
    feed(ledger, 1)
    (old,) = claim(ledger, 0)
    ledger.release("b1", [pair(old)], failed=False)
    (new,) = claim(ledger, 0, owner="w2")

    for _ in range(2):
        assert ledger.settle("b1", [record(old)]) == [False]
    assert ledger.settle("b1", [record(new)]) == [True]
    assert ledger.settle("b1", [record(old)]) == [False]


@pytest.mark.parametrize("state", ["paused", "closing", "capped", "halted"])
def test_a_dataset_that_closed_still_counts_what_was_in_flight(ledger: Ledger, state: str) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    ledger.transition("b1", state, ["open"])

    assert ledger.settle("b1", [record(sample)]) == [True]
    assert ledger.snapshot("b1").state == state


def test_the_settled_length_of_a_segment_only_grows(ledger: Ledger) -> None:
    feed(ledger, 2)
    first, second = claim(ledger, 0, 1)
    ledger.settle("b1", [record(first)], segment="b1/w1-0.jsonl", committed_bytes=500)
    ledger.settle("b1", [record(second)], segment="b1/w1-0.jsonl", committed_bytes=400)
    ledger.settle("b1", [], segment="b1/w1-1.jsonl", committed_bytes=70)

    assert ledger.committed() == {"b1/w1-0.jsonl": 500, "b1/w1-1.jsonl": 70}
    ledger.set_committed("b1/w1-0.jsonl", 300)
    assert ledger.committed()["b1/w1-0.jsonl"] == 300


def test_a_segment_with_a_superseded_record_is_settled_only_after_its_void(ledger: Ledger) -> None:
    feed(ledger, 2)
    late, good = claim(ledger, 0, 1)
    ledger.release("b1", [pair(late)], failed=False)
    claim(ledger, 0, owner="w2")

    counted = ledger.settle("b1", [record(late), record(good)], segment="b1/w1-0.jsonl", committed_bytes=500)

    assert counted == [False, True]
    assert ledger.committed() == {}
    ledger.set_committed("b1/w1-0.jsonl", 560)
    assert ledger.committed() == {"b1/w1-0.jsonl": 560}


# Rebuild


def test_a_rebuild_counts_a_record_whatever_its_attempt(ledger: Ledger) -> None:
    ledger.register(settings())

    assert ledger.settle("b1", [Settled(3, 77, 100, 10, 0, ("loop",))], rebuild=True) == [True]
    assert ledger.settle("b1", [Settled(3, 77, 100, 10, 0, ("loop",))], rebuild=True) == [True]
    assert ledger.settle("b1", [Settled(3, 76, 100, 10, 0, ())], rebuild=True) == [False]
    now = ledger.snapshot("b1")
    assert (now.done, now.completion_tokens, now.flags) == (1, 10, {"loop": 1})


def test_a_rebuild_supersedes_an_attempt_that_is_in_flight(ledger: Ledger) -> None:
    feed(ledger, 1)
    (running,) = claim(ledger, 0)

    assert ledger.settle("b1", [Settled(0, running.attempt - 1, 100, 10, 0, ())], rebuild=True) == [True]
    assert ledger.settle("b1", [record(running)]) == [False]
    assert ledger.renew("b1", "w1", HOUR, [pair(running)]) == [0]
    assert counts(ledger) == (0, 0, 1, 0)


def test_a_rebuild_counts_a_reject_that_was_never_claimed(ledger: Ledger) -> None:
    ledger.register(settings())

    assert ledger.reject("b1", [(4, 0, "empty"), (5, 9, "tries")], rebuild=True) == [True, True]
    assert ledger.reject("b1", [(4, 0, "empty")], rebuild=True) == [False]
    assert ledger.snapshot("b1").rejects == {"empty": 1, "tries": 1}
    assert ledger.done_among("b1", range(8)) == {4, 5}


def test_attempts_of_a_rebuilt_ledger_are_above_those_of_its_records(ledger: Ledger) -> None:
    ledger.register(settings())
    future = ledger.snapshot("b1").now_ms + 10**9
    ledger.settle("b1", [Settled(0, future, 1, 1, 0, ())], rebuild=True)
    ledger.redis.setbit(KEYS.done, 0, 0)  # its record was found bad, and the sample is wanted again
    feed(ledger, 1)

    assert claim(ledger, 0)[0].attempt == future + 1


# Release and reject


@pytest.mark.parametrize(("failed", "tries"), [(False, None), (True, b"1")])
def test_a_released_sample_waits_again_and_is_sent_at_once(ledger: Ledger, failed: bool, tries: bytes | None) -> None:
    feed(ledger, 2)
    (sample,) = claim(ledger, 1)

    assert ledger.release("b1", [pair(sample)], failed=failed) == 1
    assert counts(ledger) == (2, 0, 0, 0)
    assert given_back(ledger) == [1]
    assert ledger.redis.hget(KEYS.tries, "1") == tries
    assert ledger.redis.hlen(KEYS.owners) == 0
    assert claim(ledger, 1, owner="w2")[0].payload == sample.payload


def test_a_release_happens_once(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    ledger.release("b1", [pair(sample)], failed=True)

    assert ledger.release("b1", [pair(sample)], failed=True) == 0
    assert ledger.redis.hget(KEYS.tries, "0") == b"1"


def test_a_stale_attempt_cannot_release(ledger: Ledger) -> None:
    feed(ledger, 1)
    (stale,) = claim(ledger, 0)
    ledger.release("b1", [pair(stale)], failed=False)
    (current,) = claim(ledger, 0, owner="w2")

    assert ledger.release("b1", [pair(stale)], failed=True) == 0
    assert counts(ledger) == (0, 1, 0, 0)
    assert ledger.redis.hget(KEYS.owners, "0") == b"w2"
    assert ledger.settle("b1", [record(current)]) == [True]


def test_a_settled_sample_cannot_be_released(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    ledger.settle("b1", [record(sample)])

    assert ledger.release("b1", [pair(sample)], failed=False) == 0
    assert counts(ledger) == (0, 0, 1, 0)


def test_a_rejected_sample_ends_once(ledger: Ledger) -> None:
    feed(ledger, 2)
    sample, other = claim(ledger, 0, 1)
    ledger.release("b1", [pair(sample)], failed=True)
    (sample,) = claim(ledger, 0)

    assert ledger.reject("b1", [(0, sample.attempt, "too_long")]) == [True]
    assert ledger.reject("b1", [(0, sample.attempt, "too_long")]) == [False]
    assert ledger.snapshot("b1").rejects == {"too_long": 1}
    assert counts(ledger) == (0, 1, 0, 1)
    assert ledger.redis.hkeys(KEYS.payloads) == [str(other.index).encode()]
    assert ledger.redis.hlen(KEYS.tries) == 0


def test_a_stale_attempt_cannot_reject(ledger: Ledger) -> None:
    feed(ledger, 1)
    (stale,) = claim(ledger, 0)
    ledger.release("b1", [pair(stale)], failed=False)
    (current,) = claim(ledger, 0)

    assert ledger.reject("b1", [(0, stale.attempt, "x")]) == [False]
    assert ledger.settle("b1", [record(current)]) == [True]
    assert ledger.reject("b1", [(0, current.attempt, "x")]) == [False]
    assert counts(ledger) == (0, 0, 1, 0)


# Renew


def test_a_renewed_lease_does_not_run_out(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    lapse(ledger, sample)

    assert ledger.renew("b1", "w1", HOUR, [pair(sample)]) == []
    assert ledger.expire("b1", max_tries=3) == ([], [])


def test_a_lapsed_lease_is_taken_up_again_while_nobody_has_the_sample(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    lapse(ledger, sample)
    ledger.expire("b1", max_tries=3)

    assert ledger.renew("b1", "w1", HOUR, [pair(sample)]) == []
    assert counts(ledger) == (0, 1, 0, 0)
    assert ledger.redis.hget(KEYS.owners, "0") == b"w1"
    assert ledger.claim("b1", "w2", HOUR, [0]) == ([], {0: "leased"})
    assert ledger.settle("b1", [record(sample)]) == [True]


def test_a_renewal_tells_what_was_lost(ledger: Ledger) -> None:
    feed(ledger, 3)
    lost, settled, kept = claim(ledger, 0, 1, 2)
    lapse(ledger, lost)
    ledger.expire("b1", max_tries=3)
    claim(ledger, 0, owner="w2")
    ledger.settle("b1", [record(settled)])

    assert ledger.renew("b1", "w1", HOUR, [pair(lost), pair(settled), pair(kept)]) == [0]
    assert ledger.redis.hgetall(KEYS.owners) == {b"0": b"w2", b"2": b"w1"}
    assert counts(ledger) == (0, 2, 1, 0)


# Many at once


def test_a_call_carries_more_samples_than_one_script_takes(ledger: Ledger) -> None:
    many = 9001
    feed(ledger, many)
    admit(ledger, many)
    assert ledger.snapshot("b1").queued == many

    claimed = claim(ledger, *range(many))
    assert [sample.index for sample in claimed] == list(range(many))
    assert ledger.renew("b1", "w1", HOUR, [pair(sample) for sample in claimed]) == []

    assert ledger.release("b1", [pair(sample) for sample in claimed[:1001]], failed=False) == 1001
    due = ledger.unsent("b1", many)
    assert due == list(range(1001))
    assert ledger.resend("b1", 1, due) == due
    admit(ledger, many)
    claimed[:1001] = claim(ledger, *range(1001))

    assert ledger.reject("b1", [(sample.index, sample.attempt, "x") for sample in claimed[:501]]) == [True] * 501
    records = [record(sample, sample.index) for sample in claimed]
    counted = ledger.settle("b1", records, segment="b1/w1-0.jsonl", committed_bytes=7)
    assert counted == [False] * 501 + [True] * (many - 501)

    now = ledger.snapshot("b1")
    assert (now.done, now.rejected, now.queued, now.in_flight) == (many - 501, 501, 0, 0)
    assert now.completion_tokens == sum(range(501, many))
    assert now.squared_tokens == sum(tokens**2 for tokens in range(501, many))
    assert ledger.done_among("b1", range(2 * many)) == set(range(many))
    assert ledger.committed() == {}  # the superseded ones are to be voided first
    ledger.settle("b1", records[501:], segment="b1/w1-0.jsonl", committed_bytes=7)
    assert ledger.committed() == {"b1/w1-0.jsonl": 7}


def test_leases_expire_some_at_a_time_until_all_have(ledger: Ledger) -> None:
    feed(ledger, 1200)
    admit(ledger, 1200)
    lapse(ledger, *claim(ledger, *range(1200)))

    found = [len(ledger.expire("b1", max_tries=3)[0]) for _ in range(4)]

    assert found == [500, 500, 200, 0]


@pytest.mark.parametrize("index", [7, 8, 1_000_000, 20_000_000])
def test_an_index_may_be_large(ledger: Ledger, index: int) -> None:
    ledger.register(settings())
    ledger.feed("b1", before="", after="x", ended=True, rejected=[(index + 1, "x")], samples=[(index, b"p")])
    admit(ledger)
    (sample,) = claim(ledger, index)

    assert ledger.settle("b1", [record(sample)]) == [True]
    assert ledger.done_among("b1", range(index - 3, index + 4)) == {index, index + 1}
