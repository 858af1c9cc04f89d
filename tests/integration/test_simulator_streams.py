"""Streamed answers of the simulated server, as each release gives them, and its faults in them."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.simulator_steps import (
    ASKED,
    INSTANT,
    LONG,
    PROMPT,
    SLOW,
    Caller,
    Steps,
    recorded,
    stepped,
    turns,
    until,
    with_server,
)
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.ticker import LOOK_SECONDS

Events = list[dict[str, Any]]
ANSWERS = Answers(SimulatorConfig(vocab_size=1024, **SLOW))
MODEL = ANSWERS.answer(PROMPT, 30_000).stream
MODEL_OF_HALF = ANSWERS.answer(PROMPT[:4], 30_000).stream
STEPS: dict[str, Any] = {**SLOW, "speed": 10.0}  # a step takes 3 ms
ERROR_TYPES = {"type": "invalid_request_error", "code": 400, "retryable": False}


def ids(events: Events) -> list[int]:
    """All ids of all events."""
    return [token for event in events for token in event["output_ids"]]


def counts(events: Events) -> list[int]:
    return [event["meta_info"]["completion_tokens"] for event in events]


@pytest.mark.parametrize(
    ("profile", "settings", "deltas", "text_deltas"),
    [
        ("0.5.2", {"skip_tokenizer_init": True}, False, False),
        ("0.5.2", {"skip_tokenizer_init": True, "stream_output": True}, True, False),
        ("0.5.2", {"stream_output": True}, True, False),
        ("0.5.2", {}, True, False),
        ("0.5.9", {}, False, False),
        ("0.5.9", {"stream_output": True}, True, False),
        ("0.5.13", {}, False, False),
        ("0.5.13", {"stream_output": True}, True, True),
        ("0.5.19", {"stream_output": True}, True, True),
        ("0.5.23", {}, False, False),
        ("0.5.23", {"stream_output": True}, True, True),
        ("0.5.23", {"stream_output": True, "skip_tokenizer_init": True}, True, True),
    ],
)
def test_a_release_has_its_own_mode(profile: str, settings: dict[str, Any], deltas: bool, text_deltas: bool) -> None:
    async def test(caller: Caller) -> None:
        events, end = await stepped(caller, 4, PROMPT, rid="r", max_new_tokens=ASKED)
        assert (end, len(events) > 2) == ("done", True)
        leaked = 5 if profile == "0.5.2" and "skip_tokenizer_init" not in settings else 0
        before = 0
        for event, count in zip(events, counts(events), strict=True):
            found = event["output_ids"]
            if before == 0 and len(found) > count:
                assert found[:leaked] == PROMPT[-leaked:]
                found = found[leaked:]
            first = count - len(found) if deltas else 0
            assert found == MODEL.ids(count)[first:]
            assert before <= first or not deltas
            if profile not in {"0.5.2", "0.5.9"}:
                assert first in {0, before}
            before = count
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + [{"type": "length", "length": ASKED}]
        if "skip_tokenizer_init" in settings:
            assert not any("text" in event for event in events)
        else:
            assert [event["text"] != "" for event in events] == [True] + [not text_deltas] * (len(events) - 1)
        _, info = await caller.call("GET", "/get_server_info")
        field = "stream_output" if profile in {"0.5.2", "0.5.9"} else "incremental_streaming_output"
        assert info[field] is settings.get("stream_output", False)

    with_server(test, profile=profile, **STEPS, **settings)


@pytest.mark.parametrize(("profile", "loses"), [("0.5.2", True), ("0.5.9", True), ("0.5.13", False), ("0.5.23", False)])
def test_old_releases_lose_deltas_that_wait(profile: str, loses: bool) -> None:
    """Steps of 30 us fall due many at a time."""

    async def test(caller: Caller) -> None:
        events, end = await caller.stream(PROMPT, max_new_tokens=2000)
        assert (end, counts(events)[-1]) == ("done", 2000)
        assert (len(ids(events)) < 1000) is loses
        assert loses or ids(events) == MODEL.ids(2000)

    with_server(test, profile=profile, stream_output=True, speed=1000.0, **SLOW)


@pytest.mark.parametrize(("profile", "leaked"), [("0.5.2", PROMPT[-5:]), ("0.5.23", [])])
def test_an_answer_that_takes_no_time_is_one_event(profile: str, leaked: list[int]) -> None:
    async def test(caller: Caller) -> None:
        [event], end = await caller.stream(PROMPT, rid="r", max_new_tokens=ASKED)
        assert (end, event["output_ids"]) == ("done", leaked + MODEL.ids(ASKED))
        assert event["meta_info"]["finish_reason"] == {"type": "length", "length": ASKED}

    with_server(test, profile=profile, **INSTANT, **SLOW)


def test_an_event_has_as_many_ids_as_it_is_told_to() -> None:
    async def test(caller: Caller) -> None:
        events, _ = await stepped(caller, 8, PROMPT, max_new_tokens=ASKED)
        found = [len(event["output_ids"]) for event in events]
        # The first one waits for no others; once nobody holds the steps, more than six may be there at once.
        assert (found[:2], sum(found), min(found[1:-1], default=6) >= 6) == ([1, 6], ASKED, True)

    with_server(test, stream_output=True, stream_interval=6, **STEPS)


def test_a_latency_for_each_answer_streams_too() -> None:
    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.stream(PROMPT, max_new_tokens=ASKED))
        await until(lambda: caller.server.load().running == 1)
        ticker = caller.server.process._ticker
        assert ticker is not None
        for seconds in (100.0, 100.0, 100.0, 1000.0):  # its clock goes on by so much
            ticker._start -= seconds
            caller.server.load()
            await asyncio.sleep(2 * LOOK_SECONDS)
            await turns()
        events, end = await call
        assert (end, len(events) > 2, events[-1]["output_ids"]) == ("done", True, MODEL.ids(ASKED))

    with_server(test, latency_mean_seconds=1000.0, **SLOW)


@pytest.mark.parametrize("profile", ["0.5.2", "0.5.9", "0.5.23"])
def test_what_cannot_be_served_is_told_inside(profile: str) -> None:
    async def test(caller: Caller) -> None:
        [event], end = await caller.stream([])
        more = ERROR_TYPES if profile == "0.5.23" else {}
        assert (event, end) == ({"error": {"message": "input_ids cannot be empty.", **more}}, "done")
        [event], end = await caller.stream([5] * 2042, max_new_tokens=1)
        if profile == "0.5.2":
            assert "exceeds the maximum allowed length" in event["error"]["message"]
        else:
            reason = event["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"], counts([event])) == ("abort", 400, [1])
        if profile != "0.5.23":  # no schema gate
            assert await caller.stream(PROMPT, no_such_parameter=1) == ([], "broken")
        assert caller.server.totals.refused == (2 if profile == "0.5.23" else 3)

    with_server(test, profile=profile, context_length=2048, **INSTANT)


@pytest.mark.parametrize("profile", ["0.5.2", "0.5.9", "0.5.23"])
def test_a_full_queue_is_an_abort_or_breaks_the_stream(profile: str) -> None:
    async def test(caller: Caller) -> None:
        calls = [asyncio.create_task(caller.stream([n], **LONG)) for n in (1, 2)]
        await until(lambda: (caller.server.load().running, caller.server.load().waiting) == (1, 1))
        events, end = await caller.stream([3])
        if profile == "0.5.2":
            assert (events, end) == ([], "broken")
        else:
            assert (events[0]["meta_info"]["finish_reason"], end) == (
                {"type": "abort", "status_code": 503, "message": "The request queue is full."},
                "done",
            )
        if profile == "0.5.23":
            real = json.loads(recorded("q5")["body"].partition("\n")[0].removeprefix("data: "))
            assert events[0].keys() == real.keys()
            assert events[0]["meta_info"].keys() == real["meta_info"].keys()
            assert events[0]["meta_info"]["finish_reason"] == real["meta_info"]["finish_reason"]
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        assert [end for _, end in await asyncio.gather(*calls)] == ["done", "done"]
        assert caller.server.totals.refused == 1

    with_server(test, profile=profile, max_running_requests=1, max_queued_requests=1, **SLOW)


@pytest.mark.parametrize(
    ("profile", "stream_output", "expected"),
    [
        ("0.5.2", False, None),
        ("0.5.9", False, "last"),
        ("0.5.19", True, "last"),
        ("0.5.23", False, "all"),
        ("0.5.23", True, "last"),
    ],
)
def test_an_abort_in_the_queue_is_irregular(profile: str, stream_output: bool, expected: str | None) -> None:
    """Of a request that was retracted into the queue, so that it has ids already."""

    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.stream(PROMPT, rid="r", **LONG))
        await until(lambda: caller.server.load().used_tokens >= 13)
        ticker = caller.server.process._ticker
        assert ticker is not None
        ticker.hold("test", retract=True)
        await until(lambda: caller.server.load().waiting == 1)
        await caller.call("POST", "/abort_request", json={"rid": "r"})
        events, end = await call
        last = events[-1]
        assert (end, last["meta_info"]["finish_reason"]["message"]) == ("done", "Abort in waiting queue")
        generated = MODEL.ids(counts(events[:-1])[-1])
        if expected is None:
            assert last.keys() == {"text", "meta_info"}
        else:
            assert counts([last]) == [len(generated)]
            assert last["output_ids"] == (generated if expected == "all" else generated[-1:])

    with_server(test, profile=profile, stream_output=stream_output, speed=50.0, **SLOW)


@pytest.mark.parametrize(
    ("profile", "ends"), [("0.5.2", "aborted"), ("0.5.13", "aborted"), ("0.5.19", "finished"), ("0.5.23", "aborted")]
)
def test_a_caller_that_leaves_is_noticed_or_leaves_a_ghost(profile: str, ends: str) -> None:
    async def test(caller: Caller) -> None:
        steps = Steps(caller)
        call = asyncio.create_task(caller.stream(PROMPT, rid="r", max_new_tokens=20_000))
        await until(lambda: caller.server.load().waiting == 1)
        for _ in range(5):
            await steps.one()
        call.cancel()
        if ends == "finished":
            steps.go_on()
        await until(lambda: caller.server.process.in_flight == 0)
        totals = caller.server.totals
        assert (totals.finished, totals.aborted) == ((1, 0) if ends == "finished" else (0, 1))

    with_server(test, profile=profile, speed=500.0, **SLOW)


def test_a_ghost_is_forgotten_by_its_rid() -> None:
    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.stream(PROMPT, rid="r", **LONG))
        await until(lambda: caller.server.load().used_tokens >= 13)
        call.cancel()
        await until(lambda: not caller.server.process._runner.rids)
        assert caller.server.load().running == 1
        assert (await caller.generate([5], rid="r", max_new_tokens=1))[0] == 200

    with_server(test, profile="0.5.19", speed=10.0, **SLOW)


def test_a_retraction_in_the_middle_changes_no_id() -> None:
    async def test(caller: Caller) -> None:
        steps = Steps(caller)
        call = asyncio.create_task(caller.stream(PROMPT, max_new_tokens=300))
        await until(lambda: caller.server.load().waiting == 1)
        for _ in range(5):
            await steps.one()
        await caller.call("POST", "/pause_generation", json={"mode": "retract"})
        await caller.call("POST", "/continue_generation", json={})
        steps.go_on()
        events, end = await call
        assert (end, events[-1]["meta_info"]["num_retractions"]) == ("done", 1)
        assert ids(events) == MODEL.ids(300)

    with_server(test, stream_output=True, **STEPS)


@pytest.mark.parametrize("how", ["told", "an id", "fault"])
def test_a_stream_ends_without_a_word_when_the_server_dies(how: str) -> None:
    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.stream(PROMPT, **LONG))
        await until(lambda: caller.server.load().used_tokens >= 13)
        deadly = None
        if how == "told":
            caller.server.die("the test wants it")
        else:
            if how == "fault":
                await caller.call("POST", "/_sim/faults", json={"die": {}})
            deadly = asyncio.create_task(caller.stream([5, 1024] if how == "an id" else [5]))
        events, end = await running
        assert (end, events[-1]["meta_info"]["finish_reason"]) == ("broken", None)
        assert deadly is None or await deadly == ([], "broken")

    with_server(test, **STEPS)


async def struck(caller: Caller, name: str) -> tuple[Events, str]:
    await caller.call("POST", "/_sim/faults", json={name: {"next": 1}})
    some = 0 if caller.server.config.instant else 4
    found = await stepped(caller, some, PROMPT, rid="0123456789", max_new_tokens=ASKED)
    assert (await caller.stream(PROMPT, max_new_tokens=2))[1] == "done"
    await until(lambda: caller.server.process.in_flight == 0)  # of one that broke off the rid is in use until its abort
    return found


@pytest.mark.parametrize("speed", [0.0, 10.0])
def test_the_lies_about_an_answer_are_in_its_events(speed: float) -> None:
    well = MODEL.ids(ASKED)
    nan = {"type": "stop", "matched": "NaN happened"}
    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    expected: dict[str, tuple[list[int] | None, str, object]] = {
        "nan": ([*well[:20], 2], "finish_reason", nan),
        "abort": (well[:20], "finish_reason", aborted),
        "wrong_rid": (well, "id", "98765432100"),
        "weight_version": (well, "weight_version", "default-changed"),
        "no_output_ids": (None, "completion_tokens", ASKED),
        "prompt_leak": ([*PROMPT[-5:], *well], "completion_tokens", ASKED),
        "lost_id": ([*well[:20], *well[21:]], "completion_tokens", ASKED),
        "bad_output_id": ([1024, *well[1:]], "completion_tokens", ASKED),
        "clipped": (well[:20], "finish_reason", {"type": "length", "length": 20}),
        "truncated_prompt": (MODEL_OF_HALF.ids(ASKED), "prompt_tokens", 4),
    }

    async def test(caller: Caller) -> None:
        for name, (output_ids, field, value) in expected.items():
            events, end = await struck(caller, name)
            assert (end, events[-1]["meta_info"][field]) == ("done", value), name
            if output_ids is None:
                assert not any("output_ids" in event for event in events)
            else:
                assert ids(events) == output_ids, name

    with_server(test, speed=speed, stream_output=True, **SLOW)


@pytest.mark.parametrize("speed", [0.0, 10.0])
def test_a_stream_can_end_too_early_in_three_ways(speed: float) -> None:
    async def test(caller: Caller) -> None:
        for name, ending, most in (
            ("garbled", "early", 19),
            ("cut", "broken", 19),
            ("late_reset", "broken", ASKED - 1),
        ):
            events, end = await struck(caller, name)
            assert (name, end, bool(events)) == (name, ending, speed > 0)
            assert all(event["meta_info"]["finish_reason"] is None for event in events)
            assert max(counts(events), default=0) <= most

    with_server(test, speed=speed, **SLOW)


def test_what_comes_in_place_of_a_stream() -> None:
    async def test(caller: Caller) -> None:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 3}}
        for name, status, kind in (
            ("status", 503, "application/json"),
            ("html", 200, "text/html"),
            ("wrong_type", 200, "text/html"),
        ):
            await caller.call("POST", "/_sim/faults", json={name: {"next": 1}})
            async with caller.session.post(caller.server.url + "/generate", json=body) as response:
                assert (response.status, response.content_type) == (status, kind)

    with_server(test, **INSTANT)
