"""The client over a transport that answers from the test: bodies, retries, servers that go and come back, the drain."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
import httpx
import pytest
import yarl
from multidict import CIMultiDict, CIMultiDictProxy

from common.errors import ConfigError
from tests.over_httpx import OverHttpx
from workers.sglang.answer import Acceptance, Answer, BadAnswer, Outcome
from workers.sglang.client import Sampling, SGLangClient, _broken
from workers.sglang.servers import Pauses, Server

URL = "http://one:30000"
IDS = b"[10,20,30]"
SAMPLING = {"max_new_tokens": 4, "temperature": 0.0}
SHORT = Pauses(first_seconds=0.0005, longest_seconds=0.002)
ENDLESS = Pauses(first_seconds=1000.0, longest_seconds=1000.0)
QUEUE_FULL = b'{"object":"error","message":"The request queue is full.","type":"503","code":503}'
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


Reply = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


class Network:
    """Replies to each path by its list, the last one again and again; remembers every request."""

    def __init__(self, **replies: list[Reply]) -> None:
        well: dict[str, list[Reply]] = {
            "generate": [accepted],
            "abort_request": [httpx.Response(200)],
            "health": [httpx.Response(200)],
        }
        self.replies = well | replies
        self.requests: list[httpx.Request] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        replies = self.replies[request.url.path.strip("/")]
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


def client_of(network: Network, *urls: str, pauses: Pauses = SHORT, **options: Any) -> SGLangClient:
    settings: dict[str, Any] = {
        "acceptance": Acceptance(1024, "default"),
        "sampling_params": SAMPLING,
        "api_key": None,
        "max_connections": 8,
        "request_timeout_seconds": 60.0,
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
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("the condition did not come true")


async def generate(client: SGLangClient) -> Answer:
    answer, _, _ = await client.generate(IDS, prompt_tokens=3)
    return answer


def failure(client: SGLangClient) -> BadAnswer:
    with pytest.raises(BadAnswer) as caught:
        run(generate, client)
    return caught.value


def test_the_request_is_spliced_from_its_parts() -> None:
    network = Network()
    client = client_of(network, "http://one:30000/", api_key="secret")
    answer, url, seconds = run(lambda c: c.generate(IDS, prompt_tokens=3), client)

    (request,) = network.requests
    rid = json.loads(request.content)["rid"]
    assert json.loads(request.content) == {"rid": rid, "sampling_params": SAMPLING, "input_ids": [10, 20, 30]}
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["content-type"] == "application/json"
    assert (answer.output_ids, url, seconds > 0) == ([1, 2, 3, 4], URL, True)


def test_no_rid_begins_another_or_passes_for_a_health_check() -> None:
    network = Network()

    async def several(client: SGLangClient) -> None:
        await asyncio.gather(*(generate(client) for _ in range(20)))

    run(several, client_of(network))
    rids = network.rids()
    assert len(set(rids)) == 20
    assert {len(rid) for rid in rids} == {32}
    assert all(int(rid, 16) >= 0 for rid in rids)


def test_a_call_may_ask_for_fewer_tokens_and_other_parameters() -> None:
    network = Network()
    other = Sampling.of({"max_new_tokens": 100, "logit_bias": {"2": 100.0}})
    run(lambda c: c.generate(IDS, prompt_tokens=3, sampling=other, max_new_tokens=7), client_of(network))
    assert json.loads(network.requests[0].content)["sampling_params"] == {
        "max_new_tokens": 7,
        "logit_bias": {"2": 100.0},
    }


def test_max_new_tokens_alone_are_parameters_enough() -> None:
    network = Network()
    run(generate, client_of(network, sampling_params={"max_new_tokens": 4}))
    assert json.loads(network.requests[0].content)["sampling_params"] == {"max_new_tokens": 4}


@pytest.mark.parametrize("params", [{}, {"max_new_tokens": None}, {"max_new_tokens": 4, "n": 2}])
def test_parameters_that_cannot_be_sent_are_config_errors(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling.of(params)


def test_a_retry_aborts_the_old_rid_first_and_takes_a_fresh_one() -> None:
    network = Network(generate=[httpx.Response(500, text="Internal Server Error"), accepted])
    client = client_of(network)
    run(generate, client)
    first, second = network.rids()
    assert network.paths == ["/generate", "/abort_request", "/generate"]
    assert network.rids("/abort_request") == [first]
    assert first != second
    assert client.retried == {"server_error": 1}


def test_an_abort_that_fails_does_not_stop_the_retry() -> None:
    network = Network(generate=[httpx.ReadError("reset"), accepted], abort_request=[httpx.ConnectError("refused")])
    assert run(generate, client_of(network)).output_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(500), "server_error"),
        (httpx.Response(408), "request_timeout"),
        (httpx.Response(502), "bad_gateway"),
        (httpx.ReadError("reset"), "connection_lost"),
        (httpx.RemoteProtocolError("closed without a response"), "connection_lost"),
        (httpx.WriteError("reset"), "connection_lost"),
        (ConnectionResetError(104, "reset"), "connection_lost"),
        (aiohttp.ClientPayloadError("torn off"), "connection_lost"),
        (httpx.ReadTimeout("late"), "timeout"),
        (aborted, "aborted"),
        (httpx.Response(200, text="<html>"), "not_json"),
    ],
)
def test_a_failure_that_may_pass_is_tried_three_times(reply: Reply, reason: str) -> None:
    network = Network(generate=[reply])
    client = client_of(network)
    bad = failure(client)
    assert (bad.reason, bad.outcome, client.retried) == (reason, Outcome.RETRY, {reason: 2})
    assert network.paths.count("/generate") == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(400, json={"error": {"message": "input_ids cannot be empty."}}), "bad_request"),
        (httpx.Response(401, json={"error": "Unauthorized"}), "unauthorized"),
        (httpx.Response(302, headers={"location": "http://elsewhere/generate"}), "not_sglang"),
    ],
)
def test_what_is_final_is_not_tried_again(reply: Reply, reason: str) -> None:
    network = Network(generate=[reply])
    bad = failure(client_of(network))
    assert (bad.reason, bad.outcome is Outcome.RETRY) == (reason, False)
    assert network.paths == ["/generate"]


def test_a_duplicate_rid_is_tried_again_with_a_fresh_one() -> None:
    duplicate = httpx.Response(400, json={"error": {"message": "Duplicate request ID detected: x"}})
    network = Network(generate=[duplicate, accepted])
    run(generate, client_of(network))
    assert len(set(network.rids())) == 2


def test_an_attempt_that_takes_too_long_is_aborted_on_the_server() -> None:
    async def never(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    network = Network(generate=[never])
    client = client_of(network, request_timeout_seconds=0.01, max_tries=2)
    assert failure(client).reason == "timeout"
    assert network.rids() == network.rids("/abort_request")
    assert client.in_flight == 0


class Endless(httpx.AsyncByteStream):
    read_bytes = 0
    closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.read_bytes += 1 << 16
            yield b" " * (1 << 16)

    async def aclose(self) -> None:
        self.closed = True


def test_a_body_without_end_is_given_up_and_its_connection_closed() -> None:
    endless = Endless()
    network = Network(generate=[lambda _: httpx.Response(200, stream=endless)])
    assert failure(client_of(network, max_tries=1)).reason == "answer_too_large"
    assert endless.closed
    assert endless.read_bytes < 2 << 20


def test_a_server_that_is_away_uses_up_no_tries() -> None:
    refused = httpx.ConnectError("Connection refused")
    network = Network(
        generate=[refused, accepted],
        health=[refused, httpx.ConnectTimeout(""), httpx.Response(503), httpx.Response(200)],
    )
    client = client_of(network, max_tries=1)
    run(generate, client)
    assert network.paths == ["/generate", "/health", "/health", "/health", "/health", "/generate"]
    assert client.retried == {"unreachable": 1}


def test_a_server_that_flaps_uses_up_no_tries_either() -> None:
    network = Network(generate=[*[httpx.ConnectError("refused") for _ in range(10)], accepted])
    run(generate, client_of(network, max_tries=1))
    assert network.paths.count("/generate") == 11


@pytest.mark.parametrize(
    "busy", [httpx.Response(503, content=QUEUE_FULL), httpx.Response(429), httpx.Response(503, text="<html>")]
)
def test_a_busy_server_uses_up_no_tries(busy: httpx.Response) -> None:
    network = Network(generate=[*[busy for _ in range(10)], accepted])
    run(generate, client_of(network, max_tries=1))
    assert network.paths.count("/generate") == 11


def test_a_bad_gateway_is_probed_before_the_next_try() -> None:
    network = Network(generate=[httpx.Response(502), accepted], health=[httpx.Response(502), httpx.Response(200)])
    run(generate, client_of(network))
    assert network.paths == ["/generate", "/abort_request", "/health", "/health", "/generate"]


def test_a_dead_server_costs_nothing_where_another_serves() -> None:
    async def by_host(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            raise httpx.ConnectError("refused")
        return accepted(request)

    network = Network(generate=[by_host])
    client = client_of(network, URL, "http://two:30000", pauses=ENDLESS, max_tries=1)

    async def several(client: SGLangClient) -> list[str]:
        return [(await client.generate(IDS, prompt_tokens=3))[1] for _ in range(5)]

    assert run(several, client) == ["http://two:30000"] * 5
    assert [request.url.host for request in network.requests].count("one") == 1
    dead, well = client.servers()
    assert (dead.state, well.state, well.reason) == ("down", "up", None)
    assert dead.reason is not None
    assert "refused" in dead.reason


def test_calls_go_where_the_fewest_are_in_flight() -> None:
    release = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await release.wait()
        return accepted(request)

    network = Network(generate=[held])
    client = client_of(network, URL, "http://two:30000", "http://three:30000")

    async def nine(client: SGLangClient) -> list[int]:
        calls = [asyncio.create_task(generate(client)) for _ in range(9)]
        await until(lambda: client.in_flight == 9)
        seen = [server.in_flight for server in client.servers()]
        release.set()
        await asyncio.gather(*calls)
        return seen

    assert run(nine, client) == [3, 3, 3]
    assert [server.in_flight for server in client.servers()] == [0, 0, 0]


def test_a_server_that_broke_a_request_is_shunned() -> None:
    async def by_host(request: httpx.Request) -> httpx.Response:
        if request.url.host == "one":
            raise httpx.ReadError("reset")
        return accepted(request)

    network = Network(generate=[by_host])
    # Shunned for 1,000 s, while the call itself tries again at once.
    client = client_of(network, URL, "http://two:30000", pauses=ENDLESS)

    async def first_alone(client: SGLangClient) -> list[str]:
        first = asyncio.create_task(generate(client))
        await until(lambda: bool(network.requests))
        others = [(await client.generate(IDS, prompt_tokens=3))[1] for _ in range(5)]
        first.cancel()
        return others

    assert run(first_alone, client) == ["http://two:30000"] * 5
    assert {server.state for server in client.servers()} == {"up"}


def draining(client: SGLangClient, network: Network, path: str) -> BadAnswer:
    """Drain while a call is where `path` was requested last."""

    async def drain(client: SGLangClient) -> None:
        call = asyncio.create_task(generate(client))
        await until(lambda: path in network.paths)
        await asyncio.sleep(0)
        await client.abort_all()
        await call

    with pytest.raises(BadAnswer) as caught:
        run(drain, client)
    return caught.value


def test_a_drain_aborts_its_own_requests_and_no_others() -> None:
    aborts = asyncio.Event()

    async def until_aborted(request: httpx.Request) -> httpx.Response:
        await aborts.wait()
        return aborted(request)

    def abort(_request: httpx.Request) -> httpx.Response:
        aborts.set()
        return httpx.Response(200)

    network = Network(generate=[until_aborted], abort_request=[abort])
    assert draining(client_of(network), network, "/generate").reason == "draining"
    assert network.paths == ["/generate", "/abort_request"]
    assert network.rids() == network.rids("/abort_request")
    assert "abort_all" not in json.loads(network.requests[-1].content)


def test_a_drain_ends_the_wait_between_two_attempts() -> None:
    network = Network(generate=[httpx.Response(429)])
    assert draining(client_of(network, pauses=ENDLESS), network, "/generate").reason == "draining"


def test_a_drain_ends_the_wait_for_a_server() -> None:
    network = Network(generate=[httpx.ConnectError("refused")], health=[httpx.ConnectError("refused")])
    assert draining(client_of(network), network, "/health").reason == "draining"


def test_an_answer_that_comes_whole_during_the_drain_counts() -> None:
    release = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await release.wait()
        return accepted(request)

    network = Network(generate=[held])

    async def drain(client: SGLangClient) -> Answer:
        call = asyncio.create_task(generate(client))
        await until(lambda: bool(network.requests))
        await client.abort_all()
        release.set()
        return await call

    assert run(drain, client_of(network)).output_ids == [1, 2, 3, 4]


def test_nothing_is_sent_after_the_drain() -> None:
    network = Network()

    async def late(client: SGLangClient) -> Answer:
        await client.abort_all()
        return await generate(client)

    with pytest.raises(BadAnswer, match="draining"):
        run(late, client_of(network))
    assert network.requests == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (aiohttp.ServerDisconnectedError(), "connection_lost"),
        (aiohttp.ClientOSError(104, "Connection reset by peer"), "connection_lost"),
        (aiohttp.ClientPayloadError("torn off"), "connection_lost"),
        (aiohttp.ConnectionTimeoutError(), "unreachable"),
        (aiohttp.SocketTimeoutError(), "timeout"),
    ],
)
def test_an_error_of_aiohttp_tells_what_broke(error: Exception, reason: str) -> None:
    assert _broken(error, Server(URL), 1.0).reason == reason


def test_a_broken_connection_does_not_tell_the_api_key() -> None:
    info = aiohttp.RequestInfo(
        yarl.URL(URL), "POST", CIMultiDictProxy(CIMultiDict(authorization="Bearer secret")), yarl.URL(URL)
    )
    bad = _broken(aiohttp.ClientResponseError(info, (), status=400, message="Bad status line"), Server(URL), 1.0)
    assert "Bad status line" in bad.detail
    assert "secret" not in str(bad)


def test_pauses_double_up_to_the_longest() -> None:
    pauses = Pauses()
    assert [pauses.after(failures) for failures in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]
