"""What the keeper does, and what the ledger knows of processes, servers and files, on a real Valkey."""

from typing import Any

import pytest

from common.errors import RedisUnavailable
from common.ledger import LOST, Ended, Lapsed, Ledger, NextTurn, Settled
from common.ledger._keys import dataset_keys
from tests.integration.ledger_steps import (
    HOUR,
    KEYS,
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


def test_a_lease_that_ran_out_brings_its_sample_back(ledger: Ledger) -> None:
    feed(ledger, 3)
    lost, kept = claim(ledger, 0, 1)
    lapse(ledger, lost)

    assert ledger.expire("b1", max_tries=3) == ([Lapsed(0, lost.attempt, "w1")], [])
    assert counts(ledger) == (2, 1, 0, 0)
    assert given_back(ledger) == [0]
    assert ledger.redis.hgetall(KEYS.owners) == {b"1": b"w1"}
    assert ledger.redis.hgetall(KEYS.tries) == {b"0": b"1"}
    assert ledger.snapshot("b1").expired == 1
    assert ledger.settle("b1", [record(kept)]) == [True]


def test_a_lease_lasts_as_long_as_the_claim_says(ledger: Ledger) -> None:
    feed(ledger, 2)
    ledger.claim("b1", "w1", 0, [0])
    ledger.claim("b1", "w1", HOUR, [1])

    back, _ = ledger.expire("b1", max_tries=3)

    assert [lapsed.index for lapsed in back] == [0]


def test_nothing_expires_twice(ledger: Ledger) -> None:
    feed(ledger, 1)
    lapse(ledger, *claim(ledger, 0))
    ledger.expire("b1", max_tries=3)

    assert ledger.expire("b1", max_tries=3) == ([], [])
    assert ledger.snapshot("b1").expired == 1


def test_a_sample_at_the_end_of_its_tries_is_held_for_its_reject(ledger: Ledger) -> None:
    feed(ledger, 1)
    (first,) = claim(ledger, 0)
    ledger.release("b1", [pair(first)], failed=True)
    (second,) = claim(ledger, 0, owner="w2")
    lapse(ledger, second)

    assert ledger.expire("b1", max_tries=2, hold_seconds=HOUR) == ([], [Lapsed(0, second.attempt, "w2")])
    assert counts(ledger) == (0, 1, 0, 0)
    assert ledger.expire("b1", max_tries=2) == ([], [])
    assert ledger.reject("b1", [(0, second.attempt, "tries")]) == [True]
    assert counts(ledger) == (0, 0, 0, 1)


def test_a_held_sample_that_was_not_rejected_is_told_again(ledger: Ledger) -> None:
    feed(ledger, 1)
    (sample,) = claim(ledger, 0)
    lapse(ledger, sample)

    ended = [ledger.expire("b1", max_tries=1, hold_seconds=0)[1] for _ in range(2)]

    assert ended == [[Lapsed(0, sample.attempt, "w1")]] * 2


def test_leases_that_ran_out_can_be_counted_before_they_expire(ledger: Ledger) -> None:
    feed(ledger, 3)
    first, second, _ = claim(ledger, 0, 1, 2)
    lapse(ledger, first, second)

    assert ledger.lapsed("b1") == 2
    ledger.expire("b1", max_tries=3)
    assert ledger.lapsed("b1") == 0


# Messages


def test_samples_are_due_by_the_time_they_were_sent(ledger: Ledger) -> None:
    feed(ledger, 12)
    assert ledger.unsent("b1", 3) == [0, 1, 2]
    assert ledger.resend("b1", 1, [0, 3]) == [0, 3]
    sent_ms = int(ledger.redis.zscore(KEYS.queued, "0") or 0)
    ledger.release("b1", [pair(one) for one in claim(ledger, 11, 10)], failed=False)

    assert ledger.unsent("b1", 99) == [10, 11, 1, 2, *range(4, 10)]  # what was given back comes first
    assert ledger.due("b1", sent_ms - 1) == []
    assert ledger.due("b1", sent_ms + 1) == [0, 3]
    assert ledger.due("b1", sent_ms + 1, limit=1) == [0]
    assert (ledger.snapshot("b1").queued, ledger.snapshot("b1").sent) == (12, 2)


def test_one_caller_alone_sends_a_message(ledger: Ledger) -> None:
    feed(ledger, 3)
    ledger.release("b1", [pair(claim(ledger, 1)[0])], failed=False)
    claim(ledger, 2)

    assert ledger.resend("b1", 1, [0, 1, 2, 99]) == [0, 1]
    assert ledger.resend("b1", 1, [0, 1, 2, 99]) == []
    assert counts(ledger) == (2, 1, 0, 0)


def test_two_callers_of_one_instant_share_the_samples_out(ledger: Ledger) -> None:
    feed(ledger, 4)
    now_ms = ledger.snapshot("b1").now_ms + 1
    ledger.redis.zadd(KEYS.queued, {str(index): 5 for index in range(4)})

    first = ledger.resend("b1", min(now_ms, 6), [0, 1, 2])
    second = ledger.resend("b1", min(now_ms, 6), [0, 1, 2, 3])

    assert (first, second) == ([0, 1, 2], [3])


# Processes, servers, files


def test_a_process_is_known_until_it_says_goodbye(ledger: Ledger) -> None:
    seen_ms = ledger.heartbeat("w1@host", {"limit": 4, "state": "a b"})
    ledger.heartbeat("w2@host", {})

    assert ledger.processes()["w1@host"] == (seen_ms, {"limit": 4, "state": "a b"})
    later_ms = ledger.heartbeat("w1@host", {"limit": 5})
    assert ledger.processes()["w1@host"] == (later_ms, {"limit": 5})
    assert later_ms >= seen_ms
    ledger.heartbeat("w1@host", None)
    assert set(ledger.processes()) == {"w2@host"}


def test_the_model_is_kept_once_it_was_seen(ledger: Ledger) -> None:
    assert ledger.model() is None
    facts: dict[str, Any] = {"model_path": "/m", "context_length": 4096, "weights": None}
    ledger.set_model(facts)

    assert ledger.model() == facts


def test_one_keeper_has_the_lock(ledger: Ledger) -> None:
    lock = ledger.keeping(30)

    assert lock.acquire()
    assert not ledger.keeping(30).acquire()
    lock.release()
    assert ledger.keeping(30).acquire()


def test_forget_leaves_no_key_behind(ledger: Ledger) -> None:
    feed(ledger, 4)
    ledger.feed("b1", before="4", after="5", ended=True, rejected=[(4, "empty")], samples=[])
    done, back, _ = claim(ledger, 0, 1, 2)
    ledger.settle("b1", [record(done, 7, ["loop"])], segment="b1/w1-0.jsonl", committed_bytes=9)
    ledger.release("b1", [pair(back)], failed=True)
    ledger.feed("b1", before="5", after="6", ended=True, rejected=[], samples=[(5, b"x")], prompts={5: 3})
    ledger.observe("b1", [Ended(5, 1, 1.0, LOST)])
    ledger.tell("b1", "w1", b"x" * 20)
    ledger.feeding("b1", 30).acquire()
    ledger.converse("b1", [NextTurn(64, b"p", b"c"), NextTurn(128, b"p", b"c"), NextTurn(192, b"p", b"c")], before="6")
    first, last = claim(ledger, 64, 128)
    unread = Settled(256, 1, 1, 1, 0, (), turns_left=1, answer=b"a")
    answered, truncated = Settled(*pair(first), 1, 1, 0, (), 1, b"a"), Settled(*pair(last), 1, 1, 0, ("truncated",), 1)
    ledger.settle("b1", [answered, truncated, unread])
    for shared in (False, True):
        ledger.remember("b1", [(5, b"0123456789abcdef")], shared=shared)
    assert set(dataset_keys("b1")) <= every_key(ledger)

    ledger.forget("b1")

    assert every_key(ledger) == set()


def test_forget_leaves_other_datasets_alone(ledger: Ledger) -> None:
    feed(ledger, 1)
    ledger.register(settings("b11"))
    ledger.set_committed("b11/w1-0.jsonl", 5)
    ledger.set_committed("b1/w1-0.jsonl", 6)

    ledger.forget("b1")

    assert ledger.datasets() == ["b11"]
    assert ledger.committed() == {"b11/w1-0.jsonl": 5}
    assert ledger.snapshot("b11").state == "open"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("unix:///nowhere/at/all.sock?password=sesame", "Redis at unix:///nowhere/at/all.sock does not answer"),
        ("unix://user:sesame@/nowhere/at/all.sock", "Redis at unix:///nowhere/at/all.sock does not answer"),
        ("redis://:sesame@localhost?db=first", "Redis at redis://localhost does not answer"),
    ],
)
def test_a_redis_that_does_not_answer_is_told_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(RedisUnavailable) as caught:
        Ledger.connect(url, attempts=1)

    assert str(caught.value).startswith(shown)
    assert "sesame" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_what_is_later_than_a_clock_that_was_set_back_is_pulled_back(ledger: Ledger) -> None:
    feed(ledger, 3)
    claim(ledger, 0)
    now_ms = ledger.snapshot("b1").now_ms
    ledger.redis.zadd(KEYS.queued, {"1": now_ms + 3_600_000})

    ledger.pull_back("b1", now_ms, 60)

    assert ledger.redis.zscore(KEYS.queued, "1") == now_ms
    assert ledger.redis.zscore(KEYS.leases, "0") == now_ms + 60_000
    assert (ledger.redis.zscore(KEYS.queued, "2") or 0) <= now_ms
