"""A client whose network is played by the test: what each path replies, and all that was asked."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from tests.over_httpx import OverHttpx
from workers.sglang.answer import Acceptance, Answer, BadAnswer
from workers.sglang.client import SGLangClient
from workers.sglang.server import Pauses

URL = "http://one:30000"
TWO, THREE = "http://two:30000", "http://three:30000"
IDS = b"[10,20,30]"
SAMPLING = {"max_new_tokens": 4, "temperature": 0.0}
SHORT = Pauses(first_seconds=0.0005, longest_seconds=0.002, trial_seconds=0.2)
ENDLESS = Pauses(first_seconds=1000.0, longest_seconds=1000.0)
REFUSED = httpx.ConnectError("Connection refused")
Result = TypeVar("Result")


def accepted(request: httpx.Request, finish_reason: Any = None) -> httpx.Response:
    """What a good server answers to this request."""
    sent = json.loads(request.content)
    meta = {
        "id": sent["rid"],
        "finish_reason": finish_reason or {"type": "length", "length": 4},
        "prompt_tokens": len(sent["input_ids"]),
        "completion_tokens": 4,
        "weight_version": "default",
    }
    return httpx.Response(200, json={"text": "", "output_ids": [1, 2, 3, 4], "meta_info": meta})


def aborted(request: httpx.Request) -> httpx.Response:
    return accepted(request, {"type": "abort", "message": "Aborted"})


async def never(_request: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


Reply = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


class Network:
    """Replies to each path by its list, the last one again and again; remembers every request."""

    def __init__(self, **replies: list[Reply]) -> None:
        well: dict[str, list[Reply]] = {
            "generate": [accepted],
            "abort_request": [httpx.Response(200)],
            "health": [httpx.Response(200)],
            "get_server_info": [httpx.Response(200)],
            "v1_loads": [httpx.Response(404)],
            "get_load": [httpx.Response(404)],
        }
        self.replies = well | replies
        self.requests: list[httpx.Request] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        replies = self.replies[request.url.path.strip("/").replace("/", "_")]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, httpx.Response):
            return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)
        answer = reply(request)
        return answer if isinstance(answer, httpx.Response) else await answer

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]

    def rids(self, path: str = "/generate") -> list[str]:
        return [json.loads(request.content)["rid"] for request in self.requests if request.url.path == path]

    def hosts(self, path: str = "/generate") -> list[str]:
        return [request.url.host for request in self.requests if request.url.path == path]


def client_of(network: Network, *urls: str, pauses: Pauses = SHORT, **options: Any) -> SGLangClient:
    settings: dict[str, Any] = {
        "acceptance": Acceptance(1024, "default"),
        "sampling_params": SAMPLING,
        "max_connections": 8,
        "http": OverHttpx(httpx.MockTransport(network.answer)),
    }
    return SGLangClient(urls or (URL,), pauses=pauses, **(settings | options))


def run(work: Callable[[SGLangClient], Coroutine[Any, Any, Result]], client: SGLangClient) -> Result:
    async def whole() -> Result:
        try:
            return await asyncio.wait_for(work(client), 30)
        finally:
            await client.aclose()

    return asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    """Let the other tasks run until `condition` holds."""
    for turn in range(10_000):
        if condition():
            return
        await asyncio.sleep(0 if turn < 5_000 else 0.001)
    pytest.fail("the condition did not come true")


async def generate(client: SGLangClient) -> Answer:
    answer, _, _ = await client.generate(IDS, prompt_tokens=3)
    return answer


def failure(client: SGLangClient) -> BadAnswer:
    """What a call that must fail ends with."""
    with pytest.raises(BadAnswer) as caught:
        run(generate, client)
    return caught.value
