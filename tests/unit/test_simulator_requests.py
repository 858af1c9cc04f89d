"""What the simulated server refuses, in the words and shapes that the real one was recorded with."""

import json
import math
from typing import Any

import msgspec
import pytest

from tests.conftest import SHARED
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.requests import DeadlyRequestError, Refusal, RequestReader

CAPTURES = SHARED / "data" / "sglang_captures" / "sglang_0.5.23.jsonl"

# Recorded exchanges whose refusal must be equal word for word.
SAME_BODY = (
    "empty_input_ids",
    "no_input",
    "too_long",
    "len_eq_ctx",
    "len_ctx_minus1_mnt2",
    "len_plus_mnt_over_ctx",
    "max_new_tokens_neg",
    "bad_temp",
    "bad_top_p",
    "unknown_sp_field",
    "bool_ids",
    "pool_700",
    "pool_600",
)
# And those that must be equal in status and keys; their messages quote the real server's source and paths.
SAME_SHAPE = ("malformed_json", "body_list", "ids_strings", "ids_floats", "ids_is_str", "big_int_id", "mnt_string")
SERVED = ("unknown_top_field", "text_and_ids", "stop_token_oov", "sp_null", "max_new_tokens_0", "pool_595", "rid")


def reader(**settings: Any) -> RequestReader:
    defaults = {"vocab_size": 1024, "context_length": 2048, "max_total_tokens": 4096}
    return RequestReader(SimulatorConfig(**{**defaults, **settings}))


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"input_ids": [10, 20, 30], **fields})


