"""The simulated server over HTTP, on loopback, beside the recorded exchanges of the real one."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.integration.simulator_steps import (
    INSTANT,
    LONG,
    SLOW,
    Caller,
    recorded,
    with_server,
)
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.config import SimulatorConfig


@pytest.mark.parametrize("speed", [0.0, 1000.0])
@pytest.mark.parametrize(("name", "tokens"), [("basic", 4), ("max_new_tokens_0", 0), ("logit_bias_eos", 1)])
def test_an_answer_has_the_recorded_fields(speed: float, name: str, tokens: int) -> None:
    real = json.loads(recorded(name)["body"])

    async def test(caller: Caller) -> None:
        status, body = await caller.generate([10, 20, 30, 40, 50], max_new_tokens=tokens)
        assert status == 200
        assert body.keys() == real.keys()
        assert body["meta_info"].keys() == real["meta_info"].keys()
        for field, value in real["meta_info"].items():
            if field != "cached_tokens_details":  # null, or where they were cached
                assert type(body["meta_info"][field]) is type(value), field

    with_server(test, speed=speed, mean_tokens=100.0, cv=0.0)


@pytest.mark.parametrize("speed", [0.0, 1000.0])
def test_the_answer_is_the_models_and_its_meta_info_is_true(speed: float) -> None:
    settings: dict[str, Any] = {"vocab_size": 1024, "mean_tokens": 30.0, "seed": 5}
    model = Answers(SimulatorConfig(**settings))

    async def test(caller: Caller) -> None:
        for prompt in range(20):
            status, body = await caller.generate([prompt, 9, 9], rid=f"r{prompt:03d}", max_new_tokens=40)
            expected = model.answer([prompt, 9, 9], 40)
            meta = body["meta_info"]
            assert status == 200
            assert body["output_ids"] == expected.stream.ids(expected.completion_tokens)
            assert meta["finish_reason"] == expected.finish_reason
            assert (meta["id"], meta["prompt_tokens"]) == (f"r{prompt:03d}", 3)
            assert meta["completion_tokens"] == len(body["output_ids"])
            assert (meta["cached_tokens"], meta["num_retractions"], meta["weight_version"]) == (0, 0, "w7")
            assert meta["weight_versions"] == [{"version": "w7", "start": 0, "end": len(body["output_ids"])}]
            assert meta["request_received_ts"] <= meta["prefill_finished_time"] <= meta["request_finished_ts"]

    with_server(test, speed=speed, weight_version="w7", **settings)


def test_whitespace_in_the_body_changes_nothing() -> None:
    async def test(caller: Caller) -> None:
        headers = {"Content-Type": "application/json"}
        answers = []
        for raw in (b'{"input_ids":[1,2,3]}', b'{ "input_ids" : [ 1,\n2,\t3 ] }'):
            _, body = await caller.call("POST", "/generate", data=raw, headers=headers)
            answers.append(body["output_ids"])
        assert answers[0] == answers[1]

    with_server(test, **INSTANT)


@pytest.mark.parametrize("name", ["empty_input_ids", "too_long", "unknown_sp_field", "get_generate", "/nonexistent"])
def test_an_error_is_the_recorded_one(name: str) -> None:
    exchange = recorded(name)

    async def test(caller: Caller) -> None:
        found = await caller.call(
            exchange["method"],
            exchange["path"],
            data=exchange["request"],
            headers={"Content-Type": "application/json"},
        )
        assert found == (exchange["status"], json.loads(exchange["body"]))

    with_server(test, context_length=2048)


def test_a_body_that_is_not_declared_as_json_is_refused() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.call("POST", "/generate", data=b'{"input_ids":[1,2]}')
        assert (status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)

    with_server(test)


def test_malformed_json_is_refused_in_the_third_shape() -> None:
    async def test(caller: Caller) -> None:
        headers = {"Content-Type": "application/json"}
        for path in ("/generate", "/abort_request"):
            status, body = await caller.call("POST", path, data=b'{"input_ids": [1,2', headers=headers)
            assert status == 400
            assert body.keys() == {"object", "message", "type", "param", "code"}

    with_server(test)


def test_without_the_key_only_health_and_metrics_are_open() -> None:
    async def test(caller: Caller) -> None:
        unauthorized = (401, {"error": "Unauthorized"})
        assert await caller.generate([1]) == unauthorized
        for path in ("/v1/models", "/server_info", "/v1/loads", "/ping"):
            assert await caller.call("GET", path) == unauthorized
        for path in ("/health", "/health_generate", "/ready", "/metrics"):
            assert (await caller.call("GET", path))[0] == 200
        caller.session.headers["Authorization"] = "Bearer wrong"
        assert await caller.generate([1]) == unauthorized
        caller.session.headers["Authorization"] = "Bearer secret"
        assert (await caller.generate([1]))[0] == 200

    with_server(test, api_key="secret", **INSTANT)


def test_an_id_outside_the_vocabulary_breaks_the_connection() -> None:
    async def test(caller: Caller) -> None:
        for input_ids in ([5, 1024], [5, -1]):
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await caller.generate(input_ids)
        assert (await caller.generate([5, 1023]))[0] == 200

    with_server(test, die_on_bad_id=False, **INSTANT)


def test_a_rid_in_flight_cannot_be_used_again_until_it_has_ended() -> None:
    async def test(caller: Caller) -> None:
        first = asyncio.create_task(caller.generate([1, 2], rid="dup", **LONG))
        await caller.until_load(1, 0)
        error = {"error": {"message": "Duplicate request ID detected: dup"}}
        assert await caller.generate([1, 2], rid="dup") == (400, error)
        await caller.call("POST", "/abort_request", json={"rid": "dup"})
        assert (await first)[0] == 200
        assert (await caller.generate([1, 2], rid="dup", max_new_tokens=2))[0] == 200

    with_server(test, speed=100.0, **SLOW)


def test_a_full_queue_refuses_with_503() -> None:
    async def test(caller: Caller) -> None:
        calls = [asyncio.create_task(caller.generate([n], rid=f"q{n}", **LONG)) for n in (1, 2)]
        await caller.until_load(1, 1)
        status, body = await caller.generate([3])
        assert (status, body["message"], body["code"]) == (503, "The request queue is full.", 503)
        real = recorded("q2")
        assert (status, body) == (real["status"], json.loads(real["body"]))
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]

    with_server(test, max_running_requests=1, max_queued_requests=1, **SLOW)


def test_an_abort_ends_all_whose_rid_begins_so_with_what_they_have() -> None:
    model = Answers(SimulatorConfig(vocab_size=1024, **SLOW))

    async def test(caller: Caller) -> None:
        calls = {
            rid: asyncio.create_task(caller.generate([number], rid=rid, **LONG))
            for number, rid in enumerate(("p1", "p10", "q1"))
        }
        await caller.until_load(2, 1)
        await caller.until(lambda load: load["num_used_tokens"] >= 12)  # a few tokens each
        assert await caller.call("POST", "/abort_request", json={"rid": "p1"}) == (200, "")
        for number, rid in enumerate(("p1", "p10")):
            status, body = await calls[rid]
            meta = body["meta_info"]
            assert status == 200
            assert meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert body["output_ids"] == model.answer([number], 30_000).stream.ids(meta["completion_tokens"])
            assert 0 < len(body["output_ids"]) < 30_000
        await caller.until_load(1, 0)
        await caller.call("POST", "/abort_request", json={"rid": "q1"})
        assert (await calls["q1"])[1]["meta_info"]["finish_reason"]["type"] == "abort"

    with_server(test, speed=50.0, max_running_requests=2, **SLOW)


def test_an_abort_in_the_queue_gives_an_empty_answer_with_the_recorded_fields() -> None:
    real = json.loads(recorded("queued")["body"])

    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.generate([1], rid="running", **LONG))
        await caller.until_load(1, 0)
        queued = asyncio.create_task(caller.generate([2], rid="queued-1", **LONG))
        await caller.until_load(1, 1)
        await caller.call("POST", "/abort_request", json={"rid": "queued-1"})
        status, body = await queued
        assert status == 200
        for answer in (body, real):
            del answer["meta_info"]["e2e_latency"], answer["meta_info"]["response_sent_to_client_ts"]
        assert body == real
        await caller.call("POST", "/abort_request", json={"rid": "running"})
        await running

    with_server(test, max_running_requests=1, **SLOW)


@pytest.mark.parametrize("body", [{"rid": "nobody"}, {"rid": ""}, {}])
def test_an_abort_of_nobody_is_200_and_empty(body: dict[str, Any]) -> None:
    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.generate([1], rid="running", **LONG))
        await caller.until_load(1, 0)
        assert await caller.call("POST", "/abort_request", json=body) == (200, "")
        assert (await caller.load())["num_running_reqs"] == 1
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        await running

    with_server(test, speed=100.0, **SLOW)


def test_a_caller_that_leaves_is_noticed_and_its_request_is_aborted() -> None:
    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.generate([1], **LONG))
        await caller.until_load(1, 0)
        call.cancel()
        await caller.until_load(0, 0)
        totals = caller.server.totals
        assert (totals.taken, totals.finished, totals.aborted, totals.refused) == (1, 0, 1, 0)

    with_server(test, speed=50.0, **SLOW)
