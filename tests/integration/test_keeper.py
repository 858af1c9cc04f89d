"""The keeper's ticks on a real ledger and a real queue: caps, lost messages, lapsed leases, orphaned records."""

import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from celery import Celery

from common.broker import Sender, make_celery
from common.ledger import Claimed, Ledger, Settled
from common.ledger._keys import keys_of
from common.rejects import read_rejects
from common.sections import DatasetSettings, TokenizerSettings
from common.segments import count
from common.settings import Settings
from tests.integration.ledger_steps import PatientKeeper, lapse_all
from tests.integration.worker_steps import assert_books_agree
from tests.lines import record_line, void_line, write_segment
from workers.keeper import Keeper


@pytest.fixture
def settings(valkey: str, tmp_path: Path) -> Settings:
    return Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))


@pytest.fixture
def app(settings: Settings, ledger: Ledger) -> Iterator[Celery]:
    with make_celery("tokenmill", settings) as app:
        yield app


@pytest.fixture
def keeper(settings: Settings, app: Celery, ledger: Ledger) -> Iterator[Keeper]:
    keeper = PatientKeeper(settings, app, ledger)
    slots(ledger, 32)
    yield keeper
    keeper.close()


def fill(ledger: Ledger, samples: int, dataset: str = "A", *, ended: bool = True, **more: Any) -> None:
    """Register a dataset and queue its samples 0 to `samples - 1`, without a message; they were "sent" long ago."""
    ledger.register(DatasetSettings(name=dataset, path=Path("x.jsonl"), **more))
    rows = [(index, b"prompt %d" % index) for index in range(samples)]
    ledger.feed(dataset, before="", after="1", ended=ended, rejected=[], samples=rows)
    ledger.admit(dataset, room=1000, window=64, tokens_per_second=0)
    age(ledger, dataset)


def slots(ledger: Ledger, number: int) -> None:
    """A worker that lives, with so many slots."""
    ledger.heartbeat("w1@host", {"kind": "worker", "limit": number})


def age(ledger: Ledger, dataset: str = "A", sent_ms: int = 1) -> None:
    """Turn the clock: what is queued was sent long ago, or then."""
    indices = cast("list[bytes]", ledger.redis.zrange(key := f"tokenmill:d:{dataset}:queued", 0, -1))
    if indices:
        ledger.redis.zadd(key, dict.fromkeys(indices, sent_ms))


def claim(ledger: Ledger, *indices: int, owner: str = "w1@host", dataset: str = "A") -> list[Claimed]:
    claimed, refused = ledger.claim(dataset, owner, 3600, indices)
    assert refused == {}
    return claimed


def settle(ledger: Ledger, samples: Sequence[Claimed], tokens: int) -> list[bool]:
    return ledger.settle("A", [Settled(one.index, one.attempt, 3, tokens, 1, ()) for one in samples])


def messages(ledger: Ledger, queue: str = "generate") -> list[tuple[str, Any]]:
    """What waits in a queue, oldest first: the arguments as a person reads them, and as the worker does."""
    raw = [msgspec.json.decode(text) for text in cast("list[bytes]", ledger.redis.lrange(queue, 0, -1))]
    return [(one["headers"]["argsrepr"], msgspec.json.decode(b64decode(one["body"]))[0]) for one in reversed(raw)]


def sent(ledger: Ledger, dataset: str = "A") -> list[int]:
    """The indices in the messages that wait."""
    return sorted(index for _, (name, indices) in messages(ledger) if name == dataset for index in indices)


# Caps and feeds


def test_a_cap_closes_its_dataset_and_a_raised_one_reopens_it(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 10, cap_tokens=20_000)
    first, second = claim(ledger, 0, 1)
    settle(ledger, [first], 19_000)
    assert keeper.tick()
    assert (ledger.snapshot("A").state, ledger.snapshot("A").room) == ("closing", 0)
    assert ledger.claim("A", "w", 60, [5])[1] == {5: "capped"}
    settle(ledger, [second], 900)
    assert keeper.tick()
    assert ledger.snapshot("A").state == "capped"
    assert messages(ledger) == []
    assert messages(ledger, "produce") == []

    assert ledger.register(DatasetSettings(name="A", path=Path("x.jsonl"), cap_tokens=10**6)) == "reopened"
    assert keeper.tick()
    assert (ledger.snapshot("A").state, ledger.snapshot("A").room > 8) == ("open", True)
    assert sent(ledger) == list(range(2, 10))


