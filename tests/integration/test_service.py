"""A worker put together: it waits for what it must know, and ends whenever it is told to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common import segments
from common.ledger import Ledger
from common.sections import DatasetSettings, SamplingSettings, ServerSettings, TokenizerSettings, WorkerSettings
from common.settings import Settings
from tests.integration.worker_steps import VOCAB_SIZE, Server, assert_books_agree, fill, run, until
from workers import in_flight
from workers.samples import Doorbell
from workers.service import Service

Make = Callable[[Server], Service]


@pytest.fixture
def make(valkey: str, tmp_path: Path) -> Make:
    def make(server: Server) -> Service:
        settings = Settings(
            output=tmp_path,
            redis=valkey,
            server=ServerSettings(urls=[server.url]),
            tokenizer=TokenizerSettings(path=tmp_path),
            sampling=SamplingSettings(max_new_tokens=64),
            worker=WorkerSettings(segment_bytes=10_000, governed=False),
        )
        return Service(settings, owner="w1@host", concurrency=3)

    return make


def bell(indices: range, ended: list[str]) -> Doorbell:
    return Doorbell("A", indices, on_claimed=lambda: None, on_ended=ended.append)


def test_messages_that_come_before_the_model_is_known_wait(make: Make, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 20)
        ended: list[str] = []
        async with Server(latency_mean_seconds=0.02) as server:
            service = make(server)
            server.process.pause("in_place")
            await service.start()
            service.ring(bell(range(10), ended))
            service.ring(bell(range(10, 20), ended))
            service.set_concurrency(5)
            assert ledger.snapshot("A").in_flight == 0
            ledger.set_model({"vocab_size": VOCAB_SIZE, "weight_version": "default"})
            await until("five are in flight", lambda: server.now == 5)
            server.process.unpause()
            await until("both ended", lambda: len(ended) == 2)
            assert server.most == 5
            await service.stop(0)
        assert ledger.snapshot("A").done == 20
        assert ledger.processes() == {}
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_worker_that_waits_for_the_model_can_be_stopped(make: Make, ledger: Ledger) -> None:
    async def test() -> None:
        fill(ledger, "A", 2)
        ended: list[str] = []
        async with Server() as server:
            service = make(server)
            await service.start()
            service.ring(bell(range(2), ended))
            service.hurry()
            await service.stop(1000.0)
        assert ended == []
        assert ledger.snapshot("A").queued == 2

    run(test)


def test_a_server_of_other_weights_halts_the_run(make: Make, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 2)
        ended: list[str] = []
        async with Server(speed=0.0, weight_version="v2") as server:
            service = make(server)
            ledger.set_model({"vocab_size": VOCAB_SIZE, "weight_version": "v1"})
            await service.start()
            service.ring(bell(range(2), ended))
            await until("the message ended", lambda: ended)
            await service.stop(0)
        state = ledger.snapshot("A")
        assert (state.state, state.queued, state.in_flight, state.done) == ("halted", 2, 0, 0)
        assert state.reason.startswith("no_fit_server: ")
        assert "serves weight version 'v2' and this run 'v1'" in state.reason

    run(test)


class Listening(Server):
    """A server that keeps the sampling_params of what it was asked, by the first id of the prompt."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: dict[int, dict[str, Any]] = {}

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked[body["input_ids"][0]] = body["sampling_params"]
        return await super()._generate(request)


def test_a_datasets_own_sampling_comes_from_the_ledger_whoever_registered_it(
    make: Make, ledger: Ledger, tmp_path: Path
) -> None:
    def register(**own: Any) -> None:
        ledger.register(DatasetSettings(name="A", path=tmp_path / "A.jsonl", **own))

    async def test() -> None:
        fill(ledger, "A", 3)
        ledger.set_model({"vocab_size": VOCAB_SIZE, "weight_version": "default"})
        ended: list[str] = []
        async with Listening(speed=0.0) as server:
            service = make(server)
            await service.start()
            own: list[dict[str, Any]] = [{"sampling": {"temperature": 0.6, "top_p": 0.5}}, {"max_new_tokens": 7}, {}]
            for index in range(3):
                register(**own[index])
                service.ring(bell(range(index, index + 1), ended))
                await until("it has ended", lambda: len(ended) > index)  # noqa: B023
            await service.stop(0)
        assert server.asked == {
            0: {"max_new_tokens": 64, "temperature": 0.6, "top_p": 0.5},
            1: {"max_new_tokens": 7, "temperature": 1.0},
            2: {"max_new_tokens": 64, "temperature": 1.0},
        }
        records = {record.index: record for record in segments.records(tmp_path, "A")}
        assert records[1].completion_tokens <= 7
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_the_budget_goes_by_a_datasets_own_max_new_tokens(ledger: Ledger, tmp_path: Path) -> None:
    settings = Settings(tokenizer=TokenizerSettings(path=tmp_path), sampling=SamplingSettings(max_new_tokens=64))
    for name, own in (("A", 7), ("B", None)):
        ledger.register(DatasetSettings(name=name, path=tmp_path / name, cap_tokens=1000, max_new_tokens=own))
    bounds = [
        in_flight.snapshot(ledger.snapshot(name), ledger.progress(name), settings).max_new_tokens for name in ("A", "B")
    ]
    assert bounds == [7, 64]
