"""What the keeper does for conversations: it asks for a feed while answers wait to be followed, and ends them well."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from common.broker import PRODUCE_QUEUE, make_celery, waiting_messages
from common.ledger import Ledger, NextTurn, Settled
from common.payload import Packer
from common.rejects import read_rejects
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings
from common.turns import Made, index_of
from tests.integration.ledger_steps import HOUR, lapse_all
from workers.keeper import Keeper

FIRST, SECOND = index_of(3, 0), index_of(3, 1)


@pytest.fixture
def settings(valkey: str, tmp_path: Path) -> Settings:
    return Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))


@pytest.fixture
def app(settings: Settings, ledger: Ledger) -> Iterator[Celery]:
    with make_celery("tokenmill", settings) as app:
        yield app


@pytest.fixture
def keeper(settings: Settings, app: Celery, ledger: Ledger) -> Iterator[Keeper]:
    """Of a dataset A whose source has ended, with the first of five turns queued."""
    keeper = Keeper(settings, app, ledger)
    ledger.heartbeat("w1@host", {"kind": "worker", "limit": 32})
    ledger.register(DatasetSettings(name="A", path=Path("x.jsonl"), turns="all"))
    payload = Packer().pack([5, 6], {}, turn=0, turns=5)
    assert ledger.converse("A", [NextTurn(FIRST, payload, b"talk")], before="") == 1
    ledger.feed("A", before="", after="1", ended=True, rejected=[], samples=[])
    ledger.admit("A", room=1000, window=64, tokens_per_second=0)
    yield keeper
    keeper.close()


def feeds(ledger: Ledger) -> int:
    return waiting_messages(ledger.redis, PRODUCE_QUEUE)


def test_a_feed_is_asked_for_while_an_answer_waits_though_the_source_has_ended(ledger: Ledger, keeper: Keeper) -> None:
    (claimed,), _ = ledger.claim("A", "w1@host", HOUR, [FIRST])
    assert keeper.tick()
    assert feeds(ledger) == 0
    ledger.settle("A", [Settled(FIRST, claimed.attempt, 2, 3, 0, (), 4, Made(0, [7]).pack())])

    assert keeper.tick()

    assert feeds(ledger) == 1
    assert ledger.snapshot("A").state == "open"
    ledger.redis.delete(PRODUCE_QUEUE)
    assert ledger.converse("A", [NextTurn(SECOND, b"p", b"c", follows=FIRST)], before="1") == 1
    assert keeper.tick()
    assert feeds(ledger) == 0


def test_a_turn_that_is_lost_for_good_stops_its_conversation(ledger: Ledger, keeper: Keeper, tmp_path: Path) -> None:
    for tried in range(3):
        assert ledger.snapshot("A").rejected == 0
        assert ledger.claim("A", f"w{tried}@host", HOUR, [FIRST])[1] == {}
        lapse_all(ledger, "A")
        assert keeper.tick()
    state = ledger.snapshot("A")
    assert (state.rejects, state.stopped) == ({"worker_lost": 1}, {"rejected": 4})
    assert read_rejects(tmp_path, "A").rows[FIRST].turns == 5
    assert keeper.tick()
    assert ledger.snapshot("A").state == "exhausted"
