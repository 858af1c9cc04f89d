"""The older releases of SGLang that the simulated server can play."""

import asyncio

import aiohttp
import pytest

from tests.integration.simulator_steps import (
    ASKED,
    INSTANT,
    LONG,
    PROMPT,
    SLOW,
    Caller,
    ask,
    until,
    with_server,
)


@pytest.mark.parametrize("profile", ["0.5.2", "0.5.9", "0.5.13", "0.5.19", "0.5.23"])
def test_a_release_has_its_own_routes_and_fields(profile: str) -> None:
    async def test(caller: Caller) -> None:
        found = {path for path in PATHS if (await caller.call("GET", path))[0] == 200}
        assert found == PATHS - MISSING[profile]
        _, info = await caller.call("GET", "/get_server_info")
        assert info["version"] == profile
        body = await ask(caller)
        leak = PROMPT[-5:] if profile == "0.5.2" else []
        assert body["output_ids"][: len(leak)] == leak
        assert len(body["output_ids"]) == ASKED + len(leak)
        meta = body["meta_info"]
        names = {"num_retractions", "total_retractions", "reasoning_tokens", "weight_versions", "queue_time"}
        assert names & meta.keys() == FIELDS[profile]
        assert meta["completion_tokens"] == ASKED
        status, refused = await caller.generate(PROMPT, no_such_parameter=1)
        assert (status, isinstance(refused, str)) == ((400, False) if profile == "0.5.23" else (500, True))

    with_server(test, profile=profile, speed=1000.0, **SLOW)


PATHS = {"/get_server_info", "/server_info", "/get_model_info", "/model_info", "/get_load", "/v1/loads", "/ready"}


MISSING = {
    "0.5.2": {"/server_info", "/model_info", "/v1/loads", "/ready"},
    "0.5.9": {"/ready"},
    "0.5.13": {"/ready"},
    "0.5.19": {"/ready"},
    "0.5.23": {"/get_load"},
}


FIELDS = {
    "0.5.2": set[str](),
    "0.5.9": {"total_retractions", "queue_time"},
    "0.5.13": {"num_retractions", "reasoning_tokens", "queue_time"},
    "0.5.19": {"num_retractions", "reasoning_tokens", "queue_time"},
    "0.5.23": {"num_retractions", "reasoning_tokens", "weight_versions", "queue_time"},
}


def test_without_its_tokenizer_0_5_2_leaks_nothing_and_has_no_text() -> None:
    async def test(caller: Caller) -> None:
        body = await ask(caller)
        assert ("text" in body, len(body["output_ids"])) == (False, ASKED)

    with_server(test, profile="0.5.2", skip_tokenizer_init=True, **INSTANT, **SLOW)


@pytest.mark.parametrize(("profile", "ids"), [("0.5.2", None), ("0.5.19", 1), ("0.5.23", 5)])
def test_an_abort_in_the_queue_has_the_shape_of_its_release(profile: str, ids: int | None) -> None:
    """Of a request that was retracted into the queue, so that it has ids already."""

    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.generate(PROMPT, rid="r", **LONG))
        await until(lambda: caller.server.load().used_tokens >= 13)
        ticker = caller.server.process._ticker
        assert ticker is not None
        ticker.hold("test", retract=True)
        await until(lambda: caller.server.load().waiting == 1)
        await caller.call("POST", "/abort_request", json={"rid": "r"})
        status, body = await call
        meta = body["meta_info"]
        assert (status, meta["finish_reason"]) == (200, {"type": "abort", "message": "Abort in waiting queue"})
        if ids is None:
            assert (body.keys(), meta["prompt_tokens"]) == ({"text", "meta_info"}, 0)
        else:
            assert "prompt_tokens" not in meta
            assert len(body["output_ids"]) == (1 if ids == 1 else meta["completion_tokens"])
            assert meta["completion_tokens"] >= 5

    with_server(test, profile=profile, speed=50.0, **SLOW)


def test_0_5_13_keeps_the_rid_of_a_prompt_that_was_too_long() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.generate([5] * 40_000, rid="long")
        assert (status, "longer than" in body["error"]["message"]) == (400, True)
        status, body = await caller.generate([5], rid="long")
        assert (status, body["error"]["message"]) == (400, "Duplicate request ID detected: long")

    with_server(test, profile="0.5.13", **INSTANT)


@pytest.mark.parametrize(("profile", "dies"), [("0.5.13", True), ("0.5.19", False)])
def test_an_abort_that_meets_the_last_step_kills_old_releases(profile: str, dies: bool) -> None:
    async def test(caller: Caller) -> None:
        ticker = caller.server.process._ticker
        assert ticker is not None
        ticker.hold("test")
        call = asyncio.create_task(caller.generate(PROMPT, rid="r", max_new_tokens=2))
        await until(lambda: caller.server.load().waiting == 1)
        ticker.release("test")
        ticker.slow_down(3e5)  # not this step, but the next: three seconds for the abort to meet it
        await caller.until(lambda load: load["num_used_tokens"] == len(PROMPT) + 1)  # the second step has begun
        await caller.call("POST", "/abort_request", json={"rid": "r"})
        if dies:
            with pytest.raises(aiohttp.ClientConnectionError):
                await call
            assert caller.server.death == "an abort met the last step of its request"
        else:
            assert (await call)[0] == 200

    with_server(test, profile=profile, speed=1e5, **SLOW)


def test_a_prompt_that_is_too_long_is_cut_without_a_word_if_so_told() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.generate([5] * 3000, max_new_tokens=4)
        assert status == 200
        assert body["meta_info"]["prompt_tokens"] < 2048
        assert (await caller.call("GET", "/server_info"))[1]["allow_auto_truncate"] is True

    with_server(test, context_length=2048, allow_auto_truncate=True, **INSTANT)
