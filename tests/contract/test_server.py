"""What a server does, as this project relies on it: the same tests for the simulated one and for a real SGLang."""

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.contract.wire import PATIENCE_SECONDS, Wire, on_the_wire
from workers.sglang.preflight import ServerFacts

IDS = [10, 20, 30, 40, 50]
LONG = 1500  # of max_new_tokens: an answer that outlasts what is tried meanwhile


def prompt(number: int) -> list[int]:
    """Prompts that differ from their first id on."""
    return [100 + number, 20, 30, 40, 50]


def test_an_answer_says_what_a_client_must_know(url: str) -> None:
    async def test(wire: Wire) -> None:
        body = await wire.answer(IDS, rid="contract-1", max_new_tokens=4)
        meta = body["meta_info"]
        assert (meta["id"], meta["finish_reason"]) == ("contract-1", {"type": "length", "length": 4})
        assert (meta["prompt_tokens"], meta["completion_tokens"], len(body["output_ids"])) == (5, 4, 4)
        assert meta.keys() >= {"cached_tokens", "num_retractions", "weight_version", "e2e_latency", "reasoning_tokens"}
        assert isinstance(body["text"], str)
        again = await wire.answer(IDS, max_new_tokens=8)
        assert again["output_ids"][:4] == body["output_ids"]
        assert again["meta_info"]["id"] not in {"", "contract-1"}

    on_the_wire(url, test)


def test_128_tokens_if_no_number_is_asked_for_and_none_if_it_is_0(url: str) -> None:
    async def test(wire: Wire) -> None:
        assert len((await wire.answer(IDS))["output_ids"]) == 128
        nothing = await wire.answer(IDS, max_new_tokens=0)
        assert (nothing["output_ids"], nothing["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})

    on_the_wire(url, test)


def test_a_stop_token_ends_the_answer_and_is_its_last_id_unless_it_is_to_be_ignored(url: str) -> None:
    async def test(wire: Wire) -> None:
        ids = (await wire.answer(IDS, max_new_tokens=24))["output_ids"]
        stop = ids[9]
        params: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": [stop]}
        stopped = await wire.answer(IDS, ignore_eos=False, **params)
        assert stopped["output_ids"] == ids[: ids.index(stop) + 1]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert stopped["meta_info"]["completion_tokens"] == ids.index(stop) + 1
        assert (await wire.answer(IDS, **params))["output_ids"] == ids

    on_the_wire(url, test)


def test_a_biased_token_is_always_taken(url: str) -> None:
    async def test(wire: Wire) -> None:
        params: dict[str, Any] = {"max_new_tokens": 3, "logit_bias": {"77": 100.0}}
        assert (await wire.answer(IDS, **params))["output_ids"] == [77, 77, 77]

    on_the_wire(url, test)


def test_a_repeated_prompt_is_cached_but_for_its_last_token(url: str) -> None:
    async def test(wire: Wire) -> None:
        assert (await wire.call("POST", "/flush_cache"))[0] == 200
        prompts = [prompt(1), prompt(1), [*prompt(1), 60], [*prompt(1), 70], prompt(2)]
        cached = [(await wire.answer(ids, max_new_tokens=1))["meta_info"]["cached_tokens"] for ids in prompts]
        assert cached == [0, 4, 5, 5, 0]

    on_the_wire(url, test)


def test_what_is_beyond_the_context_is_refused_and_what_is_nearly_so_is_clipped_without_a_word(
    url: str, facts: ServerFacts
) -> None:
    context, most = facts.context_length, facts.max_req_input_len
    assert context is not None
    assert most is not None

    async def test(wire: Wire) -> None:
        for ids, new_tokens in (([5] * context, 1), ([5] * (context - 10), 11), ([5] * most, 1)):
            status, body = await wire.generate(ids, max_new_tokens=new_tokens)
            assert (status, body.keys()) == (400, {"error"})
            assert body["error"].keys() == {"message"}
        ids = [5] * (context - 60)
        clipped = await wire.answer(ids, max_new_tokens=60)
        left = most + 5 - len(ids) - 1
        assert clipped["meta_info"]["finish_reason"] == {"type": "length", "length": left}
        assert len(clipped["output_ids"]) == left < 60

    on_the_wire(url, test)


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ({"input_ids": []}, {"error": {"message"}}),
        ({"sampling_params": {}}, {"error": {"message"}}),
        ({"input_ids": IDS, "sampling_params": {"temperature": -1}}, {"error": {"message"}}),
        ({"input_ids": IDS, "sampling_params": {"no_such_parameter": 1}}, {"error": None}),
        ({"input_ids": IDS, "sampling_params": {"max_new_tokens": "5"}}, {"error": None}),
        ([1, 2, 3], dict.fromkeys(("object", "message", "type", "param", "code"))),
        ({"input_ids": ["a"]}, dict.fromkeys(("object", "message", "type", "param", "code"))),
    ],
)
def test_refusals_come_in_three_shapes(url: str, body: Any, keys: dict[str, set[str] | None]) -> None:
    async def test(wire: Wire) -> None:
        status, found = await wire.call("POST", "/generate", body)
        assert (status, found.keys()) == (400, keys.keys())
        for key, inner in keys.items():
            assert not isinstance(found[key], dict) if inner is None else found[key].keys() == inner

    on_the_wire(url, test)


