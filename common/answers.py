"""What a model wrote, read from its `output_ids`: reasoning, content and tool calls, and which ids are which.

The one place that reads an answer: multi-turn generation takes `Answer.message()` into the history, `tokenmill show`
colours `Answer.spans`, text exports write `Answer.message()` where `survival` allows it, and the flags take
`Answer.damages`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from common.answer_layout import THINK, THINK_END, Layout, layout_of
from common.answer_pieces import Decode, Piece, pieces_of
from common.chat_template import Tokenizer
from common.control_tokens import Rendered
from common.messages import BadPrompt
from common.template_kwargs import TEMPLATE_ERRORS
from common.tool_calls import (
    CLOSE,
    LLAMA,
    OPEN,
    SECTION_CLOSE,
    SECTION_OPEN,
    SEPARATOR,
    Call,
    NotACall,
    bare_calls,
    parsed_arguments,
)

Kind = Literal["think", "answer", "tool_call", "control"]
Survival = Literal["whole", "reasoning_dropped", "changed"]
# What can be wrong with an answer, the worst first.
DAMAGES = (
    "no_think_end",  # it ends, or calls a tool, within the think block
    "think_reopened",  # <think> where a think block is open, or was closed
    "think_end_unopened",  # </think> where no think block is open
    "unbalanced_tool_calls",  # a mark of the tool calls is missing, or stands where it does not belong
    "tool_call_not_json",  # the arguments of a call are not a JSON object, or it has no name
    "control_in_content",  # a control token within reasoning, content or a tool call
    "content_behind_tool_calls",  # a template would put it before them
    "replacement_character",  # U+FFFD: the bytes are not UTF-8, or the model wrote that character
)
_MAX_NEWLINES = 4  # ids of newlines, at most, that stand behind </think>
_ANY = "\ue0f1"  # a content that stands for any: a character for private use, which no conversation has


class Span(msgspec.Struct, frozen=True):
    """`output_ids[start:stop]` is of one kind; `control` are marks such as `</think>` and the end token."""

    kind: Kind
    start: int
    stop: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, read.

    `reasoning` is None where there is no think block, and "" where it is empty. `content` is "" where there is none.
    Neither has the newlines that the chat template itself writes around it. `tool_calls` are OpenAI's ({"id", "type":
    "function", "function": {"name", "arguments"}}); arguments are a text, as generated. An id is the model's own
    (Kimi's `functions.NAME:0`), else made. A call that was cut off, or that cannot be read, is not among them.
    `spans` cover all ids, in order, without gaps or overlaps. `answer_start` is the place in `output_ids` behind the
    think block, 0 if there is none. `damages` are of DAMAGES, the worst first.
    """

    reasoning: str | None
    content: str
    tool_calls: list[dict[str, Any]]
    spans: list[Span]
    answer_start: int = 0
    damages: tuple[str, ...] = ()
    takes_objects: bool = False  # the chat template wants arguments as objects
    takes_null: bool = True  # ... and takes null for a content beside tool calls

    @property
    def damage(self) -> str | None:
        """The worst damage, or None."""
        return self.damages[0] if self.damages else None

    def arguments(self) -> list[Any]:
        """The arguments of each tool call as parsed; None where they are not JSON.

        Those of the XML form are texts all, since only a tool's schema says which of them is a number.
        """
        return [parsed_arguments(call["function"]["arguments"]) for call in self.tool_calls]

    def message(self) -> dict[str, Any]:
        """The assistant message, as this model's chat template takes it: arguments as text, or as objects.

        It has no `reasoning_content` where there is no think block, since Kimi's template prints a null as None.
        """
        nothing = None if self.tool_calls and self.takes_null else ""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or nothing}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self._objects() if self.takes_objects else self.tool_calls
        return message

    def _objects(self) -> list[dict[str, Any]]:
        return [
            {**call, "function": {**call["function"], "arguments": given if isinstance(given, dict) else text}}
            for call, given in zip(self.tool_calls, self.arguments(), strict=True)
            for text in [call["function"]["arguments"]]
        ]


def parse(
    output_ids: Sequence[int], tokenizer: Tokenizer, *, input_ids: Sequence[int] | None = None, calls_before: int = 0
) -> Answer:
    """Read an answer; never raises for what a model may write.

    `input_ids` is its prompt, whose end says whether the answer begins within a think block; without it, that is as the
    template's generation prompt has it with the chat_template_kwargs of [tokenizer], which those of a dataset may
    change. `calls_before` is the number of tool calls earlier in the conversation, from which ids that the format has
    not are numbered.
    """
    layout = layout_of(tokenizer)
    opened = layout.opened if input_ids is None else layout.behind_think(input_ids, tokenizer.decode)
    return read(output_ids, layout, tokenizer.decode, opened, calls_before)


