"""Streamed answers, as SGLang 0.5.23 gives them: the same tests for the simulated server and for a real one."""

import asyncio
import itertools
from typing import Any

import pytest

from tests.contract.wire import Wire, on_the_wire
from workers.sglang.preflight import ServerFacts

IDS = [10, 20, 30, 40, 50]
LONG = 1500  # of max_new_tokens: an answer that outlasts what is tried meanwhile
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def slow_stream(wire: Wire, slow: int, input_ids: list[int], **params: Any) -> list[dict[str, Any]]:
    """All events of a stream; the first comes, and then some more, before there are more ids than theirs."""
    found = []
    async with wire.slowed(2.0):
        stream = wire.events(input_ids, **params)
        found.append(await anext(stream))
    async with wire.slowed(0.1):
        while len(found) < slow:
            found.append(await anext(stream))
    return found + [event async for event in stream]


def test_each_event_has_all_ids_so_far_and_only_the_last_a_finish_reason(url: str) -> None:
    async def test(wire: Wire) -> None:
        whole = (await wire.answer(IDS, max_new_tokens=40))["output_ids"]
        events = await slow_stream(wire, 11, IDS, rid="stream-1", max_new_tokens=40)
        metas = [event["meta_info"] for event in events]
        assert len(events) > 10
        for event, meta in zip(events, metas, strict=True):
            assert event["output_ids"][: meta["completion_tokens"]] == whole[: meta["completion_tokens"]]
            assert (meta["id"], meta["prompt_tokens"]) == ("stream-1", 5)
        counts = [meta["completion_tokens"] for meta in metas]
        assert counts == sorted(set(counts))
        assert (counts[0], counts[-1]) == (1, 40)
        assert [meta["finish_reason"] for meta in metas[:-1]] == [None] * (len(metas) - 1)
        assert metas[-1]["finish_reason"] == {"type": "length", "length": 40}
        assert events[-1]["output_ids"] == whole

    on_the_wire(url, test)


def test_the_last_event_has_the_fields_of_a_plain_answer(url: str) -> None:
    async def test(wire: Wire) -> None:
        plain = await wire.answer(IDS, max_new_tokens=4)
        first, *_, last = await slow_stream(wire, 1, IDS, max_new_tokens=40)
        assert (last.keys(), last["meta_info"].keys()) == (plain.keys(), plain["meta_info"].keys())
        missing = {"weight_versions", "e2e_latency", "request_finished_ts"}
        assert missing <= last["meta_info"].keys() - first["meta_info"].keys()

    on_the_wire(url, test)


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_answer_of_one_id_or_none_is_one_event(url: str, tokens: int) -> None:
    async def test(wire: Wire) -> None:
        [event] = await wire.stream(IDS, max_new_tokens=tokens)
        assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"] == tokens
        assert event["meta_info"]["finish_reason"] == {"type": "length", "length": tokens}

    on_the_wire(url, test)


def test_a_stop_token_is_the_last_id(url: str) -> None:
    async def test(wire: Wire) -> None:
        params: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": [2], "logit_bias": {"2": 100.0}}
        [event] = await wire.stream(IDS, max_new_tokens=9, **params)
        assert (event["output_ids"], event["meta_info"]["finish_reason"]) == ([2], {"type": "stop", "matched": 2})

    on_the_wire(url, test)


def test_with_an_interval_there_are_fewer_events(url: str) -> None:
    async def test(wire: Wire) -> None:
        events = await wire.stream(IDS, max_new_tokens=40, stream_interval=8)
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts[-1] == 40
        assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(counts[:-1]))

    on_the_wire(url, test)


def test_what_cannot_be_served_is_an_event_inside_a_200(url: str, facts: ServerFacts) -> None:
    context, most = facts.context_length, facts.max_req_input_len
    assert context is not None
    assert most is not None

    async def test(wire: Wire) -> None:
        bad: list[tuple[list[int], dict[str, Any]]] = [
            ([], {}),
            ([5] * context, {}),
            (IDS, {"max_new_tokens": context}),
            (IDS, {"top_p": 2}),
        ]
        for ids, params in bad:
            [event] = await wire.stream(ids, **params)
            assert event.keys() == {"error"}
            assert event["error"].keys() == {"message", "type", "code", "retryable"}
            assert (event["error"]["type"], event["error"]["code"]) == ("invalid_request_error", 400)
        [event] = await wire.stream([5] * most, max_new_tokens=1)  # which only the scheduler finds
        reason = event["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 400, "BadRequestError")
        assert "exceeds the maximum allowed length" in reason["message"]

    on_the_wire(url, test)


def test_what_the_schema_refuses_is_a_plain_400(url: str) -> None:
    async def test(wire: Wire) -> None:
        for more in ({"sampling_params": {"no_such_parameter": 1}}, {"stream": "yes"}, {"stream": None}):
            status, _ = await wire.call("POST", "/generate", {"input_ids": IDS, "stream": True} | more)
            assert status == 400

    on_the_wire(url, test)


def test_a_rid_in_flight_is_refused(url: str) -> None:
    async def test(wire: Wire) -> None:
        first = asyncio.create_task(wire.stream(IDS, rid="twice-streamed", max_new_tokens=LONG))
        await wire.until_load(1, 0)
        [event] = await wire.stream(IDS, rid="twice-streamed", max_new_tokens=1)
        assert event["error"]["message"] == "Duplicate request ID detected: twice-streamed"
        await wire.abort_all()
        await first

    on_the_wire(url, test)


def test_an_abort_ends_a_stream_with_what_there_is(url: str) -> None:
    async def test(wire: Wire) -> None:
        events = []
        async for event in wire.events(IDS, rid="to-be-aborted", max_new_tokens=LONG):
            events.append(event)
            if len(events) == 5:
                await wire.call("POST", "/abort_request", {"rid": "to-be-aborted"})
        last = events[-1]
        assert last["meta_info"]["finish_reason"] == ABORTED
        assert 5 <= len(last["output_ids"]) == last["meta_info"]["completion_tokens"] < LONG
        assert last["output_ids"][:5] == events[4]["output_ids"][:5]

    on_the_wire(url, test)


def test_an_abort_in_the_queue_is_one_irregular_event(url: str, facts: ServerFacts) -> None:
    assert facts.max_total_num_tokens is not None
    new_tokens = int(facts.max_total_num_tokens * 0.36)
    if new_tokens > min(4000, (facts.context_length or 0) - 10):
        pytest.skip("the pool is too large for this: its requests would be longer than the context, or than 4,096")

    async def test(wire: Wire) -> None:
        streams = [asyncio.create_task(wire.stream([100 + n, 20, 30], max_new_tokens=new_tokens)) for n in range(6)]
        await wire.until_load(2, 4)
        await wire.abort_all()
        found = await asyncio.gather(*streams)
        queued = [events for events in found if "prompt_tokens" not in events[-1]["meta_info"]]
        assert len(queued) >= 3  # one may have been let in when the first was gone
        for [event] in queued:
            assert event["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
            assert (event["output_ids"], event["meta_info"]["completion_tokens"]) == ([], 0)

    on_the_wire(url, test)


def test_a_caller_that_leaves_a_stream_is_noticed(url: str) -> None:
    async def test(wire: Wire) -> None:
        events = wire.events(IDS, max_new_tokens=LONG)
        await anext(events)
        await wire.until_load(1, 0)
        await events.aclose()
        await wire.until_load(0, 0)

    on_the_wire(url, test)
