"""What happens by itself is told once, whoever keeps, and also after the keeper or Redis was lost."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.events import EVENTS, all_events, append_event, make_event
from common.ledger import Ledger
from common.sections import DatasetSettings
from workers.news import News

Facts = Mapping[str, Any]
HERE = 1_000_000


def worker(since: float = 0.0, *servers: tuple[str, str, str]) -> Facts:
    seen = [{"url": url, "state": state, "reason": reason} for url, state, reason in servers]
    return {"kind": "worker", "concurrency": 8, "in_flight": 3, "since": since, "servers": seen}


@pytest.fixture
def news(ledger: Ledger, tmp_path: Path) -> Callable[[], News]:
    ledger.register(DatasetSettings(name="A", path=tmp_path / "a", cap_tokens=100))
    return lambda: News(tmp_path, ledger)


def told(output: Path) -> list[tuple[str, str, str | None]]:
    return [(event.what, event.who, event.dataset) for event in all_events(output)]


def see(news: News, ledger: Ledger, state: str, **workers: Facts) -> None:
    """A tick at which dataset A is in `state`, and these workers were heard of just now."""
    processes = {f"{name}@h": (HERE, facts) for name, facts in workers.items()}
    news.tell({"A": (state, ledger.snapshot("A"))}, processes, HERE)


def test_a_dataset_that_ends_and_opens_again_is_told_once_each(
    news: Callable[[], News], ledger: Ledger, tmp_path: Path
) -> None:
    first = news()
    for state in ("open", "closing", "capped", "capped", "paused", "open", "open", "exhausted", "cancelled"):
        see(first, ledger, state)
        see(news(), ledger, state)  # another keeper, or this one started again
    assert [what for what, _, _ in told(tmp_path)] == ["capped", "reopened", "exhausted"]
    assert {(who, dataset) for _, who, dataset in told(tmp_path)} == {("keeper", "A")}
    assert [event.what for event in ledger.events(9)] == ["capped", "reopened", "exhausted"]
    assert next(iter(all_events(tmp_path))).detail == "0 records, 0 of 100 tokens"


def test_a_halted_dataset_that_a_person_resumed_did_not_open_by_itself(
    news: Callable[[], News], ledger: Ledger, tmp_path: Path
) -> None:
    keeper = news()
    ledger.transition("A", "halted", ["open"], "ids out of range")
    see(keeper, ledger, "halted")
    append_event(tmp_path, make_event("resumed", "open again, after it was halted", "A", "ann@h"))
    see(keeper, ledger, "open")
    assert [what for what, _, _ in told(tmp_path)] == ["halted", "resumed"]
    assert next(iter(all_events(tmp_path))).detail == "ids out of range"


def test_workers_come_and_go(news: Callable[[], News], ledger: Ledger, tmp_path: Path) -> None:
    keeper = news()
    see(keeper, ledger, "open", w1=worker(), w2=worker())
    see(news(), ledger, "open", w1=worker(), w2=worker())
    silent = {"w1@h": (HERE - 10_001, worker()), "w2@h": (HERE, worker())}
    keeper.tell({}, silent, HERE)
    keeper.tell({}, silent, HERE)
    see(keeper, ledger, "open", w1=worker(), w2=worker())
    see(keeper, ledger, "open", w1=worker())
    see(keeper, ledger, "open", w1=worker())
    assert told(tmp_path) == [
        ("worker_joined", "w1@h", None),
        ("worker_joined", "w2@h", None),
        ("worker_lost", "w1@h", None),
        ("worker_joined", "w1@h", None),
        ("worker_drained", "w2@h", None),
    ]


def test_a_worker_that_took_the_place_of_one_while_no_keeper_was_there_is_told_of(
    news: Callable[[], News], ledger: Ledger, tmp_path: Path
) -> None:
    see(news(), ledger, "open", w1=worker(since=5.0))
    later = 4_000_000_000.0  # by a clock that runs decades ahead: told once all the same
    keeper = news()
    for _ in range(3):
        see(keeper, ledger, "open", w1=worker(since=later))
    assert told(tmp_path) == [("worker_joined", "w1@h", None)] * 2


def test_a_server_is_down_when_every_worker_finds_it_so(
    news: Callable[[], News], ledger: Ledger, tmp_path: Path
) -> None:
    keeper, url = news(), "http://one:30000"
    for state in ("up", "down", "half_open", "down", "up", "up"):
        see(keeper, ledger, "open", w1=worker(0.0, (url, state, "refused")), w2=worker(0.0, (url, "down", "refused")))
    servers = [(event.what, event.who, event.detail) for event in all_events(tmp_path) if event.who == url]
    assert servers == [("server_down", url, "refused"), ("server_up", url, "answers again")]


def test_an_emptied_redis_gets_the_end_of_the_file_and_nothing_is_told_twice(
    news: Callable[[], News], ledger: Ledger, tmp_path: Path
) -> None:
    for number in range(250):
        append_event(tmp_path, make_event("cap", str(number), "A", "ann@h"))
    keeper = news()
    see(keeper, ledger, "open", w1=worker())
    assert [event.detail for event in ledger.events()][:2] == ["51", "52"]
    ledger.redis.flushall()
    ledger.register(DatasetSettings(name="A", path=tmp_path / "a", cap_tokens=100))
    see(keeper, ledger, "open")  # the worker has not told of itself again yet
    see(keeper, ledger, "open", w1=worker())
    assert len(told(tmp_path)) == 251
    assert len(ledger.events()) == 200
    assert ledger.events(1)[0].what == "worker_joined"


def test_a_file_that_was_taken_away_is_begun_anew(news: Callable[[], News], ledger: Ledger, tmp_path: Path) -> None:
    keeper = news()
    see(keeper, ledger, "capped", w1=worker())
    (tmp_path / EVENTS).unlink()
    see(keeper, ledger, "capped", w1=worker())
    assert [what for what, _, _ in told(tmp_path)] == ["capped", "worker_joined"]