def test_a_dataset_with_all_its_rows_done_is_exhausted(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 2)
    settle(ledger, claim(ledger, 0, 1), 10)
    assert keeper.tick()
    assert ledger.snapshot("A").state == "exhausted"


def test_a_feed_is_asked_for_while_there_is_room_and_rows_are_left(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 0, "hungry", ended=False)
    fill(ledger, 60, "fed", ended=False)  # of a window of 64
    fill(ledger, 0, "capped", ended=False, cap_tokens=1)
    ledger.settle("capped", [Settled(0, 0, 3, 10, 0, ())], rebuild=True)
    fill(ledger, 5, "ended", ended=True)
    fill(ledger, 0, "paused", ended=False)
    ledger.transition("paused", "paused", ["open"])
    assert keeper.tick()
    assert messages(ledger, "produce") == [("hungry", ["hungry"])]
    # With nobody there to feed, requests do not pile up: one a second would be 36,000 after ten hours.
    assert all(keeper.tick() for _ in range(5))
    assert messages(ledger, "produce") == [("hungry", ["hungry"])]


def test_the_window_follows_the_slots_of_the_workers_that_live(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 0, ended=False)
    assert keeper.tick()
    assert ledger.snapshot("A").window == 64
    for name, limit in (("w1@host", 100), ("w2@host", 50)):
        ledger.heartbeat(name, {"kind": "worker", "limit": limit})
    assert keeper.tick()
    assert ledger.snapshot("A").window == 300


def test_a_message_that_was_lost_is_sent_again_and_one_that_waits_is_not(
    app: Celery, ledger: Ledger, keeper: Keeper
) -> None:
    fill(ledger, 12)
    Sender(app).generate([("A", range(at, at + 4)) for at in (0, 4, 8)])
    assert messages(ledger) == [(f"A {n}-{n + 3}", ["A", [n, n + 1, n + 2, n + 3]]) for n in (0, 4, 8)]
    assert keeper.tick()
    assert sent(ledger) == list(range(12))  # all wait; nothing was sent twice

    ledger.redis.rpop("generate")
    assert keeper.tick()
    assert sent(ledger) == list(range(12))
    assert messages(ledger)[2:] == [(f"A {n}", ["A", [n]]) for n in range(4)]

    ledger.redis.delete("generate")
    age(ledger)
    assert keeper.tick()
    assert sent(ledger) == list(range(12))
    ledger.redis.delete("generate")
    age(ledger, sent_ms=ledger.snapshot("A").now_ms + 3_600_000)  # however slow this machine is
    assert keeper.tick()
    assert sent(ledger) == []  # within two seconds a message may be on its way


def test_a_message_that_a_worker_holds_is_not_sent_again(app: Celery, ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 3)
    Sender(app).generate([("A", [0, 1])])
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("generate")
        message = queue.get(timeout=60)
        assert ledger.redis.hlen("unacked") == 1
        assert keeper.tick()
        assert sent(ledger) == [2]
        message.ack()  # and not claimed: the worker died just then
        assert keeper.tick()
        assert sent(ledger) == [0, 1, 2]
        queue.close()


def test_samples_that_were_given_back_are_sent_at_once_in_their_order(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 20)
    claimed = claim(ledger, *range(20))
    ledger.release("A", [(one.index, one.attempt) for one in claimed], failed=False)
    assert keeper.tick()
    assert messages(ledger) == [(f"A {n}", ["A", [n]]) for n in range(20)]


def test_a_paused_dataset_is_left_alone_until_it_is_resumed(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 3)
    ledger.transition("A", "paused", ["open"])
    assert keeper.tick()
    assert sent(ledger) == []
    ledger.transition("A", "open", ["paused"])
    assert keeper.tick()
    assert sent(ledger) == [0, 1, 2]


def test_no_more_is_sent_again_than_there_is_room_for(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 9, cap_tokens=60_000)
    assert keeper.tick()
    assert sent(ledger) == list(range(ledger.snapshot("A").room))
    assert 1 < len(sent(ledger)) < 9


# Workers that died


