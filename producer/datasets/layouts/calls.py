"""Tool calls and their results in earlier turns: read in every form, given ids where they have none, and linked."""

from collections.abc import Sequence
from typing import Any

import msgspec

from producer.datasets.reasons import NOT_JSON, BadRow, quoted

Message = dict[str, Any]
Call = dict[str, Any]


def read_calls(value: Any) -> list[Call]:
    """Tool calls as OpenAI's; from a list or one, from texts, with or without `function`, `type` and `id`.

    Arguments stay as they are, a text or an object: what a model wrote is not written anew. Raises BadRow.
    """
    if isinstance(value, str):
        value = _decoded(value)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow("bad_tools", f"tool calls are {quoted(value)}, not a list of objects")
    return [_call(one) for one in value]


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text.strip() else []
    except NOT_JSON:
        pass
    try:
        return msgspec.json.decode(_requoted(text))
    except NOT_JSON:
        raise BadRow("bad_tools", f"a tool call is a text that is not JSON: {quoted(text)}") from None


def _requoted(text: str) -> str:
    """The text with its arguments as a JSON string: glaive puts them, which are JSON, into single quotes.

    No regular expression: that would try every quote of a long text as the last one.
    """
    before, key, after = text.partition('"arguments"')
    body = after.strip().removeprefix(":").lstrip().removesuffix("}").rstrip()
    if len(body) < 2 or body[0] != "'" or body[-1] != "'":
        return text
    arguments = body[1:-1].replace("\\'", "'")
    msgspec.json.decode(arguments)  # what is in the quotes must be JSON, or the quotes are not the damage
    return f"{before}{key}: {msgspec.json.encode(arguments).decode()}}}"


def _call(value: Any) -> Call:
    if isinstance(value, str):
        value = _decoded(value)
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else function
    if not isinstance(name, str) or not name.strip():
        raise BadRow("bad_tools", "a tool call has no name")
    source = function if isinstance(function, dict) else value
    arguments = next((source[key] for key in ("arguments", "parameters", "input") if source.get(key) is not None), None)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    if not isinstance(arguments, str | dict):
        raise BadRow("bad_tools", f"the arguments of a call of {quoted(name)} are {quoted(arguments)}")
    made: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    given = _id(value.get("id"))
    return {"id": given, **made} if given else made


def _id(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value.strip() else ""


def result_id(turn: Message) -> str:
    """The id of the call that a tool turn answers, as it says itself, or an empty text. SWE-agent gives a list."""
    ids = turn.get("tool_call_ids")
    return _id(turn.get("tool_call_id")) or (_id(ids[0]) if isinstance(ids, list) and ids else "")


class _Open:
    """Calls that no result has answered yet, in order; any number of them is looked up as fast as one."""

    def __init__(self) -> None:
        self._all: dict[str, Call] = {}
        self._by_name: dict[str, dict[str, Call]] = {}

    def add(self, call: Call) -> None:
        self._all[call["id"]] = call
        self._by_name.setdefault(call["function"]["name"], {})[call["id"]] = call

    def oldest(self, name: Any) -> Call | None:
        """The oldest with this name, else the oldest."""
        named = self._by_name.get(name) if isinstance(name, str) else None
        return next(iter((named or self._all).values()), None)

    def close(self, made: str) -> None:
        call = self._all.pop(made, None)
        if call is not None:
            self._by_name[call["function"]["name"]].pop(made, None)


def link(messages: Sequence[Message]) -> None:
    """Give an id to every call and result that has none, in place; Kimi's template prints both.

    An id is `functions.NAME:N`, as Kimi writes its own, where N counts the calls of the conversation. A result without
    an id answers the oldest call still open that has its name, else the oldest. A result that names an id which no
    call has answers, likewise, a call that had none, which takes that id.
    """
    named = {call["id"] for turn in messages for call in turn.get("tool_calls", ()) if "id" in call}
    ids = _Ids(named | {turn["tool_call_id"] for turn in messages if "tool_call_id" in turn})
    waiting, unnamed = _Open(), _Open()  # all, and those with an id made here
    for turn in messages:
        for call in turn.get("tool_calls", ()):
            if "id" not in call:
                _put_id(call, ids.make(call["function"]["name"]))
                unnamed.add(call)
            waiting.add(call)
            ids.count += 1
        if turn["role"] != "tool":
            continue
        given = turn.get("tool_call_id")
        answered = None if given in named else (unnamed if given else waiting).oldest(turn.get("name"))
        for calls in (waiting, unnamed):
            calls.close(answered["id"] if answered else given or "")
        if answered and given:
            _put_id(answered, given)
        elif not given:
            turn["tool_call_id"] = answered["id"] if answered else ids.make(turn.get("name", "tool"))
            ids.count += answered is None


def _put_id(call: Call, given: str) -> None:
    made = {"id": given, **{key: value for key, value in call.items() if key != "id"}}
    call.clear()
    call.update(made)


class _Ids:
    """Makes ids. `count` is the number of calls so far, or more where a dataset has such ids of its own."""

    def __init__(self, taken: set[str]) -> None:
        self.count = 0
        self._taken = taken

    def make(self, name: str) -> str:
        while (made := f"functions.{name}:{self.count}") in self._taken:
            self.count += 1
        self._taken.add(made)
        return made
