"""What a real SGLang 0.5.23 answered, as recorded: each answer accepted or refused as it should be."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.conftest import SHARED
from workers.sglang.answer import Acceptance, BadAnswer, refusal

CAPTURES = SHARED / "data" / "sglang_captures" / "sglang_0.5.23.jsonl"
pytestmark = pytest.mark.skipif(not CAPTURES.exists(), reason=f"the recorded exchanges ({CAPTURES.name}) are not here")

OVER_CONTEXT = {
    "too_long",
    "len_eq_ctx",
    "len_ctx_minus1_mnt2",
    "len_plus_mnt_over_ctx",
    "pool_600",
    "pool_700",
    "batch_one_bad",
}
OTHER_REFUSALS = {
    "unknown_sp_field": "bad_parameters",
    "mnt_string": "bad_parameters",
    "bool_ids": "bad_parameters",
    "dup_b": "duplicate_rid",
    "batch_rid_dup": "duplicate_rid",
    "noauth": "unauthorized",
    "get_generate": "not_sglang",
    "q2": "queue_full",
    "q6": "queue_full",
    "q10": "queue_full",
}


def generate_calls() -> list[dict[str, Any]]:
    lines = CAPTURES.read_text(encoding="utf-8").splitlines()
    exchanges = [json.loads(line) for line in lines if line.strip()]
    return [exchange for exchange in exchanges if exchange["path"] == "/generate" and exchange.get("status")]


def asked(exchange: dict[str, Any]) -> int:
    params = json.loads(exchange["request"]).get("sampling_params", {})
    return int(params.get("max_new_tokens", 128)) if isinstance(params, dict) else 128


def verdict(exchange: dict[str, Any]) -> str:
    """How an accepted answer ended, or the reason of the refusal, for the client that sent the request."""
    body = exchange["body"].encode()
    if exchange["status"] != 200:
        return refusal(exchange["status"], body).reason
    request = json.loads(exchange["request"])
    meta = json.loads(body)["meta_info"] if body.startswith(b"{") else {}
    acceptance = Acceptance(1024, meta.get("weight_version"))
    try:
        answer = acceptance.check(
            body,
            rid=request.get("rid") or meta.get("id", ""),
            prompt_tokens=len(request["input_ids"]) if "input_ids" in request else meta["prompt_tokens"],
            max_new_tokens=asked(exchange),
        )
    except BadAnswer as bad:
        return bad.reason
    assert answer.output_ids == json.loads(body)["output_ids"]
    return "clipped" if "clipped" in answer.flags else answer.finish_reason


def expected(exchange: dict[str, Any]) -> str:
    """The same, from what the recording is known to hold."""
    name, body = exchange["name"], exchange["body"]
    if exchange["status"] != 200:
        return "over_context" if name in OVER_CONTEXT else OTHER_REFUSALS.get(name, "bad_request")
    if body.startswith("data:"):
        return "not_json"  # a stream, which this client does not ask for
    if body.startswith("["):
        return "not_an_answer"  # a batch, likewise
    meta = json.loads(body)["meta_info"]
    kind: str = meta["finish_reason"]["type"]
    if kind == "abort":
        return "aborted"
    if meta["completion_tokens"] == 0:
        return "empty_answer"
    return "clipped" if kind == "length" and meta["completion_tokens"] < asked(exchange) else kind


def test_every_recorded_answer_is_judged_as_it_should_be() -> None:
    calls = generate_calls()
    judged = [(call["name"], verdict(call)) for call in calls]
    assert judged == [(call["name"], expected(call)) for call in calls]
    counts = Counter(found for _, found in judged)
    assert counts["length"] > 80
    assert counts["stop"] >= 5
    assert counts["aborted"] >= 10
    assert counts["clipped"] >= 1


@pytest.mark.parametrize("cut", [1, 100, 400])
def test_a_recorded_answer_that_is_torn_off_is_not_json(cut: int) -> None:
    call = next(call for call in generate_calls() if call["name"] == "basic")
    assert verdict(call) == "length"
    with pytest.raises(BadAnswer, match="not_json"):
        Acceptance(1024, None).check(call["body"].encode()[:-cut], rid="", prompt_tokens=5, max_new_tokens=4)


def test_a_recorded_answer_with_a_changed_id_in_it_is_out_of_range() -> None:
    call = next(call for call in generate_calls() if call["name"] == "basic")
    rid = json.loads(call["body"])["meta_info"]["id"]
    with pytest.raises(BadAnswer, match="token_out_of_range"):
        Acceptance(864, "default").check(call["body"].encode(), rid=rid, prompt_tokens=5, max_new_tokens=4)
