"""Workers that are dead: who takes them from the list, and what is said of their samples."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.broker import make_celery
from common.errors import UsageError
from common.events import all_events, append_event, make_event
from common.ledger import Ledger, pack_in_flight
from common.ledger._keys import WORKERS, keys_of
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings
from producer.crew import end_worker, workers_of
from workers.keeper import Keeper


@pytest.fixture
def settings(valkey: str, tmp_path: Path) -> Settings:
    return Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))


def dead(**more: Any) -> dict[str, Any]:
    """What a worker of this machine said of itself before its process ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    said = {"kind": "worker", "host": socket.gethostname(), "pid": ended.pid, "limit": 9, "in_flight": 9, "since": 1.0}
    return said | more


def say(ledger: Ledger, name: str, facts: dict[str, Any], seconds_ago: float) -> None:
    now = ledger.heartbeat(name, facts)
    ledger.redis.hset(WORKERS, name, f"{now - round(1000 * seconds_ago)} {json.dumps(facts)}")


def test_a_dead_worker_is_stopped_once_and_its_samples_are_told_of(settings: Settings, ledger: Ledger) -> None:
    """`workers stop` said each time that it ends within 30 s, with an event each."""
    ledger.register(DatasetSettings(name="A", path=Path("x.jsonl")))
    ledger.tell("A", "w2@here", b"x" * 20)
    append_event(settings.output, make_event("worker_joined", "is here", None, "w2@here"))
    say(ledger, "w2@here", dead(), 20)
    assert [(one["state"], one["in_flight"]) for one in workers_of(settings, ledger)] == [("dead", 0)]
    assert end_worker(settings, ledger, "w2", "stop") == (
        "w2@here: its process had ended already; what it had in flight comes back within 40 s; it is taken from the "
        "list"
    )
    assert workers_of(settings, ledger) == []
    assert (ledger.processes(), ledger.orders()) == ({}, {})
    assert ledger.redis.hlen(keys_of("A").clocks) == 0
    assert [event.what for event in all_events(settings.output)] == ["worker_joined", "worker_lost"]
    with pytest.raises(UsageError, match="no worker of this job is named 'w2'"):
        end_worker(settings, ledger, "w2", "stop")


def test_the_keeper_forgets_a_dead_worker_when_its_samples_are_back(settings: Settings, ledger: Ledger) -> None:
    """It stood in `status` with what it had in flight for ten minutes, also in the next run."""
    ledger.register(DatasetSettings(name="A", path=Path("x.jsonl")))
    for name, facts, seconds_ago in (
        ("long@here", dead(), 64),
        ("lately@here", dead(), 30),  # its leases last for 60 s
        ("unknown@there", dead(host="elsewhere"), 64),
        ("lives@here", dead(), 0),
    ):
        say(ledger, name, facts, seconds_ago)
        ledger.tell("A", name, pack_in_flight([]) or b"x" * 20)
    with make_celery("tokenmill", settings) as app:
        keeper = Keeper(settings, app, ledger)
        assert keeper.tick()
        keeper.close()
    assert sorted(ledger.processes()) == ["keeper", "lately@here", "lives@here", "unknown@there"]
    assert ledger.redis.hexists(keys_of("A").clocks, "long@here") == 0
