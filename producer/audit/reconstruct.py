"""The ids of an answer from its text, as the model would have had them; what is in doubt is refused, not guessed.

A text has several sequences of ids, of which a model may have written any; the tokenizer gives one of these. That it is
the right one is as good as certain where it has as many ids as the server has counted. The ids of a server are better.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from common.answer_layout import THINK, THINK_END, Layout, layout_of
from common.answers import Answer, parse
from common.chat_template import Tokenizer
from common.control_tokens import Rendered
from common.messages import BadPrompt
from common.template_kwargs import TEMPLATE_ERRORS
from producer.audit.rows import NotData, Seen, see
from producer.datasets.layouts.calls import Message, read_calls
from producer.datasets.layouts.reasoning import split_reasoning
from producer.datasets.layouts.tools import Tool, read_tools
from producer.datasets.layouts.turns import Media, read_turns
from producer.datasets.reasons import REASONS as ROW_REASONS
from producer.datasets.reasons import BadRow
from producer.export.rows import Row

# Why a row is refused, beside the reasons for which a row is no prompt.
REASONS = {
    **ROW_REASONS,
    "not_a_row": "the line takes a record of tokenmill back, or is one of its rejects",
    "has_ids": "the row has ids, which are better than any that could be made of its text",
    "failed": "the row holds an error in the place of an answer",
    "no_prompt": "the row does not say what was asked, or not in a layout that is known",
    "no_answer": "the row has no answer, or an empty one",
    "several_answers": "the row has several answers, and counts their tokens together",
    "not_ended": "finish_reason says that the answer neither ended by itself nor by length",
    "cut_call": "the answer ended by length, and has tool calls: where it ended within them is not known",
    "not_counted": "the row does not say how many completion_tokens it has (--uncounted takes it)",
    "no_reasoning": "the prompt opens a think block, and the row has no reasoning",
    "reasoning_unasked": "the prompt closes the think block, and the row has reasoning",
    "control_tokens": "control tokens stand in the answer as text",
    "damaged_text": "U+FFFD stands in the answer: bytes of it are lost",
    "whitespace_unknown": "the template does not show what stands around a think block (--guess-whitespace takes it)",
    "template_differs": "the chat template changes the answer, or does not end it with an end token",
    "boundary": "the tokenizer joins the end of the prompt and the start of the answer",
    "not_stable": "the ids do not decode to the text that they were made of",
    "reads_otherwise": "the ids are read as another answer than that of the row",
    "prompt_tokens_differ": "the prompt has another number of tokens than the row says: another template or kwargs",
    "tokens_differ": "the answer has another number of tokens than the row says",
    "end_count_differs": "its tokens fit if the end token is counted otherwise than in most rows of the source, only",
}
_STOPPED = frozenset(
    {"stop", "tool_calls", "eos", "eos_token", "end_turn", "stop_sequence", "function_call", "tool_use"}
)
_CUT = frozenset({"length", "max_tokens", "max_output_tokens"})
_ANY = "\ue0f1"  # a content that stands for any, as in common/answers.py
_GUESSED = (("\n", "\n"), "\n\n")  # as Qwen3's template has it


class Allowed(msgspec.Struct, frozen=True):
    """What is taken though it is not sure."""

    uncounted: bool = False
    guessed_whitespace: bool = False


class Made(msgspec.Struct, frozen=True):
    """A row, and how sure it is.

    `tokens`: "equal" to what the row claims, "end_not_counted" if but for the end token, "uncounted" if nothing is
    claimed. Of a row alone it is not known whether it is one token off; its source shows that (reconstructed.py).
    `whitespace` around the think block: the "template" writes it, it is "guessed", or "none" is there.
    `ended`: "stated" by a finish_reason, or "assumed" where there is none.
    """

    row: Row
    claimed_tokens: int
    tokens: Literal["equal", "end_not_counted", "uncounted"]
    whitespace: Literal["template", "guessed", "none"]
    ended: Literal["stated", "assumed"]


class Refused(Exception):
    """A row whose ids are in doubt; `reason` is a key of REASONS."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail or REASONS[reason]}")
        self.reason, self.detail = reason, detail or REASONS[reason]


