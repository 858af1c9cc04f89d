"""The simulated server dies, comes back, pauses, is slowed down, flushed, and given new weights."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.integration.simulator_steps import (
    INSTANT,
    LONG,
    PROMPT,
    SLOW,
    Caller,
    ask,
    set_faults,
    slow_request,
    until,
    with_server,
)

RESTART_SECONDS = 1.0  # nobody must find it back who looks whether it is gone


@pytest.mark.parametrize("how", ["an id", "no ids", "poison", "told", "fault"])
def test_a_death_breaks_all_connections_and_it_comes_back_empty_on_the_same_port(how: str) -> None:
    async def test(caller: Caller) -> None:
        port = caller.server.port
        running = asyncio.create_task(caller.generate(PROMPT, **LONG))
        await caller.until_load(1, 0)
        broken = [running]
        if how == "told":
            await caller.call("POST", "/_sim/die", json={"restart_seconds": RESTART_SECONDS})
        else:
            prompts: dict[str, list[Any]] = {"an id": [5, 1024], "no ids": [[]]}
            ids = prompts.get(how, [1, 7, 8, 9])
            faults = {"poison": {"ids": [7, 8]}, "fault": {"next": 1}}
            if how in faults:
                await set_faults(caller, {"poison" if how == "poison" else "die": faults[how]})
            broken.append(asyncio.create_task(caller.generate(ids)))
        for call in broken:
            with pytest.raises(aiohttp.ClientConnectionError):
                await call
        await caller.server.dead.wait()
        with pytest.raises(aiohttp.ClientConnectorError):
            await caller.call("GET", "/ping")
        await until(lambda: not caller.server.dead.is_set())
        assert caller.server.port == port
        assert (await caller.load())["num_running_reqs"] == 0
        assert (await caller.generate([5], max_new_tokens=3))[0] == 200

    with_server(test, speed=200.0, restart_seconds=RESTART_SECONDS, **SLOW)


def test_without_a_restart_it_stays_dead() -> None:
    async def test(caller: Caller) -> None:
        caller.server.die("the test wants it")
        await caller.server.dead.wait()
        with pytest.raises(aiohttp.ClientConnectorError):
            await caller.call("GET", "/ping")
        await caller.server.restart()
        assert (await caller.generate([5]))[0] == 200

    with_server(test, **INSTANT)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_new_requests_back_and_treats_the_running_as_its_mode_says(mode: str) -> None:
    async def test(caller: Caller) -> None:
        running = await slow_request(caller)
        status, body = await caller.call("POST", "/pause_generation", json={"mode": mode})
        assert (status, body) == (200, {"message": "Generation paused successfully.", "status": "ok"})
        await caller.call("POST", "/slow_down", json={})
        held = asyncio.create_task(caller.generate([9], max_new_tokens=2))
        assert (await caller.call("GET", "/health"))[0] == 503
        assert not held.done()
        await caller.call("POST", "/continue_generation", json={})
        assert len((await held)[1]["output_ids"]) == 2
        _, body = await running
        kind, retractions = body["meta_info"]["finish_reason"]["type"], body["meta_info"]["num_retractions"]
        expected = {"abort": ("abort", 0), "retract": ("length", 1), "in_place": ("length", 0)}
        assert (kind, retractions) == expected[mode]
        assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"]

    with_server(test, speed=500.0, **SLOW)


def test_slow_down_flush_and_new_weights() -> None:
    async def test(caller: Caller) -> None:
        assert await caller.call("POST", "/slow_down", json={"forward_sleep_time": 1000.0}) == (200, None)
        running = asyncio.create_task(caller.generate(PROMPT, **LONG))
        await caller.until_load(1, 0)
        status, text = await caller.call("POST", "/flush_cache")
        assert (status, text.splitlines()[0]) == (400, "Flush cache failed.")
        await caller.call("POST", "/slow_down", json={"forward_sleep_time": None})
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        await running
        assert (await caller.call("GET", "/flush_cache"))[0] == 200
        body = {"model_path": "simulated", "weight_version": "v2"}
        status, told = await caller.call("POST", "/update_weights_from_disk", json=body)
        assert (status, told["success"]) == (200, True)
        assert (await ask(caller))["meta_info"]["weight_version"] == "v2"
        assert (await caller.call("GET", "/model_info"))[1]["weight_version"] == "v2"

    with_server(test, speed=1000.0, **SLOW)
