"""What a conversation must look like before a chat template sees it.

Templates do not complain. That of Kimi-K2.5 makes a system turn of a turn without a role, nothing of a content that is
an object, `<think>None</think>` of a reasoning_content that is null, and puts a `name` in the place of the role. The
converters make none of these; this is the door that says so.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

_Name = Annotated[str, msgspec.Meta(min_length=1)]
_NoName = None | msgspec.UnsetType
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?:\[(?P<number>\d+)\])?\.?(?P<field>.*)`)?$", re.DOTALL)


class BadPrompt(Exception):
    """A conversation that has no right prompt; `reason` is a reject's reason, `detail` says what and where."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


_Content = str | list[_Text]


class _Function(msgspec.Struct):
    name: _Name
    arguments: str | dict[str, Any]


class _Call(msgspec.Struct):
    id: _Name
    function: _Function
    type: Literal["function"] = "function"


class _System(msgspec.Struct, tag_field="role", tag="system"):
    content: _Content
    name: _NoName = msgspec.UNSET


class _Developer(_System, tag_field="role", tag="developer"):
    pass


class _User(_System, tag_field="role", tag="user"):
    pass


class _Tool(msgspec.Struct, tag_field="role", tag="tool"):
    content: _Content
    tool_call_id: _Name
    name: str | None = None


class _Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    content: _Content | None = None
    reasoning_content: str = ""
    tool_calls: list[_Call] | None = None
    name: _NoName = msgspec.UNSET


class _Declared(msgspec.Struct):
    name: _Name
    parameters: dict[str, Any] | None = None


class _Schema(msgspec.Struct):
    type: Literal["function"]
    function: _Declared


_Messages = Annotated[list[_System | _Developer | _User | _Tool | _Assistant], msgspec.Meta(min_length=1)]
_Schemas = list[_Schema]


def check_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises BadPrompt, `bad_messages` or `bad_tools`, unless these are turns and functions as OpenAI has them.

    Every turn has a known role and a content of text, which may be missing beside tool calls; a call and a result have
    the id that joins them; no name but a function's.
    """
    try:
        turns = msgspec.convert(messages, _Messages)
    except msgspec.ValidationError as error:
        raise BadPrompt("bad_messages", _told(error, "turn")) from None
    for number, turn in enumerate(turns):
        if isinstance(turn, _Assistant) and turn.content is None and not turn.tool_calls:
            raise BadPrompt("bad_messages", f"turn {number} (assistant) has neither content nor tool calls")
    if tools:
        try:
            msgspec.convert(tools, _Schemas)
        except msgspec.ValidationError as error:
            raise BadPrompt("bad_tools", _told(error, "tool")) from None


def joined_parts(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The texts of every content that is made of several parts; for messages that passed."""
    contents = (message.get("content") for message in messages)
    return [
        [part["text"] for part in content] for content in contents if isinstance(content, list) and len(content) > 1
    ]


def _told(error: msgspec.ValidationError, kind: str) -> str:
    found = _WHERE.match(str(error))
    assert found is not None
    what = found["what"].replace("`", "")
    if found["field"] == "name" and "null" in what:
        what = "a name is for tool turns alone, since templates put it in the place of the role"
    where = f"{kind} {found['number']}: " if found["number"] else ""
    return f"{where}{what}" + (f" ({found['field']})" if found["field"] else "")