def refusal(raw: bytes, **settings: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        reader(**settings).read(raw)
    return caught.value


def recorded(name: str) -> dict[str, Any]:
    if not CAPTURES.exists():
        pytest.skip(f"the recorded exchanges are not at {CAPTURES}")
    with CAPTURES.open() as lines:
        exchanges = [json.loads(line) for line in lines]
    return next(one for one in exchanges if one["name"] == name and one.get("status"))


def settings_of(name: str) -> dict[str, Any]:
    """The server was started with a pool of 600 tokens for these."""
    return {"max_total_tokens": 600} if name.startswith("pool") else {}


@pytest.mark.parametrize("name", SAME_BODY)
def test_a_refusal_is_the_recorded_one_word_for_word(name: str) -> None:
    exchange = recorded(name)
    found = refusal(exchange["request"].encode(), **settings_of(name))
    assert (found.status, found.body) == (exchange["status"], json.loads(exchange["body"]))


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_a_refusal_has_the_recorded_status_and_shape(name: str) -> None:
    exchange = recorded(name)
    found = refusal(exchange["request"].encode())
    expected = json.loads(exchange["body"])
    assert found.status == exchange["status"]
    assert found.body.keys() == expected.keys()
    assert type(found.body.get("error")) is type(expected.get("error"))
    assert found.body.get("type") == expected.get("type")
    message = str(expected.get("message", ""))
    assert message.partition("'msg': ")[2].partition("'input'")[0].rstrip(", ") in str(found.body.get("message", ""))


@pytest.mark.parametrize("name", SERVED)
def test_what_the_real_server_serves_is_served(name: str) -> None:
    exchange = recorded(name)
    asked = reader(**settings_of(name)).read(exchange["request"].encode())
    assert list(asked.input_ids) == json.loads(exchange["request"])["input_ids"]


def test_the_pool_clamps_silently() -> None:
    exchange = recorded("pool_300_500")
    asked = reader(**settings_of("pool")).read(exchange["request"].encode())
    assert asked.max_new_tokens == len(json.loads(exchange["body"])["output_ids"]) == 298


def test_the_three_shapes() -> None:
    assert refusal(body(input_ids=[])).body == {"error": {"message": "input_ids cannot be empty."}}
    assert isinstance(refusal(body(sampling_params={"foo": 1})).body["error"], str)
    malformed = refusal(b'{"input_ids": [1,2').body
    assert (malformed["object"], malformed["type"], malformed["code"]) == ("error", "Bad Request", 400)


@pytest.mark.parametrize("tokens", [[5, 1024], [5, -1], [1 << 40]])
def test_an_id_outside_the_vocabulary_is_not_a_refusal(tokens: list[int]) -> None:
    with pytest.raises(DeadlyRequestError):
        reader().read(body(input_ids=tokens))


def test_max_new_tokens_is_128_if_left_out_and_all_the_room_if_null() -> None:
    assert reader().read(body()).max_new_tokens == 128
    assert reader().read(body(sampling_params={"max_new_tokens": None})).max_new_tokens == 2048 - 1 - 3 - 1
    nearly_full = body(input_ids=[1] * 2000)
    assert reader().read(nearly_full).max_new_tokens == 2048 - 1 - 2000 - 1


def test_what_is_asked_for_is_read() -> None:
    params = {"max_new_tokens": 7, "ignore_eos": True, "stop_token_ids": [4], "logit_bias": {"2": 100}, "top_k": -1}
    asked = reader().read(body(rid="mine", stream=False, unknown=[1], sampling_params=params))
    assert (asked.rid, asked.input_ids, asked.max_new_tokens) == ("mine", (10, 20, 30), 7)
    assert (asked.ignore_eos, asked.stop_token_ids) == (True, (4,))
    assert (asked.stream, asked.stream_interval) == (False, None)
    streamed = reader().read(body(stream=True, sampling_params={"stream_interval": 5}))
    assert (streamed.stream, streamed.stream_interval) == (True, 5)


@pytest.mark.parametrize(
    ("fields", "in_stream"),
    [
        ({"input_ids": []}, True),
        ({"input_ids": [1] * 2048}, True),
        ({"sampling_params": {"temperature": -1}}, True),
        ({"sampling_params": {"no_such_parameter": 1}}, False),
        ({"sampling_params": {"temperature": "hot"}}, False),
        ({"rid": 5}, False),
        ({"stream": "yes"}, False),
        ({"stream": None}, False),
    ],
)
def test_what_the_schema_refuses_is_refused_before_a_stream_begins(fields: dict[str, Any], in_stream: bool) -> None:
    assert refusal(body(**{"stream": True, **fields})).in_stream is in_stream


@pytest.mark.parametrize(("tokens", "by_scheduler"), [(2048, False), (2042, True), (2041, False)])
def test_a_prompt_that_is_a_little_too_long_is_only_found_by_the_scheduler(tokens: int, by_scheduler: bool) -> None:
    raw = body(input_ids=[1] * tokens, sampling_params={"max_new_tokens": 1})
    if tokens == 2041:
        assert reader().read(raw).max_new_tokens == 1
    else:
        assert refusal(raw).by_scheduler is by_scheduler


def test_a_rid_is_made_if_none_is_given() -> None:
    assert len({reader().read(body()).rid for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (body(input_ids=[[1, 2], [3]]), "one prompt"),
        (body(sampling_params=[{"max_new_tokens": 1}]), "one prompt"),
        (body(sampling_params={"n": 2}), "n"),
    ],
)
def test_what_the_simulator_cannot_do_yet_is_refused_by_name(raw: bytes, named: str) -> None:
    found = refusal(raw)
    assert found.status == 400
    assert named in found.body["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"input_ids":[null]}',
        b'{"input_ids":0}',
        b'{"input_ids":[1],"rid":5}',
        b'{"input_ids":[1],"sampling_params":5}',
        b'{"input_ids":[1],"sampling_params":{"temperature":"hot"}}',
        b'{"input_ids":[1],"sampling_params":{"stop_token_ids":["a"]}}',
    ],
)
def test_nonsense_is_a_400_and_nothing_else(raw: bytes) -> None:
    assert refusal(raw).status == 400


@pytest.mark.parametrize("temperature", [-0.5, -math.inf])
def test_a_temperature_below_zero_is_refused(temperature: float) -> None:
    raw = body(sampling_params={"temperature": max(temperature, -1e308)})
    assert "temperature" in refusal(raw).body["error"]["message"]
