"""Each condition of a good answer, each shape of a refusal, and that every reason in the table is reached."""

from typing import Any

import msgspec
import pytest

from workers.sglang.answer import REASONS, Acceptance, Answer, BadAnswer, Outcome, Says, refusal

RID = "0123456789abcdef0123456789abcdef"
VOCAB_SIZE = 1024
# Made by the client, and tested with it.
REASONS_OF_THE_CLIENT = {
    "answer_too_large",
    "unreachable",
    "connection_lost",
    "timeout",
    "stalled",
    "kills_server",
    "no_fit_server",
    "draining",
}


def body(output_ids: Any = (63, 413, 478, 864), **meta: Any) -> bytes:
    """A good answer of 0.5.23, changed where a test says so; a value of ... leaves the field out."""
    whole = {
        "id": RID,
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "weight_version": "default",
        "num_retractions": 2,
        "completion_tokens": len(output_ids) if isinstance(output_ids, (list, tuple)) else 0,
        "cached_tokens": 3,
        "dp_rank": None,
        "e2e_latency": 0.04,
        "weight_versions": [{"version": "default", "start": 0, "end": 4}],
    } | meta
    answer: dict[str, Any] = {"text": "\\lyite L", "output_ids": output_ids}
    answer["meta_info"] = {name: value for name, value in whole.items() if value is not ...}
    return msgspec.json.encode({name: value for name, value in answer.items() if value is not ...})


def check(raw: bytes, *, weight_version: str | None = "default", max_new_tokens: int = 4) -> Answer:
    acceptance = Acceptance(VOCAB_SIZE, weight_version)
    return acceptance.check(raw, rid=RID, prompt_tokens=5, max_new_tokens=max_new_tokens)


STOP = {"type": "stop", "matched": 864}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

BODIES: list[tuple[str, bytes]] = [
    ("not_json", b""),
    ("not_json", b"<html><body>Welcome</body></html>"),
    ("not_json", body()[:-1]),
    ("not_json", b'data: {"text":"x"}\n\ndata: [DONE]\n\n'),
    ("not_json", body() + b"{"),
    ("not_json", b'{"text":' + b"[" * 100_000),
    ("not_json", body(id="\0").replace(b"\\u0000", b"\xff")),
    ("not_an_answer", b"[" + body() + b"]"),
    ("not_an_answer", b"null"),
    ("not_an_answer", b'{"error":{"message":"no"}}'),
    ("not_an_answer", body(["63"])),
    ("not_an_answer", body([1.5])),
    ("not_an_answer", body([True])),
    ("not_an_answer", body(id=...)),
    ("wrong_rid", body(id=RID[:-1])),
    ("aborted", body(finish_reason=ABORT)),
    # Aborted while it waited: no prompt_tokens, and in some releases no output_ids.
    ("aborted", body([], finish_reason=ABORT, prompt_tokens=..., cached_tokens=...)),
    ("aborted", body(..., finish_reason=ABORT, completion_tokens=...)),
    ("unfinished", body(finish_reason=None)),
    ("unfinished", body(finish_reason=...)),
    ("unfinished", body(finish_reason={"type": "tool_calls"})),
    ("nan", body(finish_reason={"type": "stop", "matched": "NaN happened"})),
    ("weight_version_changed", body(weight_version="v2")),
    ("weight_version_changed", body(weight_version=...)),
    ("prompt_mismatch", body(prompt_tokens=4)),
    ("prompt_mismatch", body(prompt_tokens=...)),
    ("no_output_ids", body(...)),
    ("no_output_ids", body(None)),
    ("length_mismatch", body([1, 2, 3, 4, 5, 63, 413, 478, 864], completion_tokens=4)),  # 0.5.1 to 0.5.4
    ("length_mismatch", body([63, 413, 478], completion_tokens=4)),
    ("length_mismatch", body(completion_tokens=...)),
    ("longer_than_asked", body([63, 413, 478, 864, 7])),
    ("empty_answer", body([], finish_reason={"type": "length", "length": 0})),
    ("stop_mismatch", body([63, 413, 864, 478], finish_reason=STOP)),
    ("token_out_of_range", body([63, VOCAB_SIZE, 478, 864])),
    ("token_out_of_range", body([63, -1, 478, 864])),
    ("token_out_of_range", body([63, 2**70, 478, 864])),
]


@pytest.mark.parametrize(("reason", "raw"), BODIES, ids=[f"{n}-{reason}" for n, (reason, _) in enumerate(BODIES)])
def test_a_bad_body_is_refused_by_name(reason: str, raw: bytes) -> None:
    with pytest.raises(BadAnswer) as caught:
        check(raw)
    assert (caught.value.reason, caught.value.outcome) == (reason, REASONS[reason].outcome)


def test_a_good_answer_is_accepted_whole() -> None:
    assert check(body()) == Answer(
        output_ids=[63, 413, 478, 864],
        finish_reason="length",
        prompt_tokens=5,
        completion_tokens=4,
        cached_tokens=3,
        weight_version="default",
        num_retractions=2,
        flags=("truncated",),
    )


def test_the_stop_token_stays_the_last_id() -> None:
    answer = check(body(finish_reason=STOP))
    assert (answer.output_ids[-1], answer.finish_reason, answer.flags) == (864, "stop", ())


def test_a_matched_stop_string_is_not_compared_with_an_id() -> None:
    assert check(body(finish_reason={"type": "stop", "matched": "pos"})).finish_reason == "stop"