def reconstruct(value: Any, index: int, dataset: str, tokenizer: Tokenizer, allowed: Allowed) -> Made:
    """The ids of row `index` of a source, as a container gives it. Raises Refused."""
    try:
        seen = see(value)
        _refuse(seen)
        answer = _answer(seen, layout_of(tokenizer))
        messages, tools = _prompt(seen)
        return _make(seen, answer, messages, tools, index, dataset, tokenizer, allowed)
    except NotData:
        raise Refused("not_a_row") from None
    except BadRow as bad:
        raise Refused(bad.reason, bad.detail) from None
    except BadPrompt as bad:
        raise Refused(bad.reason, bad.detail) from None
    except TEMPLATE_ERRORS as error:
        raise Refused("template_error", str(error)) from None


def _refuse(seen: Seen) -> None:
    if seen.input_ids is not None or seen.output_ids is not None:
        raise Refused("has_ids")
    if seen.error:
        raise Refused("failed", seen.error[:200])
    if not seen.said or seen.said[0].empty:
        raise Refused("no_answer")
    if len(seen.said) > 1:
        raise Refused("several_answers")
    if seen.unread is not None:
        raise seen.unread
    if not seen.turns:
        raise Refused("no_prompt")
    reason = seen.finish_reason
    if reason is not None and reason not in _STOPPED | _CUT:
        raise Refused("not_ended", f"finish_reason is {reason!r}")
    if reason in _CUT and seen.said[0].calls:
        raise Refused("cut_call")


def _answer(seen: Seen, layout: Layout) -> Answer:
    """The answer as parts. Raises BadRow for tool calls that cannot be read, and Refused."""
    said = seen.said[0]
    reasoning, content = split_reasoning({"reasoning_content": said.reasoning}, said.content)
    calls = read_calls(said.calls) if said.calls else []
    for text in (reasoning, content, *(json.dumps(call, ensure_ascii=False) for call in calls)):
        if any(name in text for name in layout.control.values()):
            raise Refused("control_tokens")
        if "\ufffd" in text:
            raise Refused("damaged_text")
    for number, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        call["id"] = call.get("id") or f"call{number:05d}"
        call["type"] = "function"
    return Answer(
        reasoning=reasoning or None,
        content=content,
        tool_calls=calls,
        spans=[],
        takes_objects=layout.takes_objects,
        takes_null=layout.takes_null,
    )


def _prompt(seen: Seen) -> tuple[list[Message], list[Tool] | None]:
    messages = read_turns(seen.turns, Media({}, drop=False))
    if seen.system and not any(turn["role"] == "system" for turn in messages):
        messages = [{"role": "system", "content": seen.system}, *messages]
    if messages[-1]["role"] not in {"user", "tool"}:
        raise Refused("no_prompt", f"the turn before the answer is of role {messages[-1]['role']}")
    return messages, read_tools(seen.tools)


def _make(
    seen: Seen,
    answer: Answer,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    index: int,
    dataset: str,
    tokenizer: Tokenizer,
    allowed: Allowed,
) -> Made:
    prompt = tokenizer.render(messages, tools)
    (prompt_ids,) = tokenizer.encode([prompt])
    claimed_prompt = seen.claims.get("prompt_tokens")
    if claimed_prompt is not None and claimed_prompt != len(prompt_ids):
        raise Refused("prompt_tokens_differ", f"{claimed_prompt:,} claimed, {len(prompt_ids):,} made")
    cut = seen.finish_reason in _CUT
    text = _Text(tokenizer, messages, tools, prompt, answer, cut=cut)
    written = text.written(layout_of(tokenizer).behind_think(prompt_ids, tokenizer.decode))
    if text.whitespace == "guessed" and not allowed.guessed_whitespace:
        raise Refused("whitespace_unknown")
    (ids,) = tokenizer.encode([Rendered(prompt + written, prompt.typed)])
    if ids[: len(prompt_ids)] != prompt_ids:
        raise Refused("boundary")
    output_ids = ids[len(prompt_ids) :]
    if tokenizer.decode(output_ids) != written:
        raise Refused("not_stable")
    _read_back(answer, parse(output_ids, tokenizer, input_ids=prompt_ids), cut=cut)
    flags = ("reconstructed", "truncated") if cut else ("reconstructed",)
    row = Row(
        id=f"{dataset}/{index}",
        dataset=dataset,
        index=index,
        row_id=seen.row_id,
        finish_reason="length" if cut else seen.finish_reason or "",
        flags=flags,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(output_ids),
        input_ids=np.array(ids, np.int32),
        spans=((len(prompt_ids), len(ids)),),
    )
    return Made(
        row,
        seen.claims.get("completion_tokens", -1),
        _counted(seen, len(output_ids), allowed, cut=cut),
        text.whitespace,
        "assumed" if seen.finish_reason is None else "stated",
    )


