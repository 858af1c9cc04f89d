"""Datasets, the way in, and claims, on a real Valkey: each transition, and each word it answers."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.ledger import DatasetState, Ledger, Settled
from common.ledger._keys import DATASETS
from common.ledger._lengths import bucket_of
from tests.integration.ledger_steps import HOUR, KEYS, admit, claim, counts, feed, pair, record, settings

# Datasets


def test_a_dataset_is_new_once(ledger: Ledger) -> None:
    assert ledger.register(settings("b1")) == "new"
    assert ledger.register(settings("b1")) == "known"
    assert ledger.register(settings("a2")) == "new"
    assert ledger.datasets() == ["b1", "a2"]


def test_datasets_stand_in_the_order_of_registration_whatever_the_clock_says(ledger: Ledger) -> None:
    ledger.register(settings("c3"))
    ledger.redis.zadd(DATASETS, {"c3": ledger.snapshot("c3").now_ms + 10**9})
    ledger.register(settings("b1"))
    ledger.register(settings("a2"))

    assert ledger.datasets() == ["c3", "b1", "a2"]


def test_a_known_dataset_takes_over_changed_settings(ledger: Ledger) -> None:
    ledger.register(settings(cap_tokens=1000))
    ledger.register(settings(cap_tokens=500, count="total", weight=2.5))

    now = ledger.snapshot("b1")
    assert (now.state, now.cap_tokens, now.count, now.weight) == ("open", 500, "total", 2.5)
    assert now.spec["cap_tokens"] == 500


@pytest.mark.parametrize(
    ("state", "changed", "answer"),
    [
        ("capped", {"cap_tokens": 1001}, "reopened"),
        ("capped", {"cap_tokens": None}, "reopened"),
        ("capped", {"cap_tokens": 1000}, "known"),  # however close it landed
        ("capped", {"cap_tokens": 900}, "known"),
        ("capped", {"cap_tokens": 1001, "count": "total"}, "known"),  # 1,090 are spent then
        ("capped", {"cap_tokens": 1091, "count": "total"}, "reopened"),
        ("failed", {"cap_tokens": 1000}, "reopened"),
        ("exhausted", {"cap_tokens": 2000}, "known"),
        ("halted", {"cap_tokens": 2000}, "reopened"),
        ("paused", {"cap_tokens": 2000}, "known"),
    ],
)
def test_a_raised_cap_reopens_a_capped_dataset(
    ledger: Ledger, state: str, changed: dict[str, Any], answer: str
) -> None:
    feed(ledger, 1)
    ledger.settle("b1", [record(claim(ledger, 0)[0], 990)])
    ledger.transition("b1", state, ["open"], "why")

    assert ledger.register(settings(**changed)) == answer
    now = ledger.snapshot("b1")
    assert (now.state, now.reason) == (("open", "") if answer == "reopened" else (state, "why"))


def test_a_transition_moves_only_from_its_sources(ledger: Ledger) -> None:
    ledger.register(settings())

    assert ledger.transition("b1", "paused", ["open", "closing"], "by hand") == "open"
    assert ledger.transition("b1", "halted", ["open"], "gate") == "paused"
    assert ledger.transition("none", "halted", ["open"]) == ""
    now = ledger.snapshot("b1")
    assert (now.state, now.reason) == ("paused", "by hand")


def test_a_snapshot_shows_all_of_a_dataset(ledger: Ledger) -> None:
    ledger.register(settings(cap_tokens=1000, count="total", weight=3))
    rows = [(index, b"p") for index in range(1, 6)]
    ledger.feed("b1", before="", after="row 6", ended=True, rejected=[(0, "empty")], samples=rows)
    admit(ledger)
    first, second, _ = claim(ledger, 1, 2, 3)
    ledger.settle("b1", [record(first, 5), record(second, 300, ["truncated", "loop"])])
    before, _ = ledger.redis.time()

    now = ledger.snapshot("b1")

    assert before <= now.now_ms / 1000 <= ledger.redis.time()[0] + 1
    assert now == DatasetState(
        name="b1",
        now_ms=now.now_ms,
        spec=settings(cap_tokens=1000, count="total", weight=3).model_dump(mode="json"),
        state="open",
        reason="",
        cap_tokens=1000,
        count="total",
        weight=3.0,
        cursor="row 6",
        ended=True,
        room=997,
        window=64,
        starts=3,
        fed=5,
        fed_bytes=5,
        tokens_per_second=12.5,
        done=2,
        rejected=1,
        prompt_tokens=200,
        completion_tokens=305,
        cached_tokens=120,
        squared_tokens=5**2 + 300**2,
        max_tokens=300,
        expired=0,
        queued=2,
        sent=0,
        in_flight=1,
        lengths={bucket_of(5): 1, bucket_of(300): 1},
        rejects={"empty": 1},
        flags={"truncated": 1, "loop": 1},
        recent=2,
    )
    assert now.spent_tokens == 505


def test_an_unknown_dataset_has_an_empty_snapshot(ledger: Ledger) -> None:
    now = ledger.snapshot("none")

    assert (now.state, now.cap_tokens, now.cursor, now.queued, now.spent_tokens) == ("", None, "", 0, 0)


# The budget's state machine


@pytest.mark.parametrize(
    ("ended", "queued", "in_flight", "room", "state"),
    [
        (False, 1, 1, 5, "open"),
        (False, 0, 0, 5, "open"),
        (False, 1, 1, 0, "closing"),
        (False, 1, 0, 0, "capped"),
        (False, 0, 0, -3, "capped"),
        (True, 1, 0, 5, "open"),
        (True, 0, 1, 5, "open"),
        (True, 0, 1, 0, "closing"),
        (True, 0, 0, 5, "exhausted"),
        (True, 0, 0, 0, "exhausted"),
    ],
)
@pytest.mark.parametrize("before", ["open", "closing"])
def test_admit_moves_a_dataset(
    ledger: Ledger, before: str, ended: bool, queued: int, in_flight: int, room: int, state: str
) -> None:
    feed(ledger, queued + in_flight, ended=ended)
    claim(ledger, *range(in_flight))
    ledger.transition("b1", before, ["open"])

    assert admit(ledger, room) == state
    now = ledger.snapshot("b1")
    assert (now.state, now.room, now.window, now.tokens_per_second) == (state, max(0, room), 64, 12.5)


@pytest.mark.parametrize("state", ["paused", "halted", "failed", "capped", "exhausted"])
@pytest.mark.parametrize("room", [0, 9])
def test_admit_leaves_a_dataset_that_a_person_or_a_gate_holds(ledger: Ledger, state: str, room: int) -> None:
    feed(ledger, 1, ended=True)
    ledger.settle("b1", [record(claim(ledger, 0)[0])])
    ledger.transition("b1", state, ["open"])

    assert admit(ledger, room) == state
    assert ledger.snapshot("b1").state == state


def test_admit_of_an_unknown_dataset_leaves_nothing_behind(ledger: Ledger) -> None:
    assert admit(ledger) == ""
    assert ledger.redis.keys() == []


# The way in


def test_a_feed_queues_rows_and_moves_the_cursor(ledger: Ledger) -> None:
    ledger.register(settings())

    assert ledger.feed("b1", before="", after="a", ended=False, rejected=[], samples=[(0, b"x"), (1, b"y")]) == 2
    assert ledger.feed("b1", before="a", after="b", ended=True, rejected=[], samples=[(2, b"z")]) == 1
    now = ledger.snapshot("b1")
    assert (now.cursor, now.ended, now.queued) == ("b", True, 3)


def test_a_feed_from_a_cursor_that_moved_changes_nothing(ledger: Ledger) -> None:
    feed(ledger, 2)
    before = ledger.snapshot("b1")

    assert ledger.feed("b1", before="", after="9", ended=True, rejected=[(7, "x")], samples=[(8, b"x")]) is None
    after = ledger.snapshot("b1")
    assert (after.cursor, after.ended, after.queued, after.rejected) == (before.cursor, False, 2, 0)


def test_a_feed_skips_rows_that_are_done(ledger: Ledger) -> None:
    ledger.register(settings())
    ledger.settle("b1", [Settled(1, 5, 1, 1, 0, ())], rebuild=True)

    rows = [(0, b"x"), (1, b"y"), (2, b"z")]
    assert ledger.feed("b1", before="", after="3", ended=False, rejected=[], samples=rows) == 2
    assert ledger.unsent("b1", 9) == [0, 2]
    assert ledger.redis.hexists(KEYS.payloads, "1") is False


def test_a_feed_counts_a_rejected_row_once(ledger: Ledger) -> None:
    ledger.register(settings())
    rejected = [(0, "empty"), (1, "too_long"), (2, "empty")]
    ledger.feed("b1", before="", after="3", ended=False, rejected=rejected, samples=[])
    ledger.feed("b1", before="3", after="4", ended=False, rejected=[(2, "empty"), (3, "too_long")], samples=[])

    now = ledger.snapshot("b1")
    assert (now.rejected, now.rejects) == (4, {"empty": 2, "too_long": 2})
    assert ledger.done_among("b1", range(9)) == {0, 1, 2, 3}


def test_one_feed_has_the_lock(ledger: Ledger) -> None:
    lock = ledger.feeding("b1", 30)

    assert lock.acquire()
    assert not ledger.feeding("b1", 30).acquire()
    assert ledger.feeding("a2", 30).acquire()
    lock.release()
    assert ledger.feeding("b1", 30).acquire()


@given(
    done=st.sets(st.integers(0, 70), max_size=20),
    first=st.integers(0, 70),
    count=st.integers(0, 70),
)
@example(done={7, 8, 15, 16}, first=8, count=8)
@example(done={7, 8, 15, 16}, first=7, count=1)
@example(done={63, 64}, first=60, count=4)
@example(done=set(), first=3, count=9)
def test_done_among_knows_each_index_at_every_border(valkey: str, done: set[int], first: int, count: int) -> None:
    ledger = Ledger.connect(valkey)
    ledger.redis.flushall()
    for index in done:
        ledger.redis.setbit(KEYS.done, index, 1)

    found = ledger.done_among("b1", range(first, first + count))
    ledger.close()

    assert found == {index for index in done if first <= index < first + count}


# Claims


def test_a_claim_hands_over_the_payload_and_takes_room(ledger: Ledger) -> None:
    feed(ledger, 3)

    claimed, refused = ledger.claim("b1", "w1", HOUR, [2, 0])

    assert [(sample.dataset, sample.index, sample.payload) for sample in claimed] == [
        ("b1", 2, b"prompt 2"),
        ("b1", 0, b"prompt 0"),
    ]
    assert refused == {}
    assert counts(ledger) == (1, 2, 0, 0)
    assert ledger.snapshot("b1").room == 998


def test_a_claim_says_why_not(ledger: Ledger) -> None:
    feed(ledger, 4)
    done, leased = claim(ledger, 0, 1)
    ledger.settle("b1", [record(done)])
    admit(ledger, 1)

    claimed, refused = ledger.claim("b1", "w2", HOUR, [0, 1, 99, 2, 3])

    assert [sample.index for sample in claimed] == [2]
    assert refused == {0: "done", leased.index: "leased", 99: "unknown", 3: "capped"}
    assert ledger.snapshot("b1").room == 0


@pytest.mark.parametrize(
    ("state", "word"),
    [(state, "capped") for state in ("closing", "capped", "exhausted", "halted", "failed")] + [("paused", "paused")],
)
def test_a_dataset_that_is_not_open_hands_nothing_over(ledger: Ledger, state: str, word: str) -> None:
    feed(ledger, 1)
    ledger.transition("b1", state, ["open"])

    assert ledger.claim("b1", "w1", HOUR, [0]) == ([], {0: word})
    assert counts(ledger) == (1, 0, 0, 0)


def test_a_claim_in_an_unknown_dataset_finds_nothing(ledger: Ledger) -> None:
    assert ledger.claim("none", "w1", HOUR, [0]) == ([], {0: "unknown"})


def test_an_index_named_twice_in_one_claim_is_handed_over_once(ledger: Ledger) -> None:
    feed(ledger, 1)

    claimed, refused = ledger.claim("b1", "w1", HOUR, [0, 0])

    assert len(claimed) == 1
    assert refused == {0: "leased"}
    assert ledger.snapshot("b1").room == 999
    assert ledger.settle("b1", [record(claimed[0])]) == [True]


def test_an_attempt_is_the_time_of_its_claim(ledger: Ledger) -> None:
    feed(ledger, 1)
    before = ledger.snapshot("b1").now_ms

    (sample,) = claim(ledger, 0)

    assert before <= sample.attempt <= ledger.snapshot("b1").now_ms


def test_attempts_grow_within_one_millisecond(ledger: Ledger) -> None:
    feed(ledger, 1)
    attempts = []
    for _ in range(20):
        (sample,) = claim(ledger, 0)
        attempts.append(sample.attempt)
        ledger.release("b1", [pair(sample)], failed=False)

    assert attempts == sorted(set(attempts))


def test_attempts_grow_while_the_clock_of_redis_is_behind(ledger: Ledger) -> None:
    feed(ledger, 2)
    future = ledger.snapshot("b1").now_ms + 10**9
    ledger.redis.setrange(KEYS.attempts, 6, future.to_bytes(6, "big"))

    first, second = claim(ledger, 0, 1)

    assert first.attempt < future
    assert second.attempt == future + 1
    assert ledger.settle("b1", [record(second)]) == [True]
