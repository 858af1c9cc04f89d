"""When a call is given up, and when it is waited for, over a network that the test plays."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.played import Network, Reply, accepted, client_of, failure, generate, never, run, until
from workers.sglang.answer import BadAnswer, Outcome
from workers.sglang.client import MAX_UNPROVEN, SGLangClient
from workers.sglang.watch import Call, Patience, Speed

# Looks every 2 ms; a call is over its limit after 10 ms, and in every case over after 40.
HASTE = Patience(least_seconds=0.01, look_seconds=0.002, quiet_seconds=1000.0, assumed_tokens_per_second=1e6)
# The same for a server that says nothing.
QUIET = Patience(quiet_seconds=0.004, look_seconds=0.002, alive_seconds=0.1)
HOUR = 3600.0  # twice what a call may take, and half of what it may while its server is at work


def loads(running: int, waiting: int = 0) -> httpx.Response:
    return httpx.Response(200, json={"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]})


def after(condition: Callable[[], bool]) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
    """An answer that comes when the condition holds."""

    async def answer(request: httpx.Request) -> httpx.Response:
        await until(condition)
        return accepted(request)

    return answer


async def waits_since(client: SGLangClient, seconds: float) -> Call:
    """The only call, as if it had been waited for so long."""
    await until(lambda: client.in_flight == 1)
    (call,) = client._running.values()
    call.counts_from = call.started - seconds
    return call


ROUTER = httpx.Response(200, json={"workers": [{"worker": "http://w:1", "load": -1}]})


@pytest.mark.parametrize("busy", [loads(1), loads(0, 3), httpx.Response(200, json=[{"num_reqs": 2}]), ROUTER])
def test_a_server_at_work_is_waited_for_beyond_the_limit(busy: httpx.Response) -> None:
    old: list[Reply] = [busy] if isinstance(busy.json(), list) else [httpx.Response(404)]
    new: list[Reply] = [httpx.Response(404)] if isinstance(busy.json(), list) else [busy]
    network = Network(v1_loads=new, get_load=old)
    network.replies["generate"] = [after(lambda: network.paths.count("/v1/loads") >= 3)]

    async def wait(client: SGLangClient) -> None:
        waiting = asyncio.create_task(generate(client))
        await waits_since(client, HOUR)
        await waiting

    run(wait, client_of(network, patience=Patience(look_seconds=0.002)))
    assert network.paths.count("/generate") == 1


def test_but_not_for_ever() -> None:
    network = Network(generate=[never], v1_loads=[loads(5)])
    bad = failure(client_of(network, patience=HASTE))
    assert (bad.reason, bad.outcome) == ("timeout", Outcome.RETRY)
    assert network.paths.count("/generate") == MAX_UNPROVEN


def test_a_request_that_the_server_has_lost_is_given_up_at_the_limit_and_aborted() -> None:
    network = Network(generate=[never, accepted], v1_loads=[loads(0)])
    client = client_of(network, patience=HASTE)
    run(generate, client)
    first, second = network.rids()
    assert network.rids("/abort_request") == [first]
    assert first != second
    assert client.failed_attempts == {"timeout": 1}


@pytest.mark.parametrize("running", [0, 1])
def test_a_paused_server_is_waited_for(running: int) -> None:
    """Its scheduler answers, and the probe's own token does not come; its figures stand still, whatever they say."""
    unpaused = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await unpaused.wait()
        return accepted(request)

    network = Network(generate=[held], health=[httpx.Response(503)], v1_loads=[loads(running)])

    async def pause(client: SGLangClient) -> None:
        call = asyncio.create_task(generate(client))
        await until(lambda: network.paths.count("/health") >= 5)  # beyond its limit as often
        unpaused.set()
        await call

    client = client_of(network, patience=HASTE)
    run(pause, client)
    assert client.failed_attempts == {}


def test_the_time_for_which_its_server_was_paused_is_none_of_a_calls() -> None:
    """An hour of it, twice what a call may take: nothing is given up when the server goes on, and looks idle."""
    answered = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await answered.wait()
        return accepted(request)

    network = Network(generate=[held], health=[httpx.Response(503)], v1_loads=[loads(0)])
    # The server is asked whether it lives at each look, before what is late is judged.
    client = client_of(network, patience=Patience(quiet_seconds=0.0, look_seconds=0.002))

    async def pause(client: SGLangClient) -> None:
        waiting = asyncio.create_task(generate(client))
        call = await waits_since(client, HOUR)
        await until(lambda: call.counts_from > call.started)
        network.replies["health"] = [httpx.Response(200)]
        looks = len(network.hosts("/get_server_info"))
        await until(lambda: len(network.hosts("/get_server_info")) >= looks + 3)
        answered.set()
        await waiting

    run(pause, client)
    assert client.failed_attempts == {}
    assert network.paths.count("/generate") == 1


def test_a_limit_that_was_set_holds_whatever_the_server_says() -> None:
    network = Network(generate=[never], v1_loads=[loads(5)])
    assert failure(client_of(network, patience=Patience(answer_seconds=0.004))).reason == "timeout"
    assert "/v1/loads" not in network.paths


