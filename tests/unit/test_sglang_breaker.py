"""The circuit breaker of each server, seen through the client over a network that the test plays."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.played import (
    REFUSED,
    Network,
    Reply,
    accepted,
    client_of,
    generate,
    never,
    run,
    until,
)
from workers.sglang.answer import REASONS, BadAnswer, Says
from workers.sglang.client import SGLangClient
from workers.sglang.server import Pauses
from workers.sglang.servers import FAILURES_TO_OPEN


def test_failures_in_a_row_open_the_breaker_and_a_trial_closes_it() -> None:
    states: list[str] = []
    failures: list[Reply] = [httpx.Response(500) for _ in range(FAILURES_TO_OPEN)]

    def trial(request: httpx.Request) -> httpx.Response:
        states.append(client.servers()[0].state)
        return accepted(request)

    network = Network(generate=[*failures, trial])
    client = client_of(network)
    run(generate, client)
    assert states == ["half_open"]
    assert network.paths[-2:] == ["/health", "/generate"]
    assert [server.state for server in client.servers()] == ["up"]


def test_an_answer_in_between_keeps_the_breaker_closed() -> None:
    failed = httpx.Response(500)
    network = Network(generate=[failed, failed, accepted, failed, failed, accepted])

    async def twice(client: SGLangClient) -> None:
        await generate(client)
        await generate(client)

    run(twice, client_of(network))
    assert "/health" not in network.paths


def test_calls_that_one_death_breaks_are_one_failure() -> None:
    die = asyncio.Event()

    async def dying(_request: httpx.Request) -> httpx.Response:
        await die.wait()
        raise httpx.ReadError("reset")

    network = Network(generate=[*[dying for _ in range(20)], accepted])
    client = client_of(network, pauses=Pauses(first_seconds=0.05, longest_seconds=0.05))

    async def twenty(client: SGLangClient) -> None:
        calls = [asyncio.create_task(generate(client)) for _ in range(20)]
        await until(lambda: client.in_flight == 20)
        die.set()
        await until(lambda: client.in_flight == 0)
        assert [server.state for server in client.servers()] == ["up"]
        await asyncio.gather(*calls)

    run(twenty, client)
    assert "/health" not in network.paths


REFUSALS: list[Reply] = [
    httpx.Response(400, json={"error": {"message": "The input (9 tokens) is longer than the model's context length"}}),
    httpx.Response(400, json={"error": {"message": "input_ids cannot be empty."}}),
    httpx.Response(400, json={"error": "unknown field `x`"}),
    httpx.Response(400, json={"error": {"message": "Duplicate request ID detected: x"}}),
    httpx.Response(408),
    httpx.Response(413),
    httpx.Response(422, json={"detail": "wrong"}),
    httpx.Response(429),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_server_refuses_never_opens_its_breaker(refusal: Reply) -> None:
    network = Network(generate=[*[refusal for _ in range(20)], accepted])

    async def twenty(client: SGLangClient) -> None:
        await asyncio.gather(*(generate(client) for _ in range(20)), return_exceptions=True)
        await until(lambda: client.in_flight == 0)

    client = client_of(network)
    run(twenty, client)
    assert [server.state for server in client.servers()] == ["up"]
    assert "/health" not in network.paths


def test_no_reason_for_a_4xx_speaks_against_the_server() -> None:
    of_4xx = ("over_context", "bad_request", "bad_parameters", "duplicate_rid", "disconnected", "request_timeout")
    assert all(REASONS[reason].says in {Says.NOTHING, Says.BUSY} for reason in (*of_4xx, "rate_limited"))


def test_only_one_call_is_on_trial() -> None:
    on_trial, release = asyncio.Event(), asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        on_trial.set()
        await release.wait()
        return accepted(request)

    network = Network(generate=[REFUSED, held])
    client = client_of(network)

    async def ten(client: SGLangClient) -> None:
        first = asyncio.create_task(generate(client))
        await until(lambda: client.servers()[0].state == "down")
        others = [asyncio.create_task(generate(client)) for _ in range(9)]
        await asyncio.wait_for(on_trial.wait(), 10)
        await asyncio.sleep(0.01)
        assert (client.in_flight, client.servers()[0].state) == (1, "half_open")
        release.set()
        await asyncio.gather(first, *others)

    run(ten, client)
    assert client.servers()[0].answers == 10


def test_a_trial_that_is_refused_lets_the_next_one_try() -> None:
    over = httpx.Response(400, json={"error": {"message": "input_ids cannot be empty."}})
    network = Network(generate=[REFUSED, over, accepted])

    async def two(client: SGLangClient) -> Sequence[Any]:
        return await asyncio.gather(generate(client), generate(client), return_exceptions=True)

    found = run(two, client_of(network))
    assert sorted(isinstance(one, BadAnswer) for one in found) == [False, True]


def test_a_server_whose_probe_never_says_well_gets_a_trial_all_the_same() -> None:
    network = Network(generate=[REFUSED, accepted], health=[httpx.Response(503)])
    client = client_of(network)
    run(generate, client)
    assert network.paths == ["/generate", "/health", "/health", "/health", "/generate"]


def test_a_trial_that_hangs_does_not_hold_the_others_for_ever() -> None:
    """Nothing has failed for so long as a dead scheduler takes to break its connections: the breaker closes."""
    network = Network(generate=[REFUSED, never, accepted])
    client = client_of(network, pauses=Pauses(0.0005, 0.002, trial_seconds=0.01))

    async def two(client: SGLangClient) -> None:
        hangs = asyncio.create_task(generate(client))
        await until(lambda: client.servers()[0].state == "down")
        await generate(client)
        hangs.cancel()

    run(two, client)
    assert [server.state for server in client.servers()] == ["up"]
