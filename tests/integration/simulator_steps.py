"""A simulated server and a caller of it, as the integration tests of the simulator use them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.conftest import PATIENCE_SECONDS, SHARED
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

CAPTURES = SHARED / "data" / "sglang_captures"
SLOW: dict[str, Any] = {"mean_tokens": 100_000.0, "cv": 0.0}  # answers that outlast every test
INSTANT: dict[str, Any] = {"speed": 0.0}
LONG: dict[str, Any] = {"max_new_tokens": 30_000}
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
ASKED = 40  # of an answer that would go on


class Caller:
    """A client of one simulated server."""

    def __init__(self, server: Simulator, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.server.url + path, **options) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, msgspec.json.decode(raw) if is_json else raw.decode()

    async def generate(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> tuple[int, Any]:
        fields: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params}
        return await self.call("POST", "/generate", json=fields if rid is None else fields | {"rid": rid})

    async def stream(
        self, input_ids: list[int], *, rid: str | None = None, **params: Any
    ) -> tuple[list[dict[str, Any]], str]:
        """The events of a streamed answer, and how it ended: done, early (in order, but without [DONE]) or broken."""
        fields: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params, "stream": True}
        events: list[dict[str, Any]] = []
        fields |= {} if rid is None else {"rid": rid}
        async with self.session.post(self.server.url + "/generate", json=fields) as response:
            assert response.status == 200
            try:
                while line := await response.content.readline():
                    if line == b"data: [DONE]\n":
                        assert await response.content.read() == b"\n"
                        return events, "done"
                    if not line.endswith(b"\n"):
                        return events, "broken"
                    if line != b"\n":
                        events.append(msgspec.json.decode(line.removeprefix(b"data: ")))
            except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
                return events, "broken"
        return events, "early"

    async def load(self) -> dict[str, Any]:
        _, body = await self.call("GET", "/v1/loads")
        [rank] = body["loads"]
        assert isinstance(rank, dict)
        return rank

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the load until it is as wanted."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(load := await self.load()):
                pass
        return load

    async def until_load(self, running: int, waiting: int) -> dict[str, Any]:
        return await self.until(lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting))


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Caller]:
    defaults = {"vocab_size": 1024, "context_length": 32_768, "max_total_tokens": 65_536}
    config = SimulatorConfig(**{**defaults, **settings})
    connector = aiohttp.TCPConnector(limit=0)
    async with Simulator(config) as server, aiohttp.ClientSession(connector=connector) as session:
        yield Caller(server, session)


def with_server(test: Callable[[Caller], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with serving(**settings) as caller:
            await test(caller)

    asyncio.run(run())


def recorded(name: str) -> dict[str, Any]:
    captures = CAPTURES / "sglang_0.5.23.jsonl"
    if not captures.exists():
        pytest.skip(f"the recorded exchanges are not at {captures}")
    with captures.open() as lines:
        exchanges = [json.loads(line) for line in lines]
    return next(one for one in exchanges if one["name"] == name and one.get("status"))


async def ask(caller: Caller, **fields: Any) -> dict[str, Any]:
    status, body = await caller.generate(PROMPT, rid="0123456789", max_new_tokens=ASKED, **fields)
    assert status == 200
    assert isinstance(body, dict)
    return body


async def set_faults(caller: Caller, faults: dict[str, Any]) -> None:
    status, body = await caller.call("POST", "/_sim/faults", json=faults)
    assert status == 200, body


async def slow_request(caller: Caller) -> "asyncio.Task[tuple[int, Any]]":
    """A request that runs, on a server that is too slow to end it before it is made fast again."""
    await caller.call("POST", "/slow_down", json={"forward_sleep_time": 0.02 * caller.server.config.speed})
    task = asyncio.create_task(caller.generate(PROMPT, max_new_tokens=2000))
    await caller.until(lambda load: load["num_used_tokens"] > len(PROMPT) + 3)
    return task


class Steps:
    """A server's steps, one by one: what happens between two of them does not depend on how fast this machine is."""

    def __init__(self, caller: Caller) -> None:
        """From the next moment without a step on none begins by itself."""
        ticker = caller.server.process._ticker
        assert ticker is not None
        self._ticker = ticker
        ticker.hold("steps")

    async def one(self) -> None:
        """Let the next step begin, wait for its end, and let everybody do what follows from it."""
        self._ticker.release("steps")
        self._ticker.hold("steps")
        await until(lambda: self._ticker._engine.due() is None)
        await turns()

    def go_on(self) -> None:
        """Let it run."""
        self._ticker.release("steps")


async def stepped(caller: Caller, steps: int, input_ids: list[int], **params: Any) -> tuple[list[dict[str, Any]], str]:
    """What Caller.stream answers; the first `steps` steps are taken one by one, so that each can make an event."""
    if not steps:
        return await caller.stream(input_ids, **params)
    control = Steps(caller)
    call = asyncio.create_task(caller.stream(input_ids, **params))
    await until(lambda: call.done() or caller.server.load().waiting == 1)
    for _ in range(steps):
        await control.one()
    control.go_on()
    return await call


async def turns() -> None:
    """Let everybody do what there is to do now."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  # the server has no event for all that tests wait for
            await asyncio.sleep(0.001)
