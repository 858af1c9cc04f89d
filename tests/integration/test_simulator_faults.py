"""What can be wrong with the simulated server: its faults one by one, its deaths, its pauses, its older releases."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.integration.test_simulator_http import INSTANT, LONG, SLOW, Caller, with_server
from workers.sglang.simulator.faults import OF_REQUESTS, OF_THE_SERVER

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
ASKED = 40  # of an answer that would go on


async def ask(caller: Caller, **fields: Any) -> dict[str, Any]:
    status, body = await caller.generate(PROMPT, rid="0123456789", max_new_tokens=ASKED, **fields)
    assert status == 200
    assert isinstance(body, dict)
    return body


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


async def set_faults(caller: Caller, faults: dict[str, Any]) -> None:
    status, body = await caller.call("POST", "/_sim/faults", json=faults)
    assert status == 200, body


async def slow_request(caller: Caller) -> "asyncio.Task[tuple[int, Any]]":
    """A request that runs, on a server that is too slow to end it before it is made fast again."""
    await caller.call("POST", "/slow_down", json={"forward_sleep_time": 0.02 * caller.server.config.speed})
    task = asyncio.create_task(caller.generate(PROMPT, max_new_tokens=2000))
    await caller.until(lambda load: load["num_used_tokens"] > len(PROMPT) + 3)
    return task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the server has no event for all that tests wait for
            await asyncio.sleep(0.001)


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


def test_a_request_that_hangs_is_never_run() -> None:
    async def test(caller: Caller) -> None:
        await set_faults(caller, {"hang": {"next": 1}})
        hanging = asyncio.create_task(caller.generate(PROMPT))
        await until(lambda: caller.server.totals.refused == 1)
        assert (await caller.generate(PROMPT))[0] == 200
        assert not hanging.done()
        hanging.cancel()
        assert caller.server.totals.finished == 1

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
        assert told["known"].keys() == OF_REQUESTS.keys() | OF_THE_SERVER.keys()
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


@pytest.mark.parametrize("how", ["an id", "no ids", "poison", "told", "fault"])
def test_a_death_breaks_all_connections_and_it_comes_back_empty_on_the_same_port(how: str) -> None:
    async def test(caller: Caller) -> None:
        port = caller.server.port
        running = asyncio.create_task(caller.generate(PROMPT, **LONG))
        await caller.until_load(1, 0)
        broken = [running]
        if how == "told":
            await caller.call("POST", "/_sim/die", json={"restart_seconds": 0.2})
        else:
            prompts: dict[str, list[Any]] = {"an id": [5, 1024], "no ids": [[]]}
            ids = prompts.get(how, [1, 7, 8, 9])
            faults = {"poison": {"ids": [7, 8]}, "fault": {"next": 1}}
            if how in faults:
                await set_faults(caller, {"poison" if how == "poison" else "die": faults[how]})
            broken.append(asyncio.create_task(caller.generate(ids)))
        for call in broken:
            with pytest.raises(aiohttp.ClientConnectionError):
                await call
        await caller.server.dead.wait()
        with pytest.raises(aiohttp.ClientConnectorError):
            await caller.call("GET", "/ping")
        await until(lambda: not caller.server.dead.is_set())
        assert caller.server.port == port
        assert (await caller.load())["num_running_reqs"] == 0
        assert (await caller.generate([5], max_new_tokens=3))[0] == 200

    with_server(test, speed=200.0, restart_seconds=0.2, **SLOW)


def test_without_a_restart_it_stays_dead() -> None:
    async def test(caller: Caller) -> None:
        caller.server.die("the test wants it")
        await caller.server.dead.wait()
        with pytest.raises(aiohttp.ClientConnectorError):
            await caller.call("GET", "/ping")
        await caller.server.restart()
        assert (await caller.generate([5]))[0] == 200

    with_server(test, **INSTANT)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_new_requests_back_and_treats_the_running_as_its_mode_says(mode: str) -> None:
    async def test(caller: Caller) -> None:
        running = await slow_request(caller)
        status, body = await caller.call("POST", "/pause_generation", json={"mode": mode})
        assert (status, body) == (200, {"message": "Generation paused successfully.", "status": "ok"})
        await caller.call("POST", "/slow_down", json={})
        held = asyncio.create_task(caller.generate([9], max_new_tokens=2))
        assert (await caller.call("GET", "/health"))[0] == 503
        assert not held.done()
        await caller.call("POST", "/continue_generation", json={})
        assert len((await held)[1]["output_ids"]) == 2
        _, body = await running
        kind, retractions = body["meta_info"]["finish_reason"]["type"], body["meta_info"]["num_retractions"]
        expected = {"abort": ("abort", 0), "retract": ("length", 1), "in_place": ("length", 0)}
        assert (kind, retractions) == expected[mode]
        assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"]

    with_server(test, speed=500.0, **SLOW)


def test_slow_down_flush_and_new_weights() -> None:
    async def test(caller: Caller) -> None:
        assert await caller.call("POST", "/slow_down", json={"forward_sleep_time": 1000.0}) == (200, None)
        running = asyncio.create_task(caller.generate(PROMPT, **LONG))
        await caller.until_load(1, 0)
        status, text = await caller.call("POST", "/flush_cache")
        assert (status, text.splitlines()[0]) == (400, "Flush cache failed.")
        await caller.call("POST", "/slow_down", json={"forward_sleep_time": None})
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        await running
        assert (await caller.call("GET", "/flush_cache"))[0] == 200
        body = {"model_path": "simulated", "weight_version": "v2"}
        status, told = await caller.call("POST", "/update_weights_from_disk", json=body)
        assert (status, told["success"]) == (200, True)
        assert (await ask(caller))["meta_info"]["weight_version"] == "v2"
        assert (await caller.call("GET", "/model_info"))[1]["weight_version"] == "v2"

    with_server(test, speed=1000.0, **SLOW)


@pytest.mark.parametrize("profile", ["0.5.2", "0.5.9", "0.5.13", "0.5.19", "0.5.23"])
def test_a_release_has_its_own_routes_and_fields(profile: str) -> None:
    async def test(caller: Caller) -> None:
        found = {path for path in PATHS if (await caller.call("GET", path))[0] == 200}
        assert found == PATHS - MISSING[profile]
        _, info = await caller.call("GET", "/get_server_info")
        assert info["version"] == profile
        body = await ask(caller)
        leak = PROMPT[-5:] if profile == "0.5.2" else []
        assert body["output_ids"][: len(leak)] == leak
        assert len(body["output_ids"]) == ASKED + len(leak)
        meta = body["meta_info"]
        names = {"num_retractions", "total_retractions", "reasoning_tokens", "weight_versions", "queue_time"}
        assert names & meta.keys() == FIELDS[profile]
        assert meta["completion_tokens"] == ASKED
        status, refused = await caller.generate(PROMPT, no_such_parameter=1)
        assert (status, isinstance(refused, str)) == ((400, False) if profile == "0.5.23" else (500, True))

    with_server(test, profile=profile, speed=1000.0, **SLOW)


PATHS = {"/get_server_info", "/server_info", "/get_model_info", "/model_info", "/get_load", "/v1/loads", "/ready"}
MISSING = {
    "0.5.2": {"/server_info", "/model_info", "/v1/loads", "/ready"},
    "0.5.9": {"/ready"},
    "0.5.13": {"/ready"},
    "0.5.19": {"/ready"},
    "0.5.23": {"/get_load"},
}
FIELDS = {
    "0.5.2": set[str](),
    "0.5.9": {"total_retractions", "queue_time"},
    "0.5.13": {"num_retractions", "reasoning_tokens", "queue_time"},
    "0.5.19": {"num_retractions", "reasoning_tokens", "queue_time"},
    "0.5.23": {"num_retractions", "reasoning_tokens", "weight_versions", "queue_time"},
}


def test_without_its_tokenizer_0_5_2_leaks_nothing_and_has_no_text() -> None:
    async def test(caller: Caller) -> None:
        body = await ask(caller)
        assert ("text" in body, len(body["output_ids"])) == (False, ASKED)

    with_server(test, profile="0.5.2", skip_tokenizer_init=True, **INSTANT, **SLOW)


@pytest.mark.parametrize(("profile", "ids"), [("0.5.2", None), ("0.5.19", 1), ("0.5.23", 5)])
def test_an_abort_in_the_queue_has_the_shape_of_its_release(profile: str, ids: int | None) -> None:
    """Of a request that was retracted into the queue, so that it has ids already."""

    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.generate(PROMPT, rid="r", **LONG))
        await until(lambda: caller.server.load().used_tokens >= 13)
        ticker = caller.server.process._ticker
        assert ticker is not None
        ticker.hold("test", retract=True)
        await until(lambda: caller.server.load().waiting == 1)
        await caller.call("POST", "/abort_request", json={"rid": "r"})
        status, body = await call
        meta = body["meta_info"]
        assert (status, meta["finish_reason"]) == (200, {"type": "abort", "message": "Abort in waiting queue"})
        if ids is None:
            assert (body.keys(), meta["prompt_tokens"]) == ({"text", "meta_info"}, 0)
        else:
            assert "prompt_tokens" not in meta
            assert len(body["output_ids"]) == (1 if ids == 1 else meta["completion_tokens"])
            assert meta["completion_tokens"] >= 5

    with_server(test, profile=profile, speed=50.0, **SLOW)


def test_0_5_13_keeps_the_rid_of_a_prompt_that_was_too_long() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.generate([5] * 40_000, rid="long")
        assert (status, "longer than" in body["error"]["message"]) == (400, True)
        status, body = await caller.generate([5], rid="long")
        assert (status, body["error"]["message"]) == (400, "Duplicate request ID detected: long")

    with_server(test, profile="0.5.13", **INSTANT)


@pytest.mark.parametrize(("profile", "dies"), [("0.5.13", True), ("0.5.19", False)])
def test_an_abort_that_meets_the_last_step_kills_old_releases(profile: str, dies: bool) -> None:
    async def test(caller: Caller) -> None:
        await caller.call("POST", "/slow_down", json={"forward_sleep_time": 1e5})
        call = asyncio.create_task(caller.generate(PROMPT, rid="r", max_new_tokens=2))
        await caller.until_load(1, 0)
        await caller.until(lambda load: load["num_used_tokens"] == len(PROMPT) + 1)  # the second step has begun
        await caller.call("POST", "/abort_request", json={"rid": "r"})
        if dies:
            with pytest.raises(aiohttp.ClientConnectionError):
                await call
            assert caller.server.death == "an abort met the last step of its request"
        else:
            assert (await call)[0] == 200

    with_server(test, profile=profile, speed=1e5, **SLOW)


def test_a_prompt_that_is_too_long_is_cut_without_a_word_if_so_told() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.generate([5] * 3000, max_new_tokens=4)
        assert status == 200
        assert body["meta_info"]["prompt_tokens"] < 2048
        assert (await caller.call("GET", "/server_info"))[1]["allow_auto_truncate"] is True

    with_server(test, context_length=2048, allow_auto_truncate=True, **INSTANT)


def test_the_bomb_is_small_on_the_wire() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    assert len(packer.compress(b" " * (1 << 20)) + packer.flush()) < 2000
