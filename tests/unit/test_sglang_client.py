"""The client over a network that the test plays: bodies, tries, aborts, the drain."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import pytest
import yarl
from multidict import CIMultiDict, CIMultiDictProxy

from common.errors import ConfigError
from tests.played import (
    ENDLESS,
    IDS,
    REFUSED,
    SAMPLING,
    URL,
    Network,
    Reply,
    aborted,
    accepted,
    client_of,
    failure,
    generate,
    never,
    run,
    until,
)
from workers.sglang.answer import Answer, BadAnswer, Outcome
from workers.sglang.client import MAX_DEATHS, MAX_TRIES, MAX_UNPROVEN, Sampling, SGLangClient, _broken
from workers.sglang.server import Pauses, Server
from workers.sglang.watch import Patience


def test_the_request_is_spliced_from_its_parts() -> None:
    network = Network()
    client = client_of(network, "http://one:30000/", api_key_of={URL: "secret"}.get)
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
    assert client.failed_attempts == {"server_error": 1}


def test_an_abort_that_fails_does_not_stop_the_retry() -> None:
    network = Network(generate=[httpx.ReadError("reset"), accepted], abort_request=[REFUSED])
    assert run(generate, client_of(network)).output_ids == [1, 2, 3, 4]


NOT_JSON = httpx.Response(200, text="<html>")
FAILURES: list[tuple[Reply, str]] = [
    (httpx.Response(500), "server_error"),
    (httpx.Response(504), "gateway_timeout"),
    (httpx.ReadTimeout("late"), "timeout"),
    (NOT_JSON, "not_json"),
]


def by_prompt(bad: Reply) -> Reply:
    """A server that answers all prompts but the usual one."""

    async def answer(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["input_ids"] != [10, 20, 30]:
            return accepted(request)
        if isinstance(bad, Exception):
            raise bad
        assert isinstance(bad, httpx.Response)
        return httpx.Response(bad.status_code, content=bad.content)

    return answer


async def beside_others(client: SGLangClient) -> Answer:
    """The usual prompt, while others are answered."""

    async def others() -> None:
        while True:
            await client.generate(b"[7]", prompt_tokens=1)
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    try:
        return await generate(client)
    finally:
        beside.cancel()


@pytest.mark.parametrize(("reply", "reason"), FAILURES)
def test_a_sample_that_fails_where_others_are_answered_is_tried_three_times(reply: Reply, reason: str) -> None:
    network = Network(generate=[by_prompt(reply)])
    client = client_of(network)
    with pytest.raises(BadAnswer) as caught:
        run(beside_others, client)
    assert (caught.value.reason, caught.value.outcome) == (reason, Outcome.RETRY)
    failed = client.failed_attempts[reason]
    # An attempt that failed before any other was answered does not count.
    assert MAX_TRIES <= failed < MAX_UNPROVEN
    assert set(client.failed_attempts) == {reason}


@pytest.mark.parametrize(("reply", "reason"), FAILURES)
def test_a_server_that_answers_nobody_costs_no_tries_but_is_not_tried_for_ever(reply: Reply, reason: str) -> None:
    network = Network(generate=[reply])
    client = client_of(network)
    assert failure(client).reason == reason
    assert client.failed_attempts == {reason: MAX_UNPROVEN}
    assert network.paths.count("/generate") == MAX_UNPROVEN


@pytest.mark.parametrize(("reply", "reason"), [(httpx.Response(408), "request_timeout"), (aborted, "aborted")])
def test_what_says_nothing_of_the_server_is_tried_three_times(reply: Reply, reason: str) -> None:
    network = Network(generate=[reply])
    client = client_of(network)
    assert failure(client).reason == reason
    assert client.failed_attempts == {reason: MAX_TRIES}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(502), "bad_gateway"),
        (httpx.ReadError("reset"), "connection_lost"),
        (httpx.RemoteProtocolError("closed without a response"), "connection_lost"),
        (httpx.WriteError("reset"), "connection_lost"),
        (ConnectionResetError(104, "reset"), "connection_lost"),
        (aiohttp.ClientPayloadError("torn off"), "connection_lost"),
    ],
)
def test_a_sample_that_breaks_its_connection_three_times_ends_the_third_time_alone(reply: Reply, reason: str) -> None:
    network = Network(generate=[reply])
    client = client_of(network)
    bad = failure(client)
    assert (bad.reason, bad.outcome, client.failed_attempts) == ("kills_server", Outcome.REJECT, {reason: 3})
    assert "3 times, the last time alone" in bad.detail
    assert network.paths.count("/generate") == 3


def test_a_sample_that_breaks_its_connections_late_ends_as_well() -> None:
    async def later(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.01)
        raise httpx.ReadError("reset")

    client = client_of(Network(generate=[later]), pauses=Pauses(0.0005, 0.002, trial_seconds=0.001))
    assert failure(client).reason == "kills_server"
    assert client.failed_attempts == {"connection_lost": MAX_DEATHS}


def test_those_that_were_in_flight_with_the_one_that_kills_are_answered() -> None:
    """A server that dies of one prompt, with all that it is at, and is back at once: 8 prompts, of which 1 kills."""
    held: list[asyncio.Future[None]] = []

    async def dying(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["input_ids"] == [10, 20, 30]:
            for one in held:
                if not one.done():
                    one.set_exception(httpx.ReadError("reset"))
            raise httpx.ReadError("reset")
        held.append(one := asyncio.get_running_loop().create_future())
        await asyncio.wait_for(asyncio.shield(one), 0.05) if len(held) < 15 else None
        return accepted(request)

    async def all_of_them(client: SGLangClient) -> list[Any]:
        innocent = [asyncio.create_task(client.generate(b"[%d]" % n, prompt_tokens=1)) for n in range(7)]
        await until(lambda: len(held) == 7)
        return await asyncio.gather(generate(client), *innocent, return_exceptions=True)

    client = client_of(Network(generate=[dying]))
    killer, *others = run(all_of_them, client)
    assert isinstance(killer, BadAnswer)
    assert killer.reason == "kills_server"
    assert [one[0].output_ids for one in others] == [[1, 2, 3, 4]] * 7


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
    network = Network(generate=[never])
    client = client_of(network, patience=Patience(answer_seconds=0.004))
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
    assert failure(client_of(network)).reason == "answer_too_large"
    assert endless.closed
    assert endless.read_bytes < MAX_UNPROVEN * (2 << 20)


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
    network = Network(generate=[REFUSED], health=[REFUSED])
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
    assert _broken(error, Server(URL, {}, "up")).reason == reason


def test_a_broken_connection_does_not_tell_the_api_key() -> None:
    info = aiohttp.RequestInfo(
        yarl.URL(URL), "POST", CIMultiDictProxy(CIMultiDict(authorization="Bearer secret")), yarl.URL(URL)
    )
    bad = _broken(aiohttp.ClientResponseError(info, (), status=400, message="Bad status line"), Server(URL, {}, "up"))
    assert "Bad status line" in bad.detail
    assert "secret" not in str(bad)