def test_unknown_fields_beside_the_parameters_are_let_through(url: str) -> None:
    async def test(wire: Wire) -> None:
        body = {"input_ids": IDS, "no_such_field": 1, "sampling_params": {"max_new_tokens": 1}}
        assert (await wire.call("POST", "/generate", body))[0] == 200

    on_the_wire(url, test)


def test_a_rid_in_flight_is_refused_and_free_again_afterwards(url: str) -> None:
    async def test(wire: Wire) -> None:
        first = asyncio.create_task(wire.generate(prompt(1), rid="twice", max_new_tokens=LONG))
        await wire.until_load(1, 0)
        error = {"error": {"message": "Duplicate request ID detected: twice"}}
        assert await wire.generate(prompt(2), rid="twice", max_new_tokens=1) == (400, error)
        await wire.abort_all()
        await first
        await wire.answer(prompt(2), rid="twice", max_new_tokens=1)

    on_the_wire(url, test)


def test_an_abort_is_a_200_and_takes_all_whose_rid_begins_so(url: str) -> None:
    async def test(wire: Wire) -> None:
        for nobody in ({"rid": "nobody"}, {}):
            assert await wire.call("POST", "/abort_request", nobody) == (200, "")
        whole = (await wire.answer(prompt(1), max_new_tokens=1000))["output_ids"]
        rids = ("p1", "p10", "q1")
        calls = [asyncio.create_task(wire.answer(prompt(1), rid=rid, max_new_tokens=1000)) for rid in rids]
        await wire.until(lambda load: load["num_used_tokens"] > 30 and load["num_running_reqs"] == 3)
        await wire.call("POST", "/abort_request", {"rid": "p1"})
        for body in await asyncio.gather(*calls[:2]):
            meta, ids = body["meta_info"], body["output_ids"]
            aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert meta["finish_reason"] == aborted
            assert (meta["completion_tokens"], meta["prompt_tokens"]) == (len(ids), 5)
            assert 0 < len(ids) < 1000
            # Batches of another size round differently, and a model of random weights then takes another path.
            assert ids[:4] == whole[:4]
        assert (await calls[2])["meta_info"]["finish_reason"] == {"type": "length", "length": 1000}

    on_the_wire(url, test)


@pytest.mark.parametrize(("ignore_eos", "running"), [(True, 2), (False, 3)])
def test_admission_reserves_for_max_new_tokens_and_a_queued_request_is_aborted_empty(
    url: str, facts: ServerFacts, ignore_eos: bool, running: int
) -> None:
    """Of requests for 0.36 of the pool two fit if they are sure to need it; else 0.7 of that is reserved for each."""
    assert facts.max_total_num_tokens is not None
    new_tokens = int(facts.max_total_num_tokens * 0.36)
    params: dict[str, Any] = {"ignore_eos": ignore_eos, "max_new_tokens": new_tokens, "logit_bias": {"77": 100.0}}
    if new_tokens > min(4000, (facts.context_length or 0) - 10):
        pytest.skip("the pool is too large for this: its requests would be longer than the context, or than 4,096")

    async def test(wire: Wire) -> None:
        calls = [asyncio.create_task(wire.answer(prompt(n), **params)) for n in range(10)]
        await wire.until_load(running, 10 - running)
        await wire.abort_all()
        bodies = await asyncio.gather(*calls)
        queued = [body for body in bodies if not body["output_ids"]]
        assert len(queued) >= 9 - running  # one may have been let in when the first was gone
        for body in queued:
            assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
            assert "prompt_tokens" not in body["meta_info"]
            assert body["meta_info"]["completion_tokens"] == 0

    on_the_wire(url, test)


def test_a_full_pool_retracts_and_every_answer_is_whole(url: str, facts: ServerFacts) -> None:
    pool, running = facts.max_total_num_tokens, facts.max_running_requests
    assert pool is not None
    assert running is not None
    if running > 16 or pool > 20_000:
        pytest.skip("the pool is too large to fill it in a test")
    new_tokens = int(1.25 * pool / running)

    async def test(wire: Wire) -> None:
        params: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": False, "logit_bias": {"77": 100.0}}
        await wire.call("POST", "/flush_cache")
        calls = []
        async with wire.slowed(0.1):  # the first must not end before the last begins
            for number in range(running):  # one after the other: all that comes at once is charged in full
                calls.append(asyncio.create_task(wire.answer(prompt(number), **params)))
                await wire.until_load(number + 1, 0)
        bodies = await asyncio.gather(*calls)
        assert [body["output_ids"] for body in bodies] == [[77] * new_tokens] * running
        assert sum(body["meta_info"]["num_retractions"] for body in bodies) > 0

    on_the_wire(url, test)