def test_the_lowest_and_highest_ids_are_in_range() -> None:
    assert check(body([0, 1, 2, VOCAB_SIZE - 1])).output_ids == [0, 1, 2, VOCAB_SIZE - 1]


@pytest.mark.parametrize("length", [4, 500])
def test_a_length_below_the_one_asked_for_is_flagged(length: int) -> None:
    answer = check(body(finish_reason={"type": "length", "length": length}), max_new_tokens=500)
    assert answer.flags == ("truncated", "clipped")


def test_an_older_release_is_read_under_its_own_names() -> None:
    answer = check(
        body(num_retractions=..., total_retractions=7, weight_version=..., cached_tokens=None), weight_version=None
    )
    assert (answer.num_retractions, answer.weight_version, answer.cached_tokens) == (7, None, 0)


def test_without_a_weight_version_at_the_start_none_is_checked() -> None:
    assert check(body(weight_version="v2"), weight_version=None).weight_version == "v2"


OBJECT = b'{"object":"error","message":"%b","type":"503","param":null,"code":503}'
REFUSALS: list[tuple[str, int, bytes]] = [
    (
        "over_context",
        400,
        b'{"error":{"message":"The input (2100 tokens) is longer than the model\'s context length"}}',
    ),
    (
        "over_context",
        400,
        b'{"error":{"message":"Input length (700 tokens) exceeds the maximum allowed length (594)"}}',
    ),
    ("bad_request", 400, b'{"error":{"message":"temperature must be a non-negative finite number, got -1."}}'),
    ("bad_request", 400, b'{"object":"error","message":"1 validation error","type":"Bad Request","code":400}'),
    ("bad_request", 400, b"Bad Request"),
    ("bad_request", 413, b"<html><h1>413 Request Entity Too Large</h1></html>"),
    ("bad_request", 422, b"Failed to deserialize the JSON body"),
    ("bad_parameters", 400, b'{"error":"unknown field `foo`, expected one of `max_new_tokens`"}'),
    ("duplicate_rid", 400, b'{"error":{"message":"Duplicate request ID detected: dup"}}'),
    ("disconnected", 400, b'{"error":{"message":"Request is disconnected from the client side (type 1)."}}'),
    ("unauthorized", 401, b'{"error":"Unauthorized"}'),
    ("unauthorized", 403, b'{"error":"Forbidden"}'),
    ("unauthorized", 407, b""),
    ("not_sglang", 404, b'{"detail":"Not Found"}'),
    ("not_sglang", 405, b'{"detail":"Method Not Allowed"}'),
    ("not_sglang", 302, b""),
    ("not_sglang", 204, b""),
    ("request_timeout", 408, b""),
    ("rate_limited", 429, b'{"error":{"message":"slow down"}}'),
    ("queue_full", 503, OBJECT % b"The request queue is full."),
    ("server_away", 503, b"<html><h1>503 Service Temporarily Unavailable</h1></html>"),
    ("server_away", 503, b""),
    ("server_away", 503, b'{"error":{"type":"Service Unavailable","message":"No available workers"}}'),
    ("bad_gateway", 502, b"<html><h1>502 Bad Gateway</h1></html>"),
    ("gateway_timeout", 504, b"<html><h1>504 Gateway Time-out</h1></html>"),
    ("server_error", 500, b"Internal Server Error"),
    ("server_error", 503, OBJECT % b"Request waiting timeout reached."),
    ("server_error", 599, b'{"error":'),
]


@pytest.mark.parametrize(("reason", "status", "raw"), REFUSALS)
def test_a_refusal_is_named_from_its_status_and_body(reason: str, status: int, raw: bytes) -> None:
    bad = refusal(status, raw)
    assert (bad.reason, bad.outcome) == (reason, REASONS[reason].outcome)
    assert str(status) in bad.detail


@pytest.mark.parametrize(
    "raw",
    [
        b'{"error":{"message":"why it failed"}}',
        b'{"error":"why it failed"}',
        b'{"object":"error","message":"why it failed","code":400}',
        b'{"detail":"why it failed"}',
        b"why it failed",
    ],
)
def test_a_refusal_tells_the_servers_own_words(raw: bytes) -> None:
    assert refusal(400, raw).detail == "the server answered 400: why it failed"


def test_a_detail_is_one_short_printable_line() -> None:
    detail = refusal(500, b"line one\nline\x1b[31m two \xff" + b"x" * 100_000).detail
    assert len(detail) < 400
    assert detail.isprintable()


def test_the_outcomes_that_the_run_depends_on() -> None:
    by_outcome = {outcome: {one for one, rule in REASONS.items() if rule.outcome is outcome} for outcome in Outcome}
    assert by_outcome[Outcome.REJECT] == {
        "prompt_mismatch",
        "empty_answer",
        "over_context",
        "bad_request",
        "kills_server",
    }
    assert by_outcome[Outcome.HALT_DATASET] == {"bad_parameters"}
    halting = {"no_output_ids", "weight_version_changed", "unauthorized", "not_sglang"}
    assert by_outcome[Outcome.HALT_RUN] == halting | {"no_fit_server"}
    # What halts the run says that the server is not one for it: with several, it is left out first.
    assert {one for one, rule in REASONS.items() if rule.says is Says.UNFIT} == halting


def test_every_reason_has_a_case() -> None:
    cases = {reason for reason, *_ in BODIES} | {reason for reason, *_ in REFUSALS} | REASONS_OF_THE_CLIENT
    assert cases == set(REASONS)
