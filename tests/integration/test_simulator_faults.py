"""What can be wrong with the simulated server: its faults, one by one."""

import asyncio
import zlib
from typing import Any

import aiohttp
import pytest

from tests.integration.simulator_steps import (
    ASKED,
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
from workers.sglang.simulator.faults import ALL_OF_REQUESTS, OF_THE_SERVER


async def struck(caller: Caller, name: str) -> dict[str, Any]:
    """The answer to the request that the fault strikes; one before and one after it are well."""
    well = await ask(caller)
    await set_faults(caller, {name: {"next": 1, "after": 1}})
    assert (await ask(caller))["output_ids"] == well["output_ids"]
    body = await ask(caller)
    assert (await ask(caller))["output_ids"] == well["output_ids"]
    _, told = await caller.call("GET", "/_sim/faults")
    assert told["faults"][name]["struck"] == 1
    assert len(well["output_ids"]) == well["meta_info"]["completion_tokens"] == ASKED
    return {"well": well["output_ids"], **body}


def lied(body: dict[str, Any]) -> tuple[Any, ...]:
    meta = body["meta_info"]
    return meta["id"], meta["finish_reason"]["type"], meta["prompt_tokens"], meta["completion_tokens"]


@pytest.mark.parametrize("speed", [0.0, 1000.0])
def test_each_lie_about_an_answer(speed: float) -> None:
    async def test(caller: Caller) -> None:
        nan = await struck(caller, "nan")
        assert nan["meta_info"]["finish_reason"] == {"type": "stop", "matched": "NaN happened"}
        assert nan["output_ids"] == [*nan["well"][: ASKED // 2], 2]
        aborted = await struck(caller, "abort")
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        assert aborted["output_ids"] == aborted["well"][: ASKED // 2]
        wrong = await struck(caller, "wrong_rid")
        assert lied(wrong) == ("98765432100", "length", 8, ASKED)
        assert (await struck(caller, "weight_version"))["meta_info"]["weight_version"] == "default-changed"
        assert "output_ids" not in await struck(caller, "no_output_ids")
        leak = await struck(caller, "prompt_leak")
        assert (leak["output_ids"], lied(leak)[3]) == ([14, 15, 16, 17, 18, *leak["well"]], ASKED)
        lost = await struck(caller, "lost_id")
        assert (len(lost["output_ids"]), lied(lost)[3]) == (ASKED - 1, ASKED)
        assert (await struck(caller, "bad_output_id"))["output_ids"][0] == 1024
        clipped = await struck(caller, "clipped")
        assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": ASKED // 2}
        assert clipped["output_ids"] == clipped["well"][: ASKED // 2]
        truncated = await struck(caller, "truncated_prompt")
        assert lied(truncated) == ("0123456789", "length", 4, ASKED)
        assert truncated["output_ids"] != truncated["well"]

    with_server(test, speed=speed, **SLOW)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_refusal_with_a_status(status: int) -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {"status": {"next": 2, "status": status}})
        found = [(await caller.generate(PROMPT))[0] for _ in range(3)]
        assert found == [status, status, 200]
        assert (caller.server.totals.refused, caller.server.totals.finished) == (2, 1)

    with_server(test, **INSTANT)


@pytest.mark.parametrize("name", ["reset", "late_reset", "cut"])
def test_a_connection_that_breaks(name: str) -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {name: {"next": 1}})
        with pytest.raises(aiohttp.ClientError if name == "cut" else aiohttp.ClientConnectionError) as caught:
            await caller.generate(PROMPT)
        if name == "cut":
            assert isinstance(caught.value, aiohttp.ClientPayloadError)
        assert (await caller.generate(PROMPT))[0] == 200
        assert caller.server.totals.finished == (1 if name == "reset" else 2)

    with_server(test, **INSTANT)


def test_what_is_no_answer_at_all() -> None:
    async def test(caller: Caller) -> None:
        faults: dict[str, Any] = {name: {"next": 1} for name in ("html", "redirect", "garbled", "wrong_type")}
        await set_faults(caller, faults)
        found = []
        for _ in range(4):
            url = caller.server.url + "/generate"
            async with caller.session.post(url, json={"input_ids": [1]}, allow_redirects=False) as response:
                found.append((response.status, response.content_type, (await response.read())[-1:]))
        assert found == [
            (200, "text/html", b">"),
            (302, "application/octet-stream", b""),
            (200, "application/json", found[2][2]),
            (200, "text/html", b"}"),
        ]
        assert found[2][2] != b"}"

    with_server(test, **INSTANT)


def test_an_endless_body_and_a_gzip_bomb_come_in_pieces() -> None:
    async def test(caller: Caller) -> None:
        url = caller.server.url + "/generate"
        await set_faults(caller, {"endless": {"next": 1}, "gzip_bomb": {"next": 1, "megabytes": 8}})
        async with caller.session.post(url, json={"input_ids": [1]}) as response:
            assert len(await response.content.readexactly(1 << 20)) == 1 << 20
            response.close()
        async with caller.session.post(url, json={"input_ids": [1]}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert len(await response.read()) == 8 << 20  # aiohttp has unpacked it
        assert (await caller.generate(PROMPT))[0] == 200

    with_server(test, **INSTANT)


def test_a_request_that_hangs_is_not_run_until_the_fault_is_taken_back() -> None:
    async def test(caller: Caller) -> None:
        totals = caller.server.totals
        for number, change in enumerate(("cleared", "replaced", "never")):
            await set_faults(caller, {"hang": {"next": 1}})
            hanging = asyncio.create_task(caller.generate(PROMPT))
            await until(lambda: totals.refused == 1)
            assert (await caller.generate(PROMPT))[0] == 200
            assert not hanging.done()
            assert totals.finished == 2 * number + 1
            if change == "cleared":
                await caller.call("DELETE", "/_sim/faults")
            elif change == "replaced":
                await set_faults(caller, {"hang": {"after": 9}})
            else:
                hanging.cancel()
                continue
            assert (await hanging)[0] == 200
            assert totals.refused == 0

    with_server(test, **INSTANT)


def test_a_share_of_the_requests_is_struck_and_the_same_with_the_same_seed() -> None:
    found: list[list[int]] = []

    async def test(caller: Caller) -> None:
        found.append([(await caller.generate([n]))[0] for n in range(200)])

    for _ in range(2):
        with_server(test, faults=("status:share=0.25",), **INSTANT)
    assert found[0] == found[1]
    assert 30 < found[0].count(503) < 70


def test_the_control_route_lists_sets_and_clears() -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {"nan": {"share": 0.5}, "hang": {}})
        await set_faults(caller, {"hang": None})
        _, told = await caller.call("GET", "/_sim/faults")
        assert told["faults"].keys() == {"nan"}
        assert told["known"].keys() == ALL_OF_REQUESTS.keys() | OF_THE_SERVER.keys()
        bad_ones: list[dict[str, Any]] = [{"nonsense": {}}, {"nan": {"share": 2}}, {"poison": {}}, {"nan": {"foo": 1}}]
        for bad in bad_ones:
            assert (await caller.call("POST", "/_sim/faults", json=bad))[0] == 400
        _, told = await caller.call("DELETE", "/_sim/faults")
        assert told["faults"] == {}

    with_server(test, api_key="secret", **INSTANT)  # and it needs no key


def test_false_health_says_503_while_all_is_well() -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {"false_health": {}})
        assert (await caller.call("GET", "/health"))[0] == 503
        assert (await caller.generate(PROMPT))[0] == 200
        await set_faults(caller, {"false_health": None})
        assert (await caller.call("GET", "/health"))[0] == 200

    with_server(test, **INSTANT)


def test_stale_figures_stay_as_they_are() -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {"stale_loads": {}})
        running = asyncio.create_task(caller.generate(PROMPT, rid="r", **LONG))
        await until(lambda: caller.server.load().running == 1)
        assert (await caller.load())["num_running_reqs"] == 0
        await set_faults(caller, {"stale_loads": None})
        assert (await caller.load())["num_running_reqs"] == 1
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        await running

    with_server(test, **SLOW)


def test_a_hung_scheduler_answers_nothing_but_old_figures_until_it_goes_on() -> None:
    """As observed: /health is 503, /server_info hangs, the figures stay, and requests wait and then go on."""

    async def test(caller: Caller) -> None:
        running = await slow_request(caller)
        await set_faults(caller, {"frozen": {}})
        await caller.call("POST", "/slow_down", json={})
        later = asyncio.create_task(caller.generate(PROMPT, max_new_tokens=5))
        asked = asyncio.create_task(caller.call("GET", "/server_info"))
        assert (await caller.call("GET", "/health"))[0] == 503
        assert (await caller.call("GET", "/ready"))[0] == 503
        assert (await caller.load())["num_running_reqs"] == 1
        assert [task.done() for task in (running, later, asked)] == [False, False, False]
        await set_faults(caller, {"frozen": None})
        for task in (running, later, asked):
            assert (await task)[0] == 200

    with_server(test, speed=500.0, **SLOW)


def test_the_bomb_is_small_on_the_wire() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    assert len(packer.compress(b" " * (1 << 20)) + packer.flush()) < 2000
