"""The ways in which models write tool calls, each named after the first family that wrote it so.

    kimi      <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:N<|tool_call_argument_begin|>{…}
              <|tool_call_end|>…<|tool_calls_section_end|>
    deepseek  <|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>{…}<|tool_call_end|>…<|tool_calls_end|>, with
              full-width bars, and U+2581 for each underscore; before V3.1, the word function stands in the place of
              NAME, and behind the separator NAME, a newline and {…} as a block of Markdown
    hermes    <tool_call>{"name": NAME, "arguments": {…}}</tool_call>, Qwen's too; those from Qwen3-Coder on write
              <function=NAME><parameter=KEY>VALUE</parameter>…</function> within
    mistral   [TOOL_CALLS][{"name": NAME, "arguments": {…}}, …], from release 11 of its tokenizer on
              [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}…, of which [CALL_ID]ID or [ARGS] may be missing
    llama     <|python_tag|>{"name": NAME, "parameters": {…}}; …, often without the tag

As their chat templates and SGLang's python/sglang/srt/function_call/ have them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec


def _deepseek(name: str) -> str:
    return f"<\uff5c{name}\uff5c>".replace("_", "\u2581")


# What a mark of a format is for.
OPEN, CLOSE, SECTION_OPEN, SECTION_CLOSE, SEPARATOR = "open", "close", "section_open", "section_close", "separator"
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```json\n(?P<arguments>.*?)\n?```\s*", re.DOTALL)
_FUNCTION = re.compile(r"<function=(?P<name>[^>\n]+)>(?P<body>.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)


class NotACall(ValueError):
    """What stands between the marks is no call."""


class Call(msgspec.Struct, frozen=True):
    """A tool call; `arguments` is JSON as generated, `id` the model's own or empty."""

    name: str
    arguments: str
    id: str = ""


class ToolFormat(msgspec.Struct, frozen=True):
    """How tool calls are marked, and how what is within the marks of one is read.

    `marks` are by their text; without a CLOSE a call ends at the next one, or with the answer. `read` gets the texts of
    one call by the mark in front of each, and may find several calls in it; raises NotACall.
    """

    name: str
    marks: dict[str, str]
    read: Callable[[Mapping[str, str]], list[Call]]

    @property
    def opening(self) -> str:
        """The mark that every call begins with."""
        return next(mark for mark, role in self.marks.items() if role == OPEN)

    @property
    def first(self) -> str:
        """The mark that the first call begins with."""
        return next(iter(self.marks))

    def has(self, role: str) -> bool:
        return role in self.marks.values()


class _Json(msgspec.Struct):
    """A call as an object; Raw keeps the arguments as they were generated."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None

    def call(self) -> Call:
        arguments = bytes(self.arguments) or bytes(self.parameters)
        return Call(_named(self.name), arguments.decode(), self.id or "")


_one = msgspec.json.Decoder(_Json)
_some = msgspec.json.Decoder(list[_Json])


def _named(name: str) -> str:
    if not name.strip():
        raise NotACall("it has no name")
    return name.strip()


def _decoded(text: str) -> list[Call]:
    """One call, or a list of them."""
    try:
        body = text.strip().encode()
        return [one.call() for one in (_some.decode(body) if body.startswith(b"[") else [_one.decode(body)])]
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise NotACall(str(error)) from None


def _read_kimi(parts: Mapping[str, str]) -> list[Call]:
    own = parts["<|tool_call_begin|>"].strip()
    name = own.rpartition(":")[0] or own
    return [Call(_named(name.removeprefix("functions.")), _behind(parts, "<|tool_call_argument_begin|>"), own)]


def _behind(parts: Mapping[str, str], mark: str) -> str:
    if mark not in parts:
        raise NotACall(f"it has no {mark}")
    return parts[mark]


def _read_deepseek(parts: Mapping[str, str]) -> list[Call]:
    behind = _behind(parts, _deepseek("tool_sep"))
    fenced = _FENCED.fullmatch(behind)
    if fenced:
        return [Call(_named(fenced["name"]), fenced["arguments"])]
    return [Call(_named(parts[_deepseek("tool_call_begin")]), behind)]


def _read_hermes(parts: Mapping[str, str]) -> list[Call]:
    body = parts["<tool_call>"].strip()
    return [_read_function(body)] if body.startswith("<function=") else _decoded(body)


def _read_function(text: str) -> Call:
    """A call of named parameters. Their values are texts: which of them is a number only the tool's schema knows."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        raise NotACall("it is no <function=…>…</function>")
    values: dict[str, str] = {}
    body, at = function["body"].strip(), 0
    while at < len(body):
        found = _PARAMETER.match(body, at)
        if found is None:
            raise NotACall("it has something else than parameters")
        values[found["key"]] = found["value"]
        at = found.end()
    return Call(_named(function["name"]), msgspec.json.encode(values).decode())


def _read_mistral(parts: Mapping[str, str]) -> list[Call]:
    head = parts["[TOOL_CALLS]"]
    if head.lstrip().startswith(("[", "{")):
        return _decoded(head)
    if "[ARGS]" in parts:
        return [Call(_named(head), parts["[ARGS]"], parts.get("[CALL_ID]", "").strip())]
    name, brace, rest = head.partition("{")
    return [Call(_named(name), brace + rest)]


def _read_llama(parts: Mapping[str, str]) -> list[Call]:
    return [call for text in _objects(parts["<|python_tag|>"]) for call in _decoded(text)]


def _objects(text: str) -> Iterator[str]:
    """Values of JSON with semicolons between them."""
    decode = json.JSONDecoder().raw_decode
    rest = text.strip()
    while rest:
        try:
            _, end = decode(rest)
        except (ValueError, RecursionError) as error:
            raise NotACall(str(error)) from None
        yield rest[:end]
        rest = rest[end:].strip().removeprefix(";").lstrip()


LLAMA = ToolFormat("llama", {"<|python_tag|>": OPEN}, _read_llama)
FORMATS = (
    ToolFormat(
        "kimi",
        {
            "<|tool_calls_section_begin|>": SECTION_OPEN,
            "<|tool_call_begin|>": OPEN,
            "<|tool_call_argument_begin|>": SEPARATOR,
            "<|tool_call_end|>": CLOSE,
            "<|tool_calls_section_end|>": SECTION_CLOSE,
        },
        _read_kimi,
    ),
    ToolFormat(
        "deepseek",
        {
            _deepseek("tool_calls_begin"): SECTION_OPEN,
            _deepseek("tool_call_begin"): OPEN,
            _deepseek("tool_sep"): SEPARATOR,
            _deepseek("tool_call_end"): CLOSE,
            _deepseek("tool_calls_end"): SECTION_CLOSE,
        },
        _read_deepseek,
    ),
    ToolFormat("hermes", {"<tool_call>": OPEN, "</tool_call>": CLOSE}, _read_hermes),
    ToolFormat("mistral", {"[TOOL_CALLS]": OPEN, "[CALL_ID]": SEPARATOR, "[ARGS]": SEPARATOR}, _read_mistral),
    LLAMA,
)


def bare_calls(text: str) -> list[Call] | None:
    """The calls that a whole text is, as Llama writes them without a mark; None if it is something else."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        calls = _read_llama({"<|python_tag|>": text})
    except NotACall:
        return None
    return calls if calls and all(call.arguments for call in calls) else None


def parsed_arguments(text: str) -> Any:
    """Arguments as an object; None where they are not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
