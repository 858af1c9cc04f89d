"""How a model's answers are laid out: which ids are marks, and what its chat template writes around their parts.

The second is found out by rendering a conversation with known parts. Qwen's template, for one, puts newlines behind
`<think>`, in front of and behind `</think>`, and in front of a tool call: the model writes them as well, and they are
no part of what it thought or said. Kimi's puts none.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.control_tokens import any_of
from common.messages import BadPrompt
from common.template_kwargs import TEMPLATE_ERRORS
from common.tool_calls import FORMATS, LLAMA, ToolFormat

THINK, THINK_END = "<think>", "</think>"
_REASONING, _CONTENT = "So I add them.", "It is added."
_ARGUMENTS = '{"a": 1}'
_USER: dict[str, Any] = {"role": "user", "content": "1 + 1 = ?"}
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
# An id that Mistral's templates take, which want nine letters or digits.
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "2"}
_TAIL = 16  # ids of a prompt in which a <think> of plain text is looked for


class Around(msgspec.Struct, frozen=True):
    """What the template writes around reasoning and content; None where it leaves reasoning out."""

    reasoning: tuple[str, str] | None = None  # behind <think>, and in front of </think>
    content: tuple[str | None, str] = (None, "")  # behind </think>, and in front of a tool call


class Layout(msgspec.Struct, frozen=True):
    """What there is to know of a tokenizer and its template to read an answer.

    `control` has the names of all control tokens by id, `end` are those that end an answer. `tags` finds the marks of
    tool calls that the tokenizer has no ids for, so that they are text; `think_by_id` says that the think marks have
    ids. `opened` is what stands behind `<think>` in a generation prompt that ends within a think block, else None.
    `takes_objects` and `takes_null`: the template wants arguments as objects, and takes null for a content
    beside tool calls.
    """

    control: dict[int, str]
    end: frozenset[int]
    think_by_id: bool
    opened: str | None
    tools: ToolFormat | None
    tags: re.Pattern[str] | None
    around: Around
    takes_objects: bool
    takes_null: bool

    def behind_think(self, input_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str | None:
        """What stands behind `<think>` in a prompt that ends within a think block, else None."""
        if not self.think_by_id:
            return _behind_think(decode(input_ids[-_TAIL:]))
        for at in range(len(input_ids) - 1, -1, -1):
            if input_ids[at] in self.control:
                return decode(input_ids[at + 1 :]) if self.control[input_ids[at]] == THINK else None
        return None


@functools.lru_cache(maxsize=8)
def layout_of(tokenizer: Tokenizer) -> Layout:
    """The layout of a tokenizer's answers, found once."""
    names = dict(tokenizer.control_ids)
    text, takes_objects = _rendered_call(tokenizer)
    tools = _tool_format(text, names)
    missing = [mark for mark in tools.marks if mark not in names] if tools and tools is not LLAMA else []
    return Layout(
        control={token_id: name for name, token_id in names.items()},
        end=frozenset(tokenizer.special_ids.end),
        think_by_id=THINK_END in names,
        opened=_behind_think(_rendered(tokenizer, [_USER], None) or ""),
        tools=tools,
        tags=re.compile(any_of(missing)) if missing else None,
        around=_around(text or _rendered(tokenizer, [_USER, _answer(None)], None) or "", tools),
        takes_objects=takes_objects,
        takes_null=_takes_null(tokenizer, takes_objects),
    )


def _behind_think(prompt: str) -> str | None:
    return prompt.rpartition(THINK)[2] if prompt.rstrip().endswith(THINK) else None


def _answer(arguments: Any, content: str | None = _CONTENT) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "reasoning_content": _REASONING}
    return answer if arguments is None else {**answer, "tool_calls": [call]}


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
    try:
        return tokenizer.render(messages, tools)
    except (BadPrompt, *TEMPLATE_ERRORS):  # it may refuse tools, or such a conversation
        return None


def _rendered_call(tokenizer: Tokenizer) -> tuple[str, bool]:
    """A conversation with a tool call, and whether its arguments are an object; empty if the template takes none."""
    given = _rendered(tokenizer, [_USER, _answer(_ARGUMENTS), _RESULT], _TOOLS)
    if given is not None and _ARGUMENTS in given:
        return given, False
    # A template that makes JSON of the arguments itself puts a text into quotes, and one that walks through them fails.
    parsed = _rendered(tokenizer, [_USER, _answer(msgspec.json.decode(_ARGUMENTS)), _RESULT], _TOOLS)
    if parsed is not None and parsed != given:
        return parsed, True
    return given or "", False


def _takes_null(tokenizer: Tokenizer, takes_objects: bool) -> bool:
    arguments = msgspec.json.decode(_ARGUMENTS) if takes_objects else _ARGUMENTS
    text = _rendered(tokenizer, [_USER, _answer(arguments, None), _RESULT], _TOOLS)
    return text is not None and "None" not in text and "null" not in text


def _tool_format(text: str, names: Mapping[str, int]) -> ToolFormat | None:
    """The format that the template writes; else the first of which the tokenizer has the marks.

    A tokenizer may have the marks of several: those distilled into Qwen's and Llama's models keep theirs.
    """
    written = (one for one in FORMATS if one.opening in text)
    known = (one for one in FORMATS if one.opening in names)
    return next(written, None) or next(known, None)


def _around(text: str, tools: ToolFormat | None) -> Around:
    at = text.find(_CONTENT)
    if at < 0:
        return Around()
    behind = text[at + len(_CONTENT) :]
    before_call = behind.partition(tools.first)[0] if tools and tools.first in behind else ""
    before_call = "" if before_call.strip() else before_call
    head, found, between = text[:at].rpartition(_REASONING)
    tail, closing, lead = between.partition(THINK_END)
    if not (found and closing and THINK in head):
        return Around(content=(None, before_call))
    return Around((head.rpartition(THINK)[2], tail), (lead, before_call))
