"""Turns as datasets write them to messages as OpenAI's: roles, content, reasoning, tool calls, and no media.

A message made here has role, content (a text), and where they apply reasoning_content, tool_calls, tool_call_id and
name. Whatever else a turn holds is left out: a template may print it (`name` replaces the role in Kimi's).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from producer.datasets.layouts.calls import Message, link, read_calls, result_id
from producer.datasets.layouts.reasoning import split_reasoning
from producer.datasets.reasons import NOT_JSON, BadRow, quoted

_SYSTEM, _USER, _ASSISTANT, _TOOL, _CALL = "system", "user", "assistant", "tool", "call"
# Every spelling of a role, in lower case with underscores. A developer's turn is a system turn to the models we serve.
ROLES = {
    **dict.fromkeys(("system", "developer", "sys", "system_prompt"), _SYSTEM),
    **dict.fromkeys(("user", "human", "prompter", "usr"), _USER),
    **dict.fromkeys(("assistant", "gpt", "ai", "model", "bot", "chatbot", "chatgpt"), _ASSISTANT),
    **dict.fromkeys(("function_call", "functioncall", "tool_call", "tool_calls"), _CALL),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "tool_result"), _TOOL),
    **dict.fromkeys(("function_response", "tool_responses", "tool_results"), _TOOL),
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "tool_response", "refusal"})
_REASONING_PARTS = frozenset({"reasoning", "thinking"})
_CALL_PARTS = frozenset({"tool_call", "tool_use"})
_MEDIA = re.compile(r"(input_|output_)?(image|audio|video|file|document)(_url|_file)?")
_MEDIA_KEYS = ("image", "image_url", "audio", "audio_url", "input_audio", "video", "video_url")
_MEDIA_MARKS = re.compile(r"<(?:image|video|audio)>[ \t]*+\n?")  # where a column of the row goes
_MEDIA_LISTS = ("images", "videos", "audios")
_MEDIA_MARKED = ("image", "video", "audio")  # may be anything, so they count only where a mark is
MEDIA_COLUMNS = frozenset((*_MEDIA_LISTS, *_MEDIA_MARKED))


class Turn(msgspec.Struct, frozen=True):
    """A turn whose role is known: system, user, assistant or tool; and whether its content is a tool call."""

    role: str
    raw: Mapping[str, Any]
    number: int
    is_call: bool = False


class Media:
    """What is done about media: refused, or with `drop` left out; some stand in columns of the row."""

    def __init__(self, row: Mapping[str, Any], *, drop: bool) -> None:
        self._drop = drop
        self._in_lists = self.marked = self.dropped = False
        if not MEDIA_COLUMNS.isdisjoint(row):
            self._in_lists = any(isinstance(row.get(name), list) and row[name] for name in _MEDIA_LISTS)
            self.marked = self._in_lists or any(row.get(name) for name in _MEDIA_MARKED)

    def found(self, where: str) -> None:
        """Raises BadRow unless media are to be dropped."""
        if not self._drop:
            raise BadRow("not_text", f"{where} holds an image, audio or video; drop_media = true sends the text alone")
        self.dropped = True

    def unmarked(self, turn: Turn, text: str) -> str:
        """The text without `<image>` and the like, which stand for what a column of the row holds."""
        if not self.marked or "<" not in text or not _MEDIA_MARKS.search(text):
            return text
        self.found(f"turn {turn.number} ({turn.role})")
        return _MEDIA_MARKS.sub("", text)

    def rest(self) -> None:
        """After the turns: lists of media of which no turn said where they go."""
        if self._in_lists and not self.dropped:
            self.found("a column of the row")


def open_turns(value: Any) -> list[Turn]:
    """The turns with their roles; `value` is a list, the text of one, or an object of lists as Arrow may have it."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except NOT_JSON:
            raise BadRow("bad_messages", "the messages are a text that is not JSON") from None
    if isinstance(value, dict):
        value = _rows_of(value)
    if not isinstance(value, list) or not value:
        raise BadRow("bad_messages")
    return [_open(number, turn) for number, turn in enumerate(value)]


def _rows_of(columns: Mapping[str, Any]) -> Any:
    """`{"from": [...], "value": [...]}` as a list of turns."""
    lists = list(columns.values())
    if not lists or not all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
        return None
    return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]