def test_a_scheduler_that_hangs_is_found_out_and_its_calls_go_elsewhere() -> None:
    def by_host(well: Reply) -> Reply:
        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.host == "one":
                return await never(request)
            return accepted(request) if well is accepted else httpx.Response(200)

        return answer

    network = Network(generate=[by_host(accepted)], get_server_info=[by_host(httpx.Response(200))], health=[never])
    client = client_of(network, "http://one:30000", "http://two:30000", patience=QUIET)

    async def four(client: SGLangClient) -> list[Any]:
        calls = [asyncio.create_task(client.generate(b"[1,2,3]", prompt_tokens=3)) for _ in range(4)]
        return [(await call)[1] for call in calls]

    assert run(four, client) == ["http://two:30000"] * 4
    hung, _ = client.servers()
    assert hung.state == "down"
    assert client.failed_attempts == {"stalled": 1}
    assert [path for path in network.hosts("/get_server_info") if path == "one"] == ["one"] * 3


def test_a_scheduler_that_answers_now_and_then_is_slow_and_not_dead() -> None:
    asked = 0

    async def every_third(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200) if asked % 3 == 0 else await never(request)

    network = Network(generate=[after(lambda: asked >= 6)], get_server_info=[every_third])
    client = client_of(network, patience=QUIET)
    run(generate, client)
    assert client.failed_attempts == {}


def test_an_answer_that_is_long_in_coming_from_a_live_server_is_waited_for() -> None:
    network = Network()
    network.replies["generate"] = [after(lambda: network.paths.count("/get_server_info") > 3)]
    client = client_of(network, patience=QUIET)
    run(generate, client)
    assert client.failed_attempts == {}


def test_a_call_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def cancel(client: SGLangClient) -> None:
        call = asyncio.create_task(generate(client))
        await until(lambda: client.in_flight == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.in_flight == 0

    run(cancel, client_of(Network(generate=[never])))


def test_the_speed_of_a_server_is_known_from_ten_answers_on_and_follows_it() -> None:
    speed = Speed()
    for _ in range(9):
        speed.add(1000, 10.0)
    assert speed.tokens_per_second(2.0) == 2.0
    speed.add(1000, 10.0)
    assert speed.tokens_per_second(2.0) == pytest.approx(100.0)
    for _ in range(200):
        speed.add(1000, 100.0)
    assert speed.tokens_per_second(2.0) == pytest.approx(10.0, rel=0.2)


def test_an_answer_may_take_three_times_its_tokens_at_the_measured_speed_and_half_an_hour_at_least() -> None:
    async def limits(client: SGLangClient) -> list[float]:
        call = asyncio.create_task(client.generate(b"[1,2,3]", prompt_tokens=3, max_new_tokens=10_240))
        await until(lambda: client.in_flight == 1)
        (running,) = client._running.values()
        watch, found = client._watch, []
        for rate in (2.0, 50.0, 17.0, 1.0):
            for _ in range(1 if rate == 2.0 else 1000):
                watch.answered(running.server, round(100 * rate), 100.0)
            found.append(watch._limit(running))
        call.cancel()
        return found

    unmeasured, fast, ordinary, slow = run(limits, client_of(Network(generate=[never])))
    assert unmeasured == 15_360.0
    assert fast == 1800.0
    assert ordinary == pytest.approx(1807, abs=2)
    assert slow == pytest.approx(30_720, rel=0.01)


def test_a_verdict_reaches_the_caller_as_a_bad_answer() -> None:
    async def give_up(client: SGLangClient) -> None:
        call = asyncio.create_task(generate(client))
        await until(lambda: client.in_flight == 1)
        (running,) = client._running.values()
        running.give_up(BadAnswer("kills_server", "as a test says"))
        with pytest.raises(BadAnswer, match="kills_server"):
            await call
        assert call.cancelling() == 0

    run(give_up, client_of(Network(generate=[never])))


def test_a_verdict_on_a_call_that_has_ended_leaves_the_next_call_of_its_task_alone() -> None:
    """The watch asks the server between seeing a call and giving it up; a sample may be at its next try by then."""

    async def give_up_late(client: SGLangClient) -> list[list[int]]:
        async def two_calls() -> list[list[int]]:
            return [(await generate(client)).output_ids for _ in range(2)]

        calls = asyncio.create_task(two_calls())
        await until(lambda: client.in_flight == 1)
        (first,) = client._running.values()
        go_on.set()
        await until(lambda: client.in_flight == 1 and first not in client._running.values())
        first.give_up(BadAnswer("stalled", "as a test says"))
        go_on_again.set()
        return await calls

    go_on, go_on_again = asyncio.Event(), asyncio.Event()

    def after(event: asyncio.Event) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
        async def reply(request: httpx.Request) -> httpx.Response:
            await event.wait()
            return accepted(request)

        return reply

    network = Network(generate=[after(go_on), after(go_on_again)])
    assert run(give_up_late, client_of(network)) == [[1, 2, 3, 4]] * 2
