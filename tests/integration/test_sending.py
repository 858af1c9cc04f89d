"""Which samples get a message now: the keeper's ticks with several datasets, on a real ledger and a real queue."""

from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from celery import Celery

from common.broker import make_celery, pending_samples
from common.ledger import InFlight, Ledger, pack_in_flight
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings
from tests.integration.ledger_steps import PatientKeeper
from workers.keeper import Keeper


@pytest.fixture
def app(valkey: str, tmp_path: Path) -> Iterator[Celery]:
    settings = Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))
    with make_celery("tokenmill", settings) as app:
        app.conf["tokenmill"] = settings
        yield app


@pytest.fixture
def keeper(app: Celery, ledger: Ledger) -> Iterator[Keeper]:
    keeper = PatientKeeper(app.conf["tokenmill"], app, ledger)
    yield keeper
    keeper.close()


def fill(ledger: Ledger, name: str, samples: int, weight: float = 1.0) -> None:
    ledger.register(DatasetSettings(name=name, path=Path("x.jsonl"), weight=weight))
    rows = [(index, b"prompt") for index in range(samples)]
    ledger.feed(name, before="", after="1", ended=True, rejected=[], samples=rows)
    ledger.admit(name, room=1000, window=64, tokens_per_second=0)


def slots(ledger: Ledger, number: int) -> None:
    ledger.heartbeat("w1@host", {"kind": "worker", "limit": number})


def take(ledger: Ledger, most: int) -> Counter[str]:
    """What a worker does with free slots: it takes messages, oldest first, and claims. Answers whose samples it got."""
    taken: Counter[str] = Counter()
    while sum(taken.values()) < most and (raw := ledger.redis.rpop("generate")) is not None:
        dataset, indices = msgspec.json.decode(b64decode(msgspec.json.decode(cast("bytes", raw))["body"]))[0]
        claimed, _ = ledger.claim(dataset, "w1@host", 3600, indices)
        taken[dataset] += len(claimed)
    return taken


def test_nothing_is_sent_while_nobody_could_start_it(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, "A", 500)
    for _ in range(3):
        assert keeper.tick()
    out = pending_samples(ledger.redis)["A"]
    assert out == set(range(len(out)))  # in the order of the source
    assert len(out) < 10
    slots(ledger, 40)
    assert keeper.tick()
    assert 40 <= len(pending_samples(ledger.redis)["A"]) < 60


def test_slots_are_shared_by_weight(ledger: Ledger, keeper: Keeper) -> None:
    for name, weight in (("A", 1.0), ("B", 2.0), ("C", 5.0)):
        fill(ledger, name, 200, weight)
    slots(ledger, 80)
    assert keeper.tick()
    assert take(ledger, 80) == {"A": 10, "B": 20, "C": 50}


def test_one_that_is_paused_leaves_its_slots_to_the_others_from_the_next_tick_on(
    ledger: Ledger, keeper: Keeper
) -> None:
    fill(ledger, "A", 200)
    fill(ledger, "B", 200)
    slots(ledger, 20)
    assert keeper.tick()
    out = pending_samples(ledger.redis)
    assert len(out["A"]) == len(out["B"])
    ledger.transition("A", "paused", ["open"])
    assert take(ledger, 20) == {"A": 0, "B": len(out["B"])}
    assert keeper.tick()
    assert take(ledger, 20 - len(out["B"])) == {"B": 20 - len(out["B"])}
    # What was refused is sent once it is open again, first things first.
    ledger.transition("A", "open", ["paused"])
    behind = len(pending_samples(ledger.redis)["B"])
    slots(ledger, 40)
    assert keeper.tick()
    assert take(ledger, 20 + behind) == {"A": 20, "B": behind}
    assert sorted(
        int(index) for index in cast("list[bytes]", ledger.redis.zrange("tokenmill:d:A:leases", 0, -1))
    ) == list(range(20))


def test_a_new_dataset_gets_the_next_slots(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, "A", 200)
    slots(ledger, 20)
    assert keeper.tick()
    assert take(ledger, 20) == {"A": 20}
    behind = len(pending_samples(ledger.redis)["A"])  # what is out already is started first
    fill(ledger, "B", 200)
    slots(ledger, 40)
    assert keeper.tick()
    assert take(ledger, 20) == {"A": behind, "B": 20 - behind}


def test_a_worker_that_is_long_dead_is_forgotten_with_its_clocks(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, "A", 1)
    for name in ("w0@host", "w1@host"):
        ledger.heartbeat(name, {"kind": "worker", "limit": 4})
        ledger.tell("A", name, pack_in_flight([InFlight(0, 1, 100.0, 17.0)]))
    ledger.redis.hset("tokenmill:workers", "w0@host", '1000 {"kind":"worker","limit":4}')
    assert keeper.tick()
    assert set(ledger.progress("A").clocks) == {"w1@host"}
    assert "w0@host" not in ledger.processes()


def suspects(ledger: Ledger, name: str, samples: int) -> None:
    """The first samples have lost two workers each."""
    for _ in range(2):
        ledger.claim(name, "w0@host", 0, list(range(samples)))
        ledger.expire(name, max_tries=10)


def test_suspects_do_not_hold_up_the_samples_behind_them(ledger: Ledger, keeper: Keeper) -> None:
    fill(ledger, "A", 500)
    suspects(ledger, "A", 100)
    slots(ledger, 100)
    held: Counter[str] = Counter()
    for _ in range(4):
        assert keeper.tick()
        held += take(ledger, 100 - sum(held.values()))
    assert held == {"A": 100}


def test_suspects_do_not_hold_up_other_datasets(ledger: Ledger, keeper: Keeper) -> None:
    for name in ("A", "B"):
        fill(ledger, name, 500)
    suspects(ledger, "A", 100)
    slots(ledger, 100)
    held: Counter[str] = Counter()
    for _ in range(6):
        assert keeper.tick()
        held += take(ledger, 100 - sum(held.values()))
    assert sum(held.values()) == 100
    assert abs(held["A"] - held["B"]) < 20