def test_a_caller_that_leaves_is_noticed(url: str) -> None:
    async def test(wire: Wire) -> None:
        call = asyncio.create_task(wire.answer(prompt(1), max_new_tokens=LONG))
        await wire.until_load(1, 0)
        call.cancel()
        load = await wire.until(lambda load: load["num_running_reqs"] == 0)
        assert load["num_used_tokens"] == 0

    on_the_wire(url, test)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_new_requests_back(url: str, mode: str) -> None:
    async def test(wire: Wire) -> None:
        # Slowed down, it cannot end before it is paused.
        await wire.call("POST", "/slow_down", {"forward_sleep_time": 0.1})
        running = asyncio.create_task(wire.answer(prompt(1), max_new_tokens=400))
        await wire.until(lambda load: load["num_used_tokens"] > 10)
        await wire.call("POST", "/slow_down", {"forward_sleep_time": None})
        try:
            told = {"message": "Generation paused successfully.", "status": "ok"}
            assert await wire.call("POST", "/pause_generation", {"mode": mode}) == (200, told)
            held = asyncio.create_task(wire.answer(prompt(2), max_new_tokens=2))
            assert (await asyncio.wait([held], timeout=0.5))[0] == set()
        finally:
            assert (await wire.call("POST", "/continue_generation", {}))[0] == 200
        assert len((await held)["output_ids"]) == 2
        body = await running
        found = body["meta_info"]["finish_reason"]["type"], body["meta_info"]["num_retractions"]
        assert found == {"abort": ("abort", 0), "retract": ("length", 1), "in_place": ("length", 0)}[mode]
        assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"]

    on_the_wire(url, test)


def test_it_can_be_slowed_down_and_is_flushed_only_when_idle(url: str) -> None:
    async def test(wire: Wire) -> None:
        assert await wire.call("POST", "/slow_down", {"forward_sleep_time": 0.2}) == (200, None)
        try:
            call = asyncio.create_task(wire.answer(prompt(1), max_new_tokens=LONG))
            await wire.until_load(1, 0)
            assert (await wire.call("POST", "/flush_cache"))[0] == 400
        finally:
            assert await wire.call("POST", "/slow_down", {"forward_sleep_time": None}) == (200, None)
        await wire.abort_all()
        await call
        assert (await wire.call("GET", "/flush_cache"))[0] == 200

    on_the_wire(url, test)


def test_it_says_what_it_is_and_how_it_is(url: str) -> None:
    async def test(wire: Wire) -> None:
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert await wire.call("GET", path) == (200, "")
        _, info = await wire.call("GET", "/server_info")
        assert info.keys() >= {
            "version",
            "max_total_num_tokens",
            "max_req_input_len",
            "kv_cache_dtype",
            "weight_version",
        }
        assert info["internal_states"][0]["effective_max_running_requests_per_dp"] > 0
        assert (await wire.call("GET", "/get_server_info"))[1].keys() == info.keys()
        _, model = await wire.call("GET", "/model_info")
        assert model.keys() >= {"model_path", "tokenizer_path", "weight_version"}
        assert (await wire.call("GET", "/v1/models"))[1]["data"][0]["max_model_len"] > 0
        assert (await wire.call("GET", "/get_load"))[0] == 404
        assert (await wire.call("GET", "/generate"))[0] == 405
        load = await wire.load()
        assert load["max_total_num_tokens"] == info["max_total_num_tokens"]
        assert load.keys() >= {"num_used_tokens", "token_usage", "gen_throughput", "cache_hit_rate", "queues"}

    on_the_wire(url, test)


def test_the_metrics_that_are_read_are_there(url: str) -> None:
    async def test(wire: Wire) -> None:
        await wire.answer(IDS, max_new_tokens=2)
        status, text = await wire.call("GET", "/metrics")
        if status == 404:
            pytest.skip("the server was started without --enable-metrics")
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "num_retracted_reqs"):
            assert f"sglang:{name}{{" in text
        for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total"):
            assert f"sglang:{name}{{" in text

    on_the_wire(url, test)


def test_a_connection_that_idles_is_closed_by_the_server(url: str) -> None:
    """After five seconds: a client must give up its idle connections earlier."""

    async def test(wire: Wire) -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        loop = asyncio.get_running_loop()
        asked = loop.time()
        writer.write(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.read()
        assert loop.time() - asked > 4.5
        writer.close()

    on_the_wire(url, test)


def test_nothing_is_redirected_or_compressed(url: str) -> None:
    async def test(wire: Wire) -> None:
        body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}
        async with wire.session.post(url + "/generate", json=body, allow_redirects=False) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert "Content-Encoding" not in response.headers
            assert int(response.headers["Content-Length"]) == len(await response.read())

    on_the_wire(url, test)


def test_a_server_that_is_not_there_refuses_connections() -> None:
    async def test(wire: Wire) -> None:
        with pytest.raises(aiohttp.ClientConnectorError):
            await wire.call("GET", "/ping")

    on_the_wire("http://127.0.0.1:1", test)