def read(
    output_ids: Sequence[int], layout: Layout, decode: Decode, opened: str | None, calls_before: int = 0
) -> Answer:
    """The same for who has no tokenizer at hand; `opened` is what its prompt has behind `<think>`, else None."""
    stop = len(output_ids)
    if stop and output_ids[-1] in layout.end:
        stop -= 1
    reading = _Reading(layout, opened, calls_before)
    for piece in pieces_of(output_ids[:stop], layout, decode, thinking=opened is not None):
        reading.take(piece)
    return reading.answer(stop, len(output_ids))


class _Reading:
    """Goes through the pieces of an answer.

    `_state` is where it is: in a think block, in the content, between the marks of a section of tool calls, or within a
    call.
    """

    def __init__(self, layout: Layout, opened: str | None, calls_before: int) -> None:
        self._layout = layout
        self._opened = opened
        self._calls_before = calls_before
        self._state: Literal["think", "answer", "section", "call"] = "answer" if opened is None else "think"
        self._reasoning: list[str] | None = None if opened is None else []
        self._content: list[str] = []
        self._parts: dict[str, str] = {}
        self._part = ""
        self._calls: list[Call] = []
        self._called = self._closed = False
        self._answer_start = 0
        self._spans: list[Span] = []
        self._damages: set[str] = set()

    def take(self, piece: Piece) -> None:
        if not piece.mark:
            self._text(piece.text)
            self._span("tool_call" if self._state in {"section", "call"} else self._state, piece.start, piece.stop)
            return
        role = self._layout.tools.marks.get(piece.text) if self._layout.tools else None
        if piece.text in {THINK, THINK_END} and self._state in {"think", "answer"}:
            self._think_mark(piece)
        elif role is not None:
            self._tool_mark(piece.text, role)
        else:
            self._damages.add("control_in_content")
            self._text(piece.text)
        self._span("control", piece.start, piece.stop)
        if self._state == "think":
            self._answer_start = piece.stop

    def _span(self, kind: Any, start: int, stop: int) -> None:
        if self._spans and self._spans[-1].kind == kind:
            start = self._spans.pop().start
        if start < stop:
            self._spans.append(Span(kind, start, stop))

    def _text(self, text: str) -> None:
        if self._state == "think":
            assert self._reasoning is not None
            self._reasoning.append(text)
        elif self._state == "call":
            self._parts[self._part] += text
        elif not self._called:
            self._content.append(text)
        elif text.strip() and self._state == "section":
            self._damages.add("unbalanced_tool_calls")
        elif text.strip():
            self._damages.add("content_behind_tool_calls")
            self._content.append(text)

    def _think_mark(self, piece: Piece) -> None:
        if piece.text == THINK:
            if self._reasoning is not None or self._opened is not None:
                self._damages.add("think_reopened")
            self._reasoning = self._reasoning or []
            self._state = "think"
        elif self._state == "think":
            self._state, self._closed = "answer", True
            self._answer_start = piece.stop
        else:
            self._damages.add("think_end_unopened")

    def _tool_mark(self, mark: str, role: str) -> None:
        tools = self._layout.tools
        assert tools is not None
        if self._state == "think":  # Kimi-K2 does so; SGLang's parser, too, takes it for the end of thinking
            self._damages.add("no_think_end")
            self._state = "answer"
        outside = "section" if tools.has(SECTION_OPEN) else "answer"
        if role == OPEN and self._state == "call" and not tools.has(CLOSE):
            self._read_call(outside)
        wanted = {OPEN: outside, CLOSE: "call", SECTION_OPEN: "answer", SECTION_CLOSE: "section", SEPARATOR: "call"}
        if self._state != wanted[role] or (role == SEPARATOR and mark in self._parts):
            self._damages.add("unbalanced_tool_calls")
        self._called = True
        if role in {OPEN, SEPARATOR}:
            if role == OPEN or self._state != "call":
                self._parts = {}
            self._parts.setdefault(mark, "")
            self._part, self._state = mark, "call"
        elif role == CLOSE and self._state == "call":
            self._read_call(outside)
        elif role != CLOSE:
            self._state = "section" if role == SECTION_OPEN else "answer"

    def _read_call(self, after: Any) -> None:
        tools = self._layout.tools
        assert tools is not None
        self._state = after
        if tools.opening not in self._parts:
            return  # its first mark is missing, which was told
        try:
            self._calls += tools.read(self._parts)
        except NotACall:
            self._damages.add("tool_call_not_json")

    def answer(self, stop: int, total: int) -> Answer:
        """What was read of `total` ids, of which those from `stop` on end the answer."""
        tools = self._layout.tools
        if self._state == "think":
            self._damages.add("no_think_end")
        elif self._state == "call" and tools is not None and not tools.has(CLOSE):
            self._read_call("answer")
        elif self._state in {"call", "section"}:
            self._damages.add("unbalanced_tool_calls")
        content = self._content_text()
        if tools is LLAMA and not self._called and (bare := bare_calls(content)):
            self._calls, content = bare, ""
            self._spans = [Span("tool_call", s.start, s.stop) if s.kind == "answer" else s for s in self._spans]
        self._span("control", stop, total)
        reasoning = self._reasoning_text()
        if any(not isinstance(parsed_arguments(call.arguments), dict) for call in self._calls):
            self._damages.add("tool_call_not_json")
        if any("\ufffd" in text for text in (reasoning or "", content, *(call.arguments for call in self._calls))):
            self._damages.add("replacement_character")
        return Answer(
            reasoning=reasoning,
            content=content,
            tool_calls=[self._openai(number, call) for number, call in enumerate(self._calls)],
            spans=self._spans,
            answer_start=self._answer_start,
            damages=tuple(one for one in DAMAGES if one in self._damages),
            takes_objects=self._layout.takes_objects,
            takes_null=self._layout.takes_null,
        )

    def _reasoning_text(self) -> str | None:
        if self._reasoning is None:
            return None
        text = "".join(self._reasoning)
        around = self._layout.around.reasoning
        if around is None:
            return text.strip("\n")
        # What the prompt has written of it already the answer need not.
        text = text.removeprefix(around[0] if self._opened is None else around[0].removeprefix(self._opened))
        return text.removesuffix(around[1]) if self._closed else text

    def _content_text(self) -> str:
        text = "".join(self._content)
        before, behind = self._layout.around.content
        if self._closed:
            text = text.lstrip("\n") if before is None else text.removeprefix(before)
        return text.removesuffix(behind) if self._called else text

    def _openai(self, number: int, call: Call) -> dict[str, Any]:
        # Nine letters and digits: Mistral's templates take no other id, and all others take this one.
        made = call.id or f"call{self._calls_before + number:05d}"
        return {"id": made, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def survival(
    messages_before: Sequence[Mapping[str, Any]],
    answer: Answer,
    output_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Survival:
    """What the chat template makes of the answer as a message; `kwargs` stand for those of [tokenizer].

    `whole`: the conversation with it renders to prompt ids + output ids, and whatever follows. `reasoning_dropped`: so
    it does, save that the template leaves reasoning out, the answer's own or that of earlier turns; many keep no more
    than that of a tool loop which is going on. `changed`: to other ids, or the answer ended within its think block,
    which the template would close.
    """
    if "no_think_end" in answer.damages:
        return "changed"
    message = answer.message()
    try:
        texts = [tokenizer.render([*messages_before, *more], tools, kwargs) for more in ([], [message])]
        prompt, whole = tokenizer.encode(texts)
        if whole[: len(prompt) + len(output_ids)] == [*prompt, *output_ids]:
            return "whole"
        # What the template writes in front of any content that comes without reasoning.
        bare = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": _ANY}
        (before,) = tokenizer.encode([_before_any(tokenizer.render([*messages_before, bare], tools, kwargs))])
    except (BadPrompt, *TEMPLATE_ERRORS):
        return "changed"
    ends = tokenizer.special_ids.end
    if answer.reasoning is None and _behind_last(prompt, ends) != _behind_last(before, ends):
        return "changed"  # the template writes a think block where the model wrote none
    behind = list(output_ids[answer.answer_start :])
    for skipped in range(min(_MAX_NEWLINES, len(behind)) + 1):
        if tokenizer.decode(behind[:skipped]).strip("\n"):
            break
        if whole[: len(before) + len(behind) - skipped] == before + behind[skipped:]:
            return "reasoning_dropped"
    return "changed"


def _behind_last(ids: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    return ids[max((number + 1 for number, one in enumerate(ids) if one in ends), default=0) :]


def _before_any(text: Rendered) -> Rendered:
    start = text.find(_ANY)
    return Rendered(text[:start], (typed for typed in text.typed if typed[1] <= start))
