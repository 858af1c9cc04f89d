"""Which server is taken, seen through the client over a network that the test plays."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from common.errors import ServerRefused, ServerUnavailable
from tests.played import (
    ENDLESS,
    IDS,
    REFUSED,
    THREE,
    TWO,
    URL,
    Network,
    Reply,
    accepted,
    client_of,
    failure,
    generate,
    never,
    run,
    until,
)
from workers.sglang.answer import BadAnswer, Outcome
from workers.sglang.client import SGLangClient
from workers.sglang.server import Pauses, Server

QUEUE_FULL = b'{"object":"error","message":"The request queue is full.","type":"503","code":503}'


def on_host(host: str, reply: Reply) -> Reply:
    """Replies so on one host, and well on the others."""

    def answer(request: httpx.Request) -> Any:
        if request.url.host != host:
            return accepted(request)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, httpx.Response):
            return httpx.Response(reply.status_code, content=reply.content)
        return reply(request)

    return answer


async def urls_of(client: SGLangClient, calls: int) -> list[str]:
    return [(await client.generate(IDS, prompt_tokens=3))[1] for _ in range(calls)]


def test_a_server_that_is_away_uses_up_no_tries() -> None:
    network = Network(
        generate=[REFUSED, accepted],
        health=[REFUSED, httpx.ConnectTimeout(""), httpx.Response(503), httpx.Response(200)],
    )
    client = client_of(network)
    run(generate, client)
    assert network.paths == ["/generate", "/health", "/health", "/health", "/health", "/generate"]
    assert client.failed_attempts == {"unreachable": 1}


@pytest.mark.parametrize(
    "reply",
    [
        REFUSED,
        httpx.ConnectTimeout(""),
        httpx.Response(503, content=QUEUE_FULL),
        httpx.Response(429),
        httpx.Response(503, text="<html>"),
    ],
)
def test_a_server_that_has_not_tried_a_sample_costs_it_nothing_however_often(reply: Reply) -> None:
    network = Network(generate=[*[reply for _ in range(30)], accepted])
    run(generate, client_of(network))
    assert network.paths.count("/generate") == 31


def test_a_bad_gateway_is_probed_before_the_next_try() -> None:
    network = Network(generate=[httpx.Response(502), accepted], health=[httpx.Response(502), httpx.Response(200)])
    run(generate, client_of(network))
    assert network.paths == ["/generate", "/abort_request", "/health", "/health", "/generate"]


def test_what_stands_in_front_of_a_dead_server_uses_up_no_tries() -> None:
    """A proxy says 502 to all, its probe included: after three such probes one call tries, time and again."""
    network = Network(
        generate=[*[httpx.Response(502) for _ in range(20)], accepted],
        health=[*[httpx.Response(502) for _ in range(60)], httpx.Response(200)],
    )
    run(generate, client_of(network))
    assert network.paths.count("/generate") == 21
    assert network.paths.count("/health") == 60


def test_a_dead_server_costs_nothing_where_another_serves() -> None:
    network = Network(generate=[on_host("one", REFUSED)])
    client = client_of(network, URL, TWO, pauses=ENDLESS)
    assert run(lambda client: urls_of(client, 5), client) == [TWO] * 5
    assert network.hosts().count("one") == 1
    dead, well = client.servers()
    assert (dead.state, well.state, well.reason) == ("down", "up", None)
    assert dead.reason is not None
    assert "refused" in dead.reason
    assert (dead.answers, well.answers) == (0, 5)


def test_calls_go_where_the_fewest_are_in_flight() -> None:
    release = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await release.wait()
        return accepted(request)

    client = client_of(Network(generate=[held]), URL, TWO, THREE)

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
    network = Network(generate=[on_host("one", httpx.ReadError("reset"))])
    # Shunned for 1,000 s, while the call itself tries again at once.
    client = client_of(network, URL, TWO, pauses=ENDLESS)

    async def first_alone(client: SGLangClient) -> list[str]:
        first = asyncio.create_task(generate(client))
        await until(lambda: bool(network.requests))
        others = await urls_of(client, 5)
        first.cancel()
        return others

    assert run(first_alone, client) == [TWO] * 5
    assert {server.state for server in client.servers()} == {"up"}


# Which can be used


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (httpx.Response(401, json={"error": "Unauthorized"}), "unauthorized"),
        (httpx.Response(404), "not_sglang"),
        (httpx.Response(302, headers={"location": "http://elsewhere/generate"}), "not_sglang"),
    ],
)
def test_a_server_that_cannot_be_used_halts_the_run_only_if_it_is_the_last(reply: Reply, reason: str) -> None:
    network = Network(generate=[on_host("one", reply)])
    client = client_of(network, URL, TWO, pauses=ENDLESS)
    assert run(lambda client: urls_of(client, 5), client) == [TWO] * 5
    assert [server.state for server in client.servers()] == ["unfit", "up"]
    assert client.failed_attempts == {reason: 1}

    bad = failure(client_of(network, URL))
    assert (bad.reason, bad.outcome) == (reason, Outcome.HALT_RUN)


def test_changed_weights_on_one_server_leave_the_others_to_it() -> None:
    def changed(request: httpx.Request) -> httpx.Response:
        body = json.loads(accepted(request).content)
        body["meta_info"]["weight_version"] = "other"
        return httpx.Response(200, json=body)

    network = Network(generate=[on_host("one", changed)])
    client = client_of(network, URL, TWO, pauses=ENDLESS)
    assert run(lambda client: urls_of(client, 5), client) == [TWO] * 5
    one, _ = client.servers()
    assert (one.state, one.answers) == ("unfit", 0)
    assert one.reason is not None
    assert "'other'" in one.reason


def test_a_server_is_looked_at_before_its_first_call_and_each_time_that_it_comes_back() -> None:
    looks: list[str] = []

    async def inspect(server: Server) -> None:
        looks.append(server.url)

    network = Network(generate=[accepted, REFUSED, accepted])
    assert run(lambda client: urls_of(client, 2), client_of(network, inspect=inspect)) == [URL, URL]
    assert looks == [URL, URL]
    assert network.paths == ["/generate", "/generate", "/health", "/generate"]


def test_a_server_that_is_refused_at_the_first_look_gets_no_call_until_it_is_another() -> None:
    faults: list[Exception] = [ServerUnavailable("away"), ServerRefused("another model"), ServerRefused("another")]
    states: list[tuple[str, str | None]] = []

    async def inspect(server: Server) -> None:
        if server.url == URL:
            states.append((server.state, server.reason))
            if faults:
                raise faults.pop(0)
            fits.set()

    fits = asyncio.Event()
    network = Network()
    client = client_of(network, URL, TWO, inspect=inspect)

    async def until_both_serve(client: SGLangClient) -> None:
        assert await urls_of(client, 3) == [TWO] * 3
        await asyncio.wait_for(fits.wait(), 10)
        await until(lambda: {server.state for server in client.servers()} == {"up", "half_open"})

    run(until_both_serve, client)
    assert states == [("checking", None), ("down", "away"), ("unfit", "another model"), ("unfit", "another")]
    assert network.hosts("/health") == ["one"]


def test_a_run_whose_servers_all_serve_something_else_is_halted_until_someone_sees_to_them() -> None:
    fits = False

    async def inspect(server: Server) -> None:
        if not fits:
            raise ServerRefused(f"{server.url} serves another model")

    network = Network()
    client = client_of(network, URL, TWO, inspect=inspect)

    async def halted(client: SGLangClient) -> None:
        nonlocal fits
        with pytest.raises(BadAnswer) as caught:
            await generate(client)
        assert (caught.value.reason, caught.value.outcome) == ("no_fit_server", Outcome.HALT_RUN)
        assert URL in caught.value.detail
        assert TWO in caught.value.detail
        assert network.requests == []
        fits = True
        await until(lambda: "half_open" in {server.state for server in client.servers()})
        await generate(client)

    run(halted, client)
    assert network.paths.count("/generate") == 1


# Servers of a running job


def test_an_added_server_is_taken_and_a_drained_one_ends_what_it_has() -> None:
    release = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await release.wait()
        return accepted(request)

    network = Network(generate=[held])
    client = client_of(network)

    async def change(client: SGLangClient) -> list[str]:
        first = asyncio.create_task(client.generate(IDS, prompt_tokens=3))
        await until(lambda: client.in_flight == 1)
        client.set_urls([TWO + "/"])
        second = asyncio.create_task(client.generate(IDS, prompt_tokens=3))
        await until(lambda: client.in_flight == 2)
        assert [(one.url, one.state, one.in_flight) for one in client.servers()] == [
            (URL, "draining", 1),
            (TWO, "up", 1),
        ]
        release.set()
        taken = [(await first)[1], (await second)[1]]
        client.set_urls([TWO])
        assert [one.url for one in client.servers()] == [TWO]
        return [*taken, *await urls_of(client, 2)]

    assert run(change, client) == [URL, TWO, TWO, TWO]


def test_a_call_that_waits_for_a_server_gets_the_one_that_is_added() -> None:
    network = Network(generate=[on_host("one", REFUSED)], health=[REFUSED])
    client = client_of(network, pauses=ENDLESS)

    async def add(client: SGLangClient) -> str:
        waits = asyncio.create_task(client.generate(IDS, prompt_tokens=3))
        await until(lambda: client.servers()[0].state == "down")
        client.set_urls([URL, TWO])
        return (await waits)[1]

    assert run(add, client) == TWO


def test_each_server_gets_its_own_api_key() -> None:
    network = Network(generate=[never])
    client = client_of(network, URL, TWO, api_key_of={URL: "first", TWO: None}.get)

    async def two(client: SGLangClient) -> None:
        calls = [asyncio.create_task(generate(client)) for _ in range(2)]
        await until(lambda: len(network.requests) == 2)
        for call in calls:
            call.cancel()

    run(two, client)
    keys = {request.url.host: request.headers.get("authorization") for request in network.requests}
    assert keys == {"one": "Bearer first", "two": None}


def test_a_router_has_no_abort_route_so_its_calls_are_given_up_in_a_drain() -> None:
    network = Network(generate=[never], abort_request=[httpx.Response(404)])
    client = client_of(network)

    async def drain(client: SGLangClient) -> None:
        calls = [asyncio.create_task(generate(client)) for _ in range(3)]
        await until(lambda: client.in_flight == 3)
        await client.abort_all()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(one).partition(":")[0] for one in found] == ["draining"] * 3

    run(drain, client)
    assert client.in_flight == 0


def test_pauses_double_up_to_the_longest() -> None:
    pauses = Pauses()
    assert [pauses.after(failures) for failures in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]
