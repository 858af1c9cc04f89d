"""A prompt's ids back to the conversation that the chat template made them of.

The turns are found by what the template writes between them (frames.py). What an answer's parts are, in earlier turns
as in the last, common/answers.py reads. That the conversation is the right one is seen by rendering it: a reader of a
prompt may be wrong, and then its row is left out.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.answer_layout import layout_of
from common.answers import Answer, read
from common.chat_template import Tokenizer
from producer.export.frames import Found, Frames

Message = dict[str, Any]
Tool = dict[str, Any]


def message_of(answer: Answer) -> Message:
    """An answer as a message whose content is a text: trainers join it with others, where a null fails."""
    message = answer.message()
    return {**message, "content": message["content"] or ""}


class NotRead(Exception):
    """The ids are no prompt as this chat template writes them."""


class Prompts:
    """Reads prompts of one tokenizer and chat template, rendered with `kwargs`."""

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
        self._frames = Frames(tokenizer, kwargs)
        marks = self._frames.marks.of_name
        # Answers are read in the same texts, where a character is a token.
        self._layout = msgspec.structs.replace(
            layout_of(tokenizer),
            control={ord(mark): name for name, mark in marks.items()},
            end=frozenset(ord(mark) for mark in self._frames.marks.ends),
        )

    def conversation(self, input_ids: Sequence[int]) -> tuple[list[Message], list[Tool] | None]:
        """The messages and the tools that were declared, None for none. Raises NotRead."""
        reading = _Reading(self._frames, self._layout, self._frames.marks.of_ids(input_ids))
        reading.whole()
        if not reading.messages:
            raise NotRead("it has no turn")
        return reading.messages, reading.tools


class _Reading:
    """Goes through a prompt, turn by turn."""

    def __init__(self, frames: Frames, layout: Any, text: str) -> None:
        self._frames, self._layout, self._text = frames, layout, text
        self.messages: list[Message] = []
        self.tools: list[Tool] | None = None
        self._calls = 0
        self._unanswered: list[str] = []

    def whole(self) -> None:
        found = self._next("start", 0)
        while True:
            end = found.stop
            if found.kind == "assistant":
                close = self._frames.marks.end.search(self._text, end)
                if close is None:
                    return  # here the answer begins
                self._assistant(self._text[end : close.start()])
                found = self._next("assistant", close.start())
            elif found.kind == "tools":
                found = self._next("tools", self._declared(end))
            else:
                following = self._next(found.kind, end)
                self._said(found, following, self._text[end : following.start])
                found = following

    def _next(self, kind: Any, at: int) -> Found:
        found = self._frames.next(kind, self._text, at)
        if found is None:
            raise NotRead(f"nothing known follows {kind}")
        return found

    def _said(self, found: Found, following: Found, content: str) -> None:
        message: Message = {"role": found.kind, "content": content}
        if found.kind == "tool":
            if self._frames.quoted:
                with contextlib.suppress(ValueError):
                    message["content"] = json.loads(f'"{content}"')
            due = self._unanswered.pop(0) if self._unanswered else f"call{self._calls:05d}"
            message["tool_call_id"] = found.ids.get("id") or following.ids.get("closing_id") or due
            if "name" in found.ids:
                message["name"] = found.ids["name"]
        self.messages.append(message)

    def _assistant(self, body: str) -> None:
        for blank in self._frames.blanks:
            if body.startswith(blank):
                body = body.removeprefix(blank)
                break
        answer = read([*map(ord, body)], self._layout, _text, None, self._calls)
        message = message_of(answer)
        if not answer.reasoning:  # an empty block is what templates write where they leave reasoning out
            message.pop("reasoning_content", None)
        self._calls += len(answer.tool_calls)
        self._unanswered = [call["id"] for call in answer.tool_calls]
        self.messages.append(message)

    def _declared(self, at: int) -> int:
        """Read the tools at `at`; answers where they end."""
        declared = self._frames.declared
        try:
            value, end = _decode(self._text, at)
            found = value if isinstance(value, list) else [value]
            while declared is not None and declared.between is not None and not isinstance(value, list):
                if not self._text.startswith(declared.between, end):
                    break
                try:
                    more, stop = _decode(self._text, end + len(declared.between))
                except ValueError:
                    break
                if not (isinstance(more, dict) and ("function" in more or "name" in more)):
                    break
                found.append(more)
                end = stop
        except (ValueError, RecursionError) as error:
            raise NotRead(f"its tools are no JSON: {error}") from None
        if not all(isinstance(one, dict) for one in found):
            raise NotRead("its tools are no objects")
        own = [one if "function" in one else {"type": "function", "function": one} for one in found]
        self.tools = (self.tools or []) + own
        return end


_decode = json.JSONDecoder().raw_decode


def _text(letters: Sequence[int]) -> str:
    return "".join(map(chr, letters))