def _counted(
    seen: Seen, tokens: int, allowed: Allowed, *, cut: bool
) -> Literal["equal", "end_not_counted", "uncounted"]:
    claimed = seen.claims.get("completion_tokens")
    if claimed is None:
        if not allowed.uncounted or cut:  # where a text was cut within a token, no one knows
            raise Refused("not_counted")
        return "uncounted"
    if claimed == tokens:
        return "equal"
    if claimed == tokens - 1 and not cut:
        return "end_not_counted"
    raise Refused("tokens_differ", f"{claimed:,} claimed, {tokens:,} made")


def _read_back(answer: Answer, read: Answer, *, cut: bool) -> None:
    """Raises Refused unless what the ids say is the answer of the row."""
    if set(read.damages) - ({"no_think_end", "replacement_character"} if cut else set()):
        raise Refused("reads_otherwise", f"the ids have the damage {read.damages[0]}")
    # Newlines at the ends are the template's, and some clients leave them.
    same = (answer.reasoning or "").strip("\n") == (read.reasoning or "").strip("\n")
    same = same and answer.content.strip("\n") == read.content.strip("\n")
    if not same or _calls(answer) != _calls(read):
        raise Refused("reads_otherwise")


def _calls(answer: Answer) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], given) for call, given in zip(answer.tool_calls, answer.arguments(), strict=True)
    ]


class _Text:
    """What the model wrote, as text: from the chat template where it shows it, else from the parts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        prompt: str,
        answer: Answer,
        *,
        cut: bool,
    ) -> None:
        self._tokenizer, self._messages, self._tools = tokenizer, messages, tools
        self._prompt, self._answer, self._cut = prompt, answer, cut
        self._layout = layout_of(tokenizer)
        self._ends = [self._layout.control[one] for one in self._layout.end]
        self.whitespace: Literal["template", "guessed", "none"] = "template" if answer.reasoning else "none"

    def written(self, opened: str | None) -> str:
        """The text behind the prompt; `opened` is what the prompt has behind `<think>`, else None. Raises Refused."""
        reasoning = self._answer.reasoning
        if opened is not None and not reasoning:
            raise Refused("no_reasoning")
        if reasoning and self._prompt.rstrip().endswith(THINK_END):
            raise Refused("reasoning_unasked")
        if not self._cut and (shown := self._shown()) is not None:
            return shown
        thought = self._thought(opened) if reasoning else ""
        if self._cut:
            return thought + self._answer.content
        return thought + self._answer.content + self._behind_content()

    def _shown(self) -> str | None:
        """What the template makes of the answer behind the same prompt; None if it leaves its reasoning out."""
        whole = self._tokenizer.render([*self._messages, self._answer.message()], self._tools)
        if not whole.startswith(self._prompt):
            return None
        text = self._ended(whole[len(self._prompt) :])
        reasoning = (self._answer.reasoning or "").strip()
        kept = reasoning in text if reasoning else THINK_END not in text
        return text if kept and self._answer.content.strip() in text else None

    def _thought(self, opened: str | None) -> str:
        around, lead = self._layout.around.reasoning, self._layout.around.content[0]
        if around is None or lead is None:
            self.whitespace = "guessed"
            around, lead = _GUESSED
        head = THINK + around[0] if opened is None else around[0].removeprefix(opened)
        thought = head + (self._answer.reasoning or "")
        if self._cut and not self._answer.content:
            return thought
        return thought + around[1] + THINK_END + lead

    def _behind_content(self) -> str:
        """Tool calls and the end token, as the template writes them behind a content without reasoning."""
        message = {key: value for key, value in self._answer.message().items() if key != "reasoning_content"}
        if self._answer.tool_calls and not self._answer.content:
            raise Refused("template_differs", "the chat template leaves out the reasoning in front of a tool call")
        whole = self._tokenizer.render([*self._messages, message | {"content": _ANY}], self._tools)
        return self._ended(whole.rpartition(_ANY)[2])

    def _ended(self, text: str) -> str:
        """`text` up to its first end token."""
        places = [at + len(end) for end in self._ends if (at := text.find(end)) >= 0]
        if not places:
            raise Refused("template_differs", "the chat template ends an answer with no end token")
        return text[: min(places)]