def _open(number: int, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise BadRow("bad_messages", f"turn {number} is not an object")
    role = turn.get("role")
    if role is None:
        role = turn.get("from")
    known = ROLES.get(role) if isinstance(role, str) else None
    if known is None and isinstance(role, str) and len(role) < 40:
        known = ROLES.get(re.sub(r"[\s-]+", "_", role.strip().lower()))
    if known is None:
        raise BadRow("bad_messages", f"turn {number} has the role {quoted(role)}, which is not known")
    return Turn(_ASSISTANT if known is _CALL else known, turn, number, known is _CALL)


def read_turns(turns: Sequence[Turn], media: Media) -> list[Message]:
    """The messages of turns. Raises BadRow: a template does not complain, it renders a system turn, or nothing."""
    messages: list[Message] = []
    calls = False
    for turn in turns:
        content = turn.raw.get("content")
        if type(content) is str and turn.role in (_USER, _SYSTEM) and not media.marked:
            messages.append({"role": turn.role, "content": content})
            continue
        message = _assistant(turn, media) if turn.role == _ASSISTANT else _other(turn, media)
        calls = calls or "tool_calls" in message or turn.role == _TOOL
        previous = messages[-1] if messages else {}
        if turn.is_call and previous.get("role") == _ASSISTANT:
            # What was said before the call, or another call made at once, is the same turn.
            previous.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    media.rest()
    if calls:
        link(messages)
    return messages


def _content(turn: Turn) -> Any:
    raw = turn.raw
    for key in ("content", "value", "text"):
        if raw.get(key) is not None:
            content = raw[key]
            break
    else:
        content = None
    if not content and turn.role == _SYSTEM and isinstance(raw.get("system_prompt"), str):
        return raw["system_prompt"]  # nebius
    if isinstance(content, dict):
        if turn.role == _TOOL and "type" not in content:
            return _written(turn, content)
        return [content] if isinstance(content.get("type"), str) else content
    return content


def _written(turn: Turn, result: Mapping[str, Any]) -> str:
    """The result of a tool that was never made a text."""
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError, RecursionError):
        raise BadRow("bad_messages", f"turn {turn.number} (tool) has no text") from None


class _Parts(NamedTuple):
    text: str
    reasoning: str = ""
    calls: tuple[Any, ...] = ()


def _parts(turn: Turn, content: Any, media: Media) -> _Parts | None:
    """The content read; None if it is no text and no list of parts."""
    if isinstance(content, str):
        return _Parts(media.unmarked(turn, content))
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind, value = _part(turn, part)
        if kind == "media":
            media.found(f"turn {turn.number} ({turn.role})")
        elif kind == "call" and turn.role == _ASSISTANT:
            calls.append(value)
        elif kind == "reasoning" and turn.role == _ASSISTANT:
            reasoning.append(value)
        elif kind == "text":
            texts.append(value)
        else:
            raise BadRow("bad_messages", f"turn {turn.number} ({turn.role}) has a content part of type {kind}")
    return _Parts(media.unmarked(turn, "".join(texts)), "\n".join(reasoning), tuple(calls))


def _part(turn: Turn, part: Any) -> tuple[str, Any]:
    """Its kind: text, reasoning, call, media or an unknown type; and its text, or the call."""
    if not isinstance(part, dict):
        raise BadRow("bad_messages", f"turn {turn.number} has a content part that is {quoted(part)}")
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in _MEDIA_KEYS if part.get(key) is not None), "text")
    if isinstance(kind, str) and kind in _CALL_PARTS:
        return "call", part.get("value") if part.get("value") is not None else part
    if isinstance(kind, str) and (kind in _TEXT_PARTS or kind in _REASONING_PARTS):
        keys = ("text", "value", "content", kind)
        text = next((part[key] for key in keys if isinstance(part.get(key), str)), None)
        if text is None:
            raise BadRow("bad_messages", f"turn {turn.number} has a content part of type {kind} without a text")
        return ("text" if kind in _TEXT_PARTS else "reasoning"), text
    return ("media" if is_media(part) else quoted(kind)), None


def is_media(part: Mapping[str, Any]) -> bool:
    """Whether a part of a content is an image, audio, video or a file."""
    kind = part.get("type")
    if kind is None:
        return any(part.get(key) is not None for key in _MEDIA_KEYS)
    return isinstance(kind, str) and _MEDIA.fullmatch(kind[:40]) is not None


def _assistant(turn: Turn, media: Media) -> Message:
    raw, content = turn.raw, _content(turn)
    if turn.is_call:
        return {"role": _ASSISTANT, "content": "", "tool_calls": _some(turn, read_calls(_text_of(content)))}
    given = raw.get("tool_calls") or raw.get("function_call")
    calls = read_calls(given) if given else []
    parts = _Parts("") if content is None else _parts(turn, content, media)
    if parts is None:
        raise BadRow("bad_messages", f"turn {turn.number} (assistant) has no text")
    for one in parts.calls:
        calls.extend(read_calls(one))
    reasoning, text = split_reasoning(raw, parts.text, parts.reasoning)
    if content is None and not calls and not reasoning:
        raise BadRow("bad_messages", f"turn {turn.number} (assistant) has no text")
    message: Message = {"role": _ASSISTANT, "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(content: Any) -> Any:
    """A call's content: a text, an object, or a list of parts or of calls."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        if part.get("type") == "text":
            return part.get("text", part.get("value"))
    return content


def _some(turn: Turn, calls: list[Any]) -> list[Any]:
    if not calls:
        raise BadRow("bad_tools", f"turn {turn.number} is a tool call with nothing in it")
    return calls


def _other(turn: Turn, media: Media) -> Message:
    parts = _parts(turn, _content(turn), media)
    if parts is None:
        raise BadRow("bad_messages", f"turn {turn.number} ({turn.role}) has no text")
    message: Message = {"role": turn.role, "content": parts.text}
    if turn.role == _TOOL:
        if given := result_id(dict(turn.raw)):
            message["tool_call_id"] = given
        if isinstance(turn.raw.get("name"), str) and turn.raw["name"].strip():
            message["name"] = turn.raw["name"]  # Moonshot's own examples give it to Kimi
    return message