def test_lapsed_leases_come_back_and_are_sent_again(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 6)
    lost = claim(ledger, 0, 1, 2, 3)
    lapse_all(ledger, "A")
    kept = claim(ledger, 4, owner="w2@host")
    assert keeper.tick()
    state = ledger.snapshot("A")
    assert (state.queued, state.in_flight, state.expired) == (5, 1, 4)
    assert sent(ledger) == [0, 1, 2, 3, 5]
    again = claim(ledger, 0, 1, 2, 3, 5, owner="w2@host")
    assert all(new.attempt > old.attempt for new, old in zip(again, lost, strict=False))
    assert settle(ledger, lost, 10) == [False] * 4
    assert settle(ledger, [*kept, *again], 10) == [True] * 6


def test_after_a_leap_of_the_clock_workers_renew_first_and_lose_no_try(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 2)
    alive, dead = claim(ledger, 0)[0], claim(ledger, 1, owner="dead@host")[0]
    assert keeper.tick()
    assert keeper._tick_ms is not None
    keeper._tick_ms -= 3_600_000  # the tick before was an hour ago
    lapse_all(ledger, "A")
    assert keeper.tick()
    assert (ledger.snapshot("A").in_flight, ledger.snapshot("A").expired) == (2, 0)
    assert ledger.renew("A", "w1@host", 3600, [(0, alive.attempt)]) == []
    keeper._lenient_until_ms = 0  # half a lease later
    assert keeper.tick()
    assert (ledger.snapshot("A").in_flight, ledger.snapshot("A").expired) == (1, 1)
    assert ledger.redis.hgetall(keys_of("A").tries) == {b"1": b"1"}
    assert settle(ledger, [alive, dead], 10) == [True, True]


def test_a_sample_that_lost_three_workers_is_rejected_with_its_line(
    ledger: Ledger, keeper: Keeper, tmp_path: Path
) -> None:
    fill(ledger, 2)
    for tried in range(3):
        assert ledger.snapshot("A").rejected == 0
        claim(ledger, 0, owner=f"w{tried}@host")
        lapse_all(ledger, "A")
        assert keeper.tick()
    state = ledger.snapshot("A")
    assert (state.rejected, state.queued, state.in_flight) == (1, 1, 0)
    assert state.rejects == {"worker_lost": 1}
    assert {index: row.reason for index, row in read_rejects(tmp_path, "A").rows.items()} == {0: "worker_lost"}
    assert ledger.claim("A", "w", 60, [0])[1] == {0: "done"}


# Records that nobody settled


def written(sample: Claimed, tokens: int = 4) -> bytes:
    return record_line(sample.index, sample.attempt, answer=range(tokens))


def test_records_of_a_worker_that_died_before_it_settled_are_counted_once(
    ledger: Ledger, keeper: Keeper, tmp_path: Path
) -> None:
    fill(ledger, 4)
    a, b, c, d = claim(ledger, 0, 1, 2, 3)
    assert keeper.tick()  # it has looked at the files, and the worker goes on
    size = len(written(a))
    path = write_segment(tmp_path, "w1-host-0.jsonl", written(a), written(b), written(c, tokens=6), written(d)[:40])
    ledger.settle("A", [Settled(0, a.attempt, 3, 4, 1, ())], segment="A/w1-host-0.jsonl", committed_bytes=size)
    lapse_all(ledger, "A")
    for _ in range(2):
        assert keeper.tick()
        state = ledger.snapshot("A")
        assert (state.done, state.completion_tokens, state.in_flight, state.queued) == (3, 4 + 4 + 6, 0, 1)
    assert ledger.committed() == {"A/w1-host-0.jsonl": path.stat().st_size - 40}
    assert sent(ledger) == [3]


def test_a_record_of_a_superseded_attempt_is_voided(ledger: Ledger, keeper: Keeper, tmp_path: Path) -> None:
    fill(ledger, 2)
    late = claim(ledger, 0, 1)
    lapse_all(ledger, "A")
    assert keeper.tick()
    other = claim(ledger, 0, owner="w2@host")
    settle(ledger, other, 7)
    write_segment(tmp_path, "w2-host-0.jsonl", written(other[0], tokens=7))
    ledger.set_committed("A/w2-host-0.jsonl", len(written(other[0], tokens=7)))
    write_segment(tmp_path, "w1-host-0.jsonl", written(late[0]), written(late[1]))  # it was frozen, and died
    for _ in range(2):
        assert keeper.tick()
    state = ledger.snapshot("A")
    assert (state.done, state.completion_tokens) == (2, 7 + 4)
    assert (tmp_path / "A" / "keeper-0.jsonl").read_bytes() == void_line(0, late[0].attempt)
    assert_books_agree(ledger, tmp_path, "A")


