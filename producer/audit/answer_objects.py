"""Answers as servers give them: OpenAI's chat and text completions, batch output, responses; SGLang's /generate.

And what a line of the input of the batch API asks.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from producer.datasets.reasons import BadRow

_OK = range(200, 300)
_MOST = 2**32 - 1  # no answer has more tokens
# What a row says of its lengths, as we name it: the names that others give it.
_CLAIMS = {
    "completion_tokens": ("completion_tokens", "output_tokens", "generated_tokens", "num_output_tokens"),
    "prompt_tokens": ("prompt_tokens", "num_prompt_tokens"),
}
CLAIMING = frozenset({"usage", *(name for names in _CLAIMS.values() for name in names)})


class Found(msgspec.Struct):
    """`messages` are those of all choices; `claims` as claims_of gives them; `error` why there is none."""

    layout: str
    messages: list[Mapping[str, Any]] = []
    finish_reason: str | None = None
    claims: Mapping[str, int] = {}
    error: str = ""
    output_ids: list[int] | None = None


def objects_in(row: Mapping[str, Any]) -> Found | None:
    """The answer object that `row` is, or holds as `response` or `body`; None if there is none. Raises BadRow."""
    given = row.get("response")
    if isinstance(given, dict):
        return _batch(given) if "body" in given else _object_in(given, "")
    if "custom_id" in row and row.get("error") and not isinstance(row.get("choices"), list):
        return Found("openai batch", error=_short(_message(row)))
    return _object_in(row, "")


def _batch(response: Mapping[str, Any]) -> Found:
    """A line of the output of the batch API."""
    body, status = response["body"], response.get("status_code")
    if isinstance(status, int) and status not in _OK:
        return Found("openai batch", error=f"status {status}: {_short(_message(body))}")
    found = _object_in(body, "openai batch") if isinstance(body, dict) else None
    return found or Found("openai batch", error="no choices in the body")


def _object_in(body: Mapping[str, Any], layout: str) -> Found | None:
    if str(body.get("object")).endswith(".chunk"):
        raise BadRow("no_prompt", "the row is a piece of a streamed answer; join the pieces first")
    if isinstance(body.get("choices"), list):
        return _choices(body, layout or "openai")
    if isinstance(body.get("meta_info"), dict) and ("text" in body or "output_ids" in body):
        return _generated(body)
    if isinstance(body.get("output"), list) and body.get("object") == "response":
        return _response(body, layout or "openai response")
    return None


def asked_in(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a line of the input of the batch API, as columns of a row: of completions and of responses."""
    body = request.get("body")
    given = body if isinstance(body, dict) else {}
    asked = {name: given[name] for name in ("messages", "prompt", "tools") if given.get(name)}
    if given.get("input"):
        asked["messages" if isinstance(given["input"], list) else "prompt"] = given["input"]
    return asked


def claims_of(row: Mapping[str, Any]) -> dict[str, int]:
    """The lengths that `row` or its `usage` states: completion_tokens, prompt_tokens, reasoning_tokens."""
    claims: dict[str, int] = {}
    if CLAIMING.isdisjoint(row):
        return claims
    given = row.get("usage")
    usage = given if isinstance(given, dict) else {}
    for ours, names in _CLAIMS.items():
        stated = next((place[name] for place in (usage, row) for name in names if name in place), None)
        if type(stated) is int and 0 <= stated <= _MOST:
            claims[ours] = stated
    if type(usage.get("input_tokens")) is int:
        claims.setdefault("prompt_tokens", usage["input_tokens"])
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or usage
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    if type(reasoning) is int and reasoning <= _MOST:
        claims["reasoning_tokens"] = reasoning
    return claims


def _choices(body: Mapping[str, Any], layout: str) -> Found:
    choices = [one for one in body["choices"] if isinstance(one, dict)]
    messages = [one["message"] if isinstance(one.get("message"), dict) else one for one in choices]
    reasons = [one.get("finish_reason") for one in choices]
    reason = "length" if "length" in reasons else next((one for one in reasons if isinstance(one, str)), None)
    error = "" if choices else "choices is empty"
    return Found(layout, messages, reason, claims_of(body), error)


def _generated(body: Mapping[str, Any]) -> Found:
    meta = body["meta_info"]
    reason = meta.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason
    ids = body.get("output_ids")
    return Found(
        "sglang",
        [{"content": body.get("text") or ""}],
        reason if isinstance(reason, str) else None,
        claims_of(meta),
        output_ids=ids if isinstance(ids, list) and all(type(one) is int for one in ids) else None,
    )


def _response(body: Mapping[str, Any], layout: str) -> Found:
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for item in body["output"]:
        if not isinstance(item, dict):
            continue
        texts = _texts(item.get("content"))
        if item.get("type") == "reasoning":
            message["reasoning"] = texts + _texts(item.get("summary"))
        elif item.get("type") == "message":
            message["content"] += texts
        elif item.get("type") == "function_call":
            message["tool_calls"].append(item)
    reason = "length" if body.get("status") == "incomplete" else "stop"
    return Found(layout, [message], reason, claims_of(body))


def _texts(parts: Any) -> str:
    found = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in found if isinstance(text, str))


def _message(body: Any) -> Any:
    error = body.get("error") if isinstance(body, dict) else body
    return error.get("message", error) if isinstance(error, dict) else error


def _short(value: Any) -> str:
    return (value if isinstance(value, str) else repr(value))[:200]
