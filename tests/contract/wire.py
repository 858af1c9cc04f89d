"""Plain HTTP calls of a server, as the contract makes them."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

REAL_URL = os.environ.get("TOKENMILL_CONTRACT_URL", "").rstrip("/")
KEY = os.environ.get("TOKENMILL_SERVER__API_KEY")
PATIENCE_SECONDS = 180.0


class Wire:
    """One server and a pool of connections to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """The status, and the body: decoded if it calls itself JSON."""
        async with self.session.request(method, self.url + path, json=body) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw.decode()

    async def generate(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> tuple[int, Any]:
        """A greedy request."""
        sampling_params = {"temperature": 0, "ignore_eos": True, **params}
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling_params}
        return await self.call("POST", "/generate", body if rid is None else body | {"rid": rid})

    async def answer(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to a request that must be served."""
        status, body = await self.generate(input_ids, rid=rid, **params)
        assert status == 200, body
        assert isinstance(body, dict)
        return body

    async def events(
        self, input_ids: list[int], *, rid: str | None = None, **params: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a greedy request for a stream, as they come; they must end with [DONE]."""
        body: dict[str, Any] = {"input_ids": input_ids, "stream": True} | ({} if rid is None else {"rid": rid})
        body["sampling_params"] = {"temperature": 0, "ignore_eos": True, **params}
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            while (event := (await response.content.readuntil(b"\n\n")).decode()) != "data: [DONE]\n\n":
                assert event.startswith("data: ")
                yield json.loads(event.removeprefix("data: "))
            assert await response.content.read() == b""

    async def stream(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> list[dict[str, Any]]:
        """All events of a greedy request for a stream."""
        return [event async for event in self.events(input_ids, rid=rid, **params)]

    async def load(self) -> dict[str, Any]:
        _, body = await self.call("GET", "/v1/loads")
        [rank] = body["loads"]
        assert isinstance(rank, dict)
        return rank

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the load until it is as wanted."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(load := await self.load()):  # noqa: ASYNC110  # a server has no event for it
                await asyncio.sleep(0.002)
        return load

    async def until_load(self, running: int, waiting: int) -> None:
        await self.until(lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting))

    @asynccontextmanager
    async def slowed(self, seconds: float) -> AsyncIterator[None]:
        """Steps that take so much longer, so that what must be seen between two of them is seen on a busy machine."""
        await self.call("POST", "/slow_down", {"forward_sleep_time": seconds})
        try:
            yield
        finally:
            await self.call("POST", "/slow_down", {"forward_sleep_time": None})

    async def abort_all(self) -> None:
        await self.call("POST", "/abort_request", {"abort_all": True})
        await self.until_load(0, 0)


def on_the_wire(url: str, test: Callable[[Wire], Awaitable[None]], key: str | None = KEY) -> None:
    """Run a test that calls a server."""

    async def run() -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            await test(Wire(url, session))

    asyncio.run(run())
