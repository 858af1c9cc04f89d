"""A pilot against a simulated server: what it tells, and that it leaves nothing behind."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.sections import ServerSettings, TokenizerSettings, WorkerSettings
from common.settings import Settings
from tests.integration.simulator_steps import PROMPT, SLOW, Caller, with_server
from tests.unit.preflight_steps import no_key
from workers.sglang.http import AiohttpHttp
from workers.sglang.pilot import Ask, answers, speeds
from workers.sglang.preflight import ServerFacts, read_facts

WORKER = WorkerSettings(load_seconds=0.02)


def ask(number: int, dataset: str = "A", ids: list[int] | None = None, max_new_tokens: int = 64) -> Ask:
    prompt = [*(ids or PROMPT), 20 + number]
    return Ask(dataset, str(prompt).encode(), len(prompt), {"max_new_tokens": max_new_tokens, "temperature": 1.0})


async def facts(caller: Caller) -> ServerFacts:
    http = AiohttpHttp(2)
    try:
        return await read_facts(caller.server.url, None, http)
    finally:
        await http.aclose()


def settings(caller: Caller) -> Settings:
    return Settings(
        server=ServerSettings(urls=[caller.server.url]), tokenizer=TokenizerSettings(path=Path("none")), worker=WORKER
    )


def test_every_prompt_is_answered_or_says_why_not() -> None:
    async def test(caller: Caller) -> None:
        said: list[tuple[int, int]] = []
        asks = [*(ask(number) for number in range(9)), ask(9, "B", max_new_tokens=5), ask(10, "B", PROMPT * 5000)]
        found = await answers(settings(caller), [await facts(caller)], 1024, asks, lambda *told: said.append(told))
        told = Counter((one.dataset, one.finish_reason, one.completion_tokens, one.failure) for one in found.told)
        assert told == {
            ("A", "stop", 40, ""): 9,
            ("B", "length", 5, ""): 1,
            ("B", "", 0, "over_context"): 1,
        }
        assert said[-1] == (11, 0)
        assert found.seconds > 0

    with_server(test, speed=0.0, mean_tokens=40.0, cv=0.0)


def test_what_is_in_flight_when_it_is_interrupted_is_aborted() -> None:
    async def test(caller: Caller) -> None:
        asks = [ask(number, max_new_tokens=20_000) for number in range(8)]
        running = asyncio.create_task(answers(settings(caller), [await facts(caller)], 1024, asks))
        # The governor begins with three.
        await caller.until(lambda load: load["num_running_reqs"] >= 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await caller.until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)

    with_server(test, **SLOW)


def test_a_server_that_is_full_keeps_the_pilot_small() -> None:
    async def test(caller: Caller) -> None:
        others = [asyncio.create_task(caller.generate(PROMPT, max_new_tokens=20_000)) for _ in range(20)]
        await caller.until_load(running=4, waiting=16)
        asks = [ask(number) for number in range(40)]
        running = asyncio.create_task(answers(settings(caller), [await facts(caller)], 1024, asks))
        await caller.until(lambda load: _all(load) > 20)
        # Many looks of the governor, which sees that others wait.
        most = 0
        for _ in range(25):
            most = max(most, _all(await caller.load()) - 20)
            await asyncio.sleep(0.02)
        for task in (running, *others):
            task.cancel()
        await asyncio.gather(running, *others, return_exceptions=True)
        assert 1 <= most <= 3

    with_server(test, max_running_requests=4, **SLOW)


def _all(load: dict[str, Any]) -> int:
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


def test_what_the_servers_make_now() -> None:
    async def test(caller: Caller) -> None:
        told = [await facts(caller)]
        (idle,) = await asyncio.to_thread(speeds, told, no_key)
        assert idle is not None
        assert (idle.running, idle.tokens_per_second, idle.capacity_tokens) == (0, 0.0, 65_536)
        others = [asyncio.create_task(caller.generate(PROMPT, max_new_tokens=20_000)) for _ in range(4)]
        await caller.until(lambda load: load["num_running_reqs"] == 4 and load["gen_throughput"] > 0)
        (busy,) = await asyncio.to_thread(speeds, told, no_key)
        assert busy is not None
        assert busy.running == 4
        assert busy.tokens_per_second
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    with_server(test, **SLOW)
