"""Rows as conversations, for the text formats: only those that the chat template makes the same ids of."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from common.answer_layout import THINK, layout_of
from common.answers import Answer, parse, survival
from common.chat_template import Tokenizer
from common.errors import UsageError
from common.messages import BadPrompt
from common.run_file import read_run_file
from common.settings import Settings
from common.template_kwargs import TEMPLATE_ERRORS
from producer.export.prompts import NotRead, Prompts, message_of
from producer.export.rows import Row

# Why a row is no conversation.
REASONS = {
    "answer_not_ended": "the answer has no end token, and a template would write one behind it",
    "prompt_not_read": "the prompt's ids are not what this chat template writes, as with ready ids",
    "prompt_changed": "the prompt, read and rendered again, has other ids",
    "damaged_answer": "the answer cannot be read: a mark of its reasoning or tool calls is missing, and the like",
    "answer_changed": "the answer, read and rendered again, has other ids",
}


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A row as text: the prompt's messages, the answer as a message, and the tools that were declared.

    `survival` is `whole` where the template makes exactly the row's ids of it, `reasoning_dropped` where it leaves
    reasoning out. `said` is the answer as the model wrote it, think block included, without its end token.
    """

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    tools: list[dict[str, Any]] | None
    survival: Literal["whole", "reasoning_dropped"]
    said: str


class Conversations:
    """Reads rows with the tokenizer that made them; the last one read is remembered."""

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """`kwargs` are the chat_template_kwargs of each dataset, those of [tokenizer] among them."""
        self._tokenizer = tokenizer
        self._kwargs = kwargs
        self._prompts: dict[bytes, Prompts] = {}
        self._last: tuple[str, Conversation | str] = ("", "")

    def of(self, row: Row) -> Conversation | str:
        """The row as a conversation, or one of REASONS."""
        if self._last[0] != row.id:
            self._last = row.id, self._read(row)
        return self._last[1]

    def _read(self, row: Row) -> Conversation | str:
        ids: list[int] = row.input_ids.tolist()
        boundary = row.spans[0][0]
        prompt, output = ids[:boundary], ids[boundary:]
        if output[-1] not in self._tokenizer.special_ids.end:
            return "answer_not_ended"
        try:
            messages, tools = self._prompts_of(row.dataset).conversation(prompt)
        except NotRead:
            return "prompt_not_read"
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        answer = parse(output, self._tokenizer, input_ids=prompt, calls_before=calls)
        found = self._survival(row, messages, tools, answer, output)
        if found not in {"whole", "reasoning_dropped"}:
            return found
        return Conversation(
            messages=messages,
            answer=message_of(answer),
            tools=tools,
            survival="whole" if found == "whole" else "reasoning_dropped",
            said=self._said(prompt, output),
        )

    def _prompts_of(self, dataset: str) -> Prompts:
        kwargs = self._kwargs[dataset]
        key = msgspec.json.encode(kwargs, order="sorted")
        if key not in self._prompts:
            self._prompts[key] = Prompts(self._tokenizer, kwargs)
        return self._prompts[key]

    def _survival(
        self,
        row: Row,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: Answer,
        output: Sequence[int],
    ) -> str:
        """`whole`, `reasoning_dropped` or one of REASONS."""
        kwargs = self._kwargs[row.dataset]
        changed = "answer_changed" if answer.damage is None else "damaged_answer"
        ids = row.input_ids.tolist()
        if "no_think_end" not in answer.damages and self._ids([*messages, message_of(answer)], tools, kwargs, ids):
            return "whole"
        prompt = ids[: len(ids) - len(output)]
        if not self._ids(messages, tools, kwargs, prompt, whole=True):
            return "prompt_changed"
        found = survival(messages, answer, output, self._tokenizer, tools=tools, kwargs=kwargs)
        return changed if found == "changed" else found

    def _ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        wanted: Sequence[int],
        *,
        whole: bool = False,
    ) -> bool:
        """Whether a conversation renders to the ids `wanted`, with whatever follows unless it is to be the `whole`."""
        try:
            (ids,) = self._tokenizer.encode([self._tokenizer.render(messages, tools, kwargs)])
        except (BadPrompt, *TEMPLATE_ERRORS):
            return False
        return (ids if whole else ids[: len(wanted)]) == wanted

    def _said(self, prompt: Sequence[int], output: Sequence[int]) -> str:
        """The answer's text, with the head of the think block where the prompt has it."""
        opened = layout_of(self._tokenizer).behind_think(prompt, self._tokenizer.decode)
        text = self._tokenizer.decode(output[:-1])
        return text if opened is None else f"{THINK}{opened}{text}"


def conversations(settings: Settings, names: Sequence[str]) -> Conversations:
    """The reader for the records of the datasets `names`.

    Raises UsageError unless the configured tokenizer and chat template are those that run.json says made the ids;
    TokenizerUnavailable.
    """
    run = read_run_file(settings.output) or {}
    tokenizer = Tokenizer(settings.tokenizer)
    now = tokenizer.fingerprint()
    for key, what in (("tokenizer_sha256", "tokenizer"), ("template_sha256", "chat template")):
        if run.get(key, now[key]) != now[key]:
            raise UsageError(
                f"the {what} in {settings.tokenizer.path} is not the one that made these records "
                f"({settings.output / 'run.json'} has another {key}); set [tokenizer] path to that of the run, or "
                "export the ids themselves with --format ids"
            )
    configured = {dataset.name: settings.template_kwargs_of(dataset) for dataset in settings.datasets}
    made = {name: facts.get("chat_template_kwargs") for name, facts in run.get("datasets", {}).items()}
    kwargs = {name: made.get(name, configured.get(name, settings.tokenizer.chat_template_kwargs)) for name in names}
    return Conversations(tokenizer, {name: own or {} for name, own in kwargs.items()})
