"""The simulated router in front of a simulated server: sgl-model-gateway's routes, words and dropped fields."""

import asyncio
from typing import Any

import pytest

from tests.integration.simulator_steps import INSTANT, LONG, PROMPT, SLOW, Caller, until, with_server

NO_WORKERS = {
    "error": {
        "message": "No available workers (all circuits open or unhealthy)",
        "type": "service_unavailable",
        "code": "no_available_workers",
    }
}
NO_WORKER_FOR_INFO = {
    "error": {"message": "No workers are available", "type": "service_unavailable", "code": "no_workers"}
}
NOT_THERE = (
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/slow_down",
    "/update_weights_from_disk",
    "/metrics",
    "/ping",
    "/ready",
    "/get_load",
)


def test_it_has_the_routes_of_the_gateway_and_no_others() -> None:
    async def test(caller: Caller) -> None:
        for path in NOT_THERE:
            for method in ("GET", "POST"):
                assert await caller.call(method, path) == (404, "")
        for path in ("/health", "/liveness"):
            assert await caller.call("GET", path) == (200, "OK")
        assert await caller.call("GET", "/readiness") == (
            200,
            {"status": "ready", "healthy_workers": 1, "total_workers": 1},
        )
        assert (await caller.call("GET", "/flush_cache"))[0] == 405
        assert (await caller.call("PUT", "/generate", json={"input_ids": PROMPT}))[0] == 405
        status, told = await caller.call("POST", "/flush_cache")
        assert (status, told["status"], told["workers_flushed"]) == (200, "success", 1)
        assert "sglang:num_running_reqs" in (await caller.call("GET", "/engine_metrics"))[1]

    with_server(test, router=True, **INSTANT)


def test_what_it_says_of_the_server() -> None:
    async def test(caller: Caller) -> None:
        _, found = await caller.call("GET", "/workers")
        [worker] = found["workers"]
        assert (found["total"], worker["is_healthy"], worker["model_id"], worker["load"]) == (1, True, "m", 0)
        for name in ("server_info", "model_info"):
            _, told = await caller.call("GET", f"/{name}")
            assert await caller.call("GET", f"/get_{name}") == (200, told)
            assert told["model_path"] == "m"
        assert (await caller.call("GET", "/v1/models"))[1]["data"][0]["id"] == "m"
        assert (await caller.call("GET", "/health_generate"))[0] == 200

    with_server(test, router=True, model_path="m", **INSTANT)


@pytest.mark.parametrize(("profile", "known"), [("0.5.19", True), ("0.5.23", False)])
def test_loads_are_one_number_that_needs_a_route_which_newer_servers_have_not(profile: str, known: bool) -> None:
    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.generate(PROMPT, **LONG))
        await until(lambda: caller.server.load().used_tokens >= 10)
        [worker] = (await caller.call("GET", "/v1/loads"))[1]["workers"]
        assert worker.keys() == {"worker", "load"}
        assert (worker["load"] >= 10) if known else (worker["load"] == -1)
        assert (await caller.call("GET", "/workers"))[1]["workers"][0]["load"] == 1
        running.cancel()
        await until(lambda: caller.server.process.in_flight == 0)  # the caller has left
        assert caller.server.totals.aborted == 1

    with_server(test, router=True, profile=profile, speed=50.0, **SLOW)


def test_fields_that_it_does_not_know_never_reach_the_server() -> None:
    async def test(caller: Caller) -> None:
        _, plain = await caller.generate(PROMPT, max_new_tokens=5)
        dropped: dict[str, Any] = {"logit_bias": {"7": 100.0}, "custom_params": {"a": 1}, "no_such_parameter": 1}
        status, body = await caller.generate(PROMPT, max_new_tokens=5, **dropped)
        assert (status, body["output_ids"]) == (200, plain["output_ids"])
        params = {"max_new_tokens": 3, "stop_token_ids": plain["output_ids"][:1], "ignore_eos": False}
        fields = {"input_ids": PROMPT, "rid": "mine", "cache_salt": 5, "sampling_params": params}
        _, body = await caller.call("POST", "/generate", json=fields)
        assert (body["meta_info"]["id"], body["output_ids"]) == ("mine", plain["output_ids"][:1])
        _, body = await caller.generate(PROMPT, max_new_tokens=None)
        assert len(body["output_ids"]) == 128  # as if it had been left out
        [event], end = await caller.stream(PROMPT, max_new_tokens=5, stream_interval=50)
        assert (end, event["output_ids"]) == ("done", plain["output_ids"])

    with_server(test, router=True, **INSTANT, **SLOW)


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b'{"input_ids":[1],"stream":null}', "application/json", 422),
        (b'{"input_ids":[1],"rid":5}', "application/json", 422),
        (b'{"input_ids":[1],"sampling_params":{"temperature":"hot"}}', "application/json", 422),
        (b'{"input_ids":[1', "application/json", 400),
        (b'{"input_ids":[1]}', "text/plain", 415),
    ],
)
def test_a_body_that_does_not_fit_is_refused_in_plain_text(raw: bytes, kind: str, status: int) -> None:
    async def test(caller: Caller) -> None:
        found = await caller.call("POST", "/generate", data=raw, headers={"Content-Type": kind})
        assert (found[0], type(found[1])) == (status, str)

    with_server(test, router=True, **INSTANT)