def test_a_record_that_its_worker_is_about_to_void_is_not_counted(
    settings: Settings, app: Celery, ledger: Ledger, tmp_path: Path
) -> None:
    """Else the sample would be done in the ledger, and its only record void."""
    fill(ledger, 1)
    late = claim(ledger, 0)
    lapse_all(ledger, "A")
    ledger.expire("A", max_tries=3)
    other = claim(ledger, 0, owner="w2@host")
    path = write_segment(tmp_path, "w1-host-0.jsonl", written(late[0]))
    size = path.stat().st_size
    record = Settled(0, late[0].attempt, 3, 4, 1, ())
    assert ledger.settle("A", [record], segment="A/w1-host-0.jsonl", committed_bytes=size) == [False]

    starting = PatientKeeper(settings, app, ledger)  # a keeper that starts looks at all files
    assert starting.tick()
    with path.open("ab") as file:
        file.write(void_line(0, late[0].attempt))
    assert settle(ledger, other, 4) == [True]
    write_segment(tmp_path, "w2-host-0.jsonl", written(other[0]))
    assert list(count(tmp_path, "A").entries) == [0]
    starting.close()


def test_a_record_whose_claim_redis_forgot_counts(ledger: Ledger, keeper: Keeper, tmp_path: Path) -> None:
    """A machine that crashes takes the last second of Redis with it, and not the files."""
    fill(ledger, 1)
    (sample,) = claim(ledger, 0)
    ledger.forget("A")
    fill(ledger, 1)
    write_segment(tmp_path, "w1-host-0.jsonl", written(sample))
    assert keeper.tick()
    assert ledger.snapshot("A").done == 1
    assert_books_agree(ledger, tmp_path, "A")


def test_what_a_worker_voided_itself_is_not_counted(ledger: Ledger, keeper: Keeper, tmp_path: Path) -> None:
    fill(ledger, 1)
    (sample,) = claim(ledger, 0)
    write_segment(tmp_path, "w1-host-0.jsonl", written(sample), void_line(0, sample.attempt))
    lapse_all(ledger, "A")
    assert keeper.tick()
    assert (ledger.snapshot("A").done, ledger.snapshot("A").queued) == (0, 1)
    assert_books_agree(ledger, tmp_path, "A")


# Two keepers, and one in trouble


def test_one_keeper_is_at_it_at_a_time(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, 3)
    lock = ledger.keeping(30)
    assert lock.acquire()
    assert not keeper.tick()
    assert sent(ledger) == []
    lock.release()
    assert keeper.tick()
    assert sent(ledger) == [0, 1, 2]


def test_two_keepers_at_once_do_nothing_twice(settings: Settings, valkey: str, app: Celery, ledger: Ledger) -> None:
    fill(ledger, 200)
    slots(ledger, 300)
    claimed = claim(ledger, *range(50))
    write_segment(settings.output, "w1-host-0.jsonl", *map(written, claimed[:20]))
    lapse_all(ledger, "A")
    keepers = [PatientKeeper(settings, app, Ledger.connect(valkey)) for _ in range(2)]
    ticks: list[bool] = []

    def keep(keeper: Keeper) -> None:
        ticks.extend(keeper.tick() for _ in range(20))

    threads = [threading.Thread(target=keep, args=(keeper,)) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(ticks)
    state = ledger.snapshot("A")
    assert (state.done, state.completion_tokens, state.in_flight, state.queued) == (20, 80, 0, 180)
    assert state.expired == 30
    assert sent(ledger) == list(range(20, 200))
    for keeper in keepers:
        keeper.close()
        keeper._ledger.close()


def test_a_dataset_whose_files_cannot_be_read_does_not_hold_up_the_others(
    ledger: Ledger, keeper: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(ledger, 2, "A")
    fill(ledger, 2, "B")
    (tmp_path / "A" / "w1-host-0.jsonl").mkdir(parents=True)
    assert keeper.tick()
    assert sent(ledger, "B") == [0, 1]
    assert [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"] == [
        f"A: its files cannot be read or written ([Errno 21] Is a directory: '{tmp_path}/A/w1-host-0.jsonl')"
    ]
    (tmp_path / "A" / "w1-host-0.jsonl").rmdir()
    assert keeper.tick()
    assert sent(ledger, "A") == [0, 1]