def test_a_refusal_of_the_server_comes_through() -> None:
    async def test(caller: Caller) -> None:
        error = {"error": {"message": "input_ids cannot be empty."}}
        assert await caller.generate([]) == (400, error)
        assert (await caller.stream([]))[0][0]["error"]["message"] == "input_ids cannot be empty."

    with_server(test, router=True, **INSTANT)


@pytest.mark.parametrize("how", ["told", "an id", "fault"])
def test_it_outlives_the_server(how: str) -> None:
    async def test(caller: Caller) -> None:
        running = [asyncio.create_task(caller.generate([n, 2], **LONG)) for n in (1, 2)]
        streamed = asyncio.create_task(caller.stream(PROMPT, **LONG))
        await until(lambda: caller.server.load().running == 3)
        await until(lambda: caller.server.load().used_tokens >= 20)
        if how == "told":
            await caller.call("POST", "/_sim/die", json={"restart_seconds": None})
        else:
            if how == "fault":
                await caller.call("POST", "/_sim/faults", json={"die": {"next": 1}})
            running.append(asyncio.create_task(caller.generate([5, 1024] if how == "an id" else [5])))
        for status, body in await asyncio.gather(*running):
            assert (status, body["error"]["code"]) == (500, "call_upstream_request_error")
        events, end = await streamed
        assert (end, events[-1]["meta_info"]["finish_reason"]) == ("broken", None)
        assert caller.server.dead.is_set()
        assert await caller.generate(PROMPT) == (503, NO_WORKERS)
        assert await caller.call("POST", "/generate", json={"input_ids": PROMPT, "stream": True}) == (503, NO_WORKERS)
        assert await caller.call("GET", "/health") == (200, "OK")
        assert (await caller.call("GET", "/readiness"))[0] == 503
        assert (await caller.call("GET", "/workers"))[1]["workers"][0]["is_healthy"] is False
        assert (await caller.call("GET", "/v1/loads"))[1]["workers"][0]["load"] == -1
        for path in ("/server_info", "/model_info", "/v1/models", "/health_generate"):
            assert await caller.call("GET", path) == (503, NO_WORKER_FOR_INFO)
        await caller.server.restart()
        assert (await caller.generate(PROMPT, max_new_tokens=3))[0] == 200
        assert caller.server.load().running == 0

    with_server(test, router=True, speed=20.0, **SLOW)


def test_the_server_comes_back_by_itself() -> None:
    async def test(caller: Caller) -> None:
        port = caller.server.port
        await caller.call("POST", "/_sim/die", json={"restart_seconds": 1.0})
        await caller.server.dead.wait()
        assert await caller.generate(PROMPT) == (503, NO_WORKERS)
        await until(lambda: not caller.server.dead.is_set())
        assert (await caller.generate(PROMPT))[0] == 200
        assert caller.server.port == port

    with_server(test, router=True, **INSTANT)


def test_the_servers_key_is_asked_for_but_not_for_health() -> None:
    async def test(caller: Caller) -> None:
        assert (await caller.generate(PROMPT))[0] == 401
        for path in ("/health", "/liveness", "/readiness"):
            assert (await caller.call("GET", path))[0] == 200
        caller.session.headers["Authorization"] = "Bearer secret"
        assert (await caller.generate(PROMPT))[0] == 200

    with_server(test, router=True, api_key="secret", **INSTANT)
