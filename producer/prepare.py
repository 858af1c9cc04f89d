"""Rows to payloads: converted, rendered, encoded, checked against the model's limits, and packed."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from common.chat_template import Tokenizer
from common.control_tokens import Rendered
from common.errors import TokenizerUnavailable
from common.messages import BadPrompt
from common.payload import Packer
from common.rejects import Reject
from common.sections import DatasetSettings
from producer.datasets.cursor import Row
from producer.datasets.rows import BadRow, Prompt, convert

# Texts that are encoded together, while the next ones are rendered: rendering keeps one core busy, and a tokenizer of
# the `tokenizers` library lets go of the interpreter. With 64 the CPU time of short prompts is 5 % more.
_TOGETHER = 128
_Encoded = list[list[int] | BadPrompt]
# Of a prompt as many ids are kept as say where its answer begins: within a think block, or not.
PROMPT_END = 64
# SGLang ends an answer two tokens before the context is full: at max_req_len - prompt - 1, where max_req_len is the
# context less 1. It takes no prompt of max_req_len - 5 tokens or more.
_KEPT_OF_CONTEXT, _KEPT_OF_PROMPT = 2, 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must keep to: ids below `vocab_size`, prompt and answer within `context_length` (None: unknown).

    Where both do not fit, a prompt is rejected, or with `fit = "cut"` asks for as many tokens less.
    """

    vocab_size: int
    context_length: int | None
    max_new_tokens: int
    fit: Literal["reject", "cut"] = "reject"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows made ready: samples as (index, payload), their prompt tokens by index, and rejects."""

    samples: list[tuple[int, bytes]] = field(default_factory=list)
    prompts: dict[int, int] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    prompt_ends: dict[int, Sequence[int]] = field(default_factory=dict)  # of turns of conversations, the last ids


@dataclass(frozen=True, slots=True)
class Ready:
    """A prompt in place of a row that it would have to be made of."""

    index: int
    value: Prompt


class _Asked(msgspec.Struct, frozen=True):
    index: int
    prompt: Prompt
    text: Rendered | None  # None: the row has ready ids


def prepare(
    rows: Sequence[Row | Ready], dataset: DatasetSettings, tokenizer: Tokenizer, limits: Limits, packer: Packer
) -> Chunk:
    """Rows to payloads; a row that cannot become a prompt is a reject, and costs the others nothing."""
    chunk = Chunk()
    waiting: deque[tuple[list[_Asked], Future[_Encoded]]] = deque()
    with ThreadPoolExecutor(tokenizer.at_once, thread_name_prefix="encode") as threads:
        for start in range(0, len(rows), _TOGETHER):
            asked = _ask(rows[start : start + _TOGETHER], dataset, tokenizer, chunk)
            texts = [one.text for one in asked if one.text is not None]
            waiting.append((asked, threads.submit(_encode, texts, tokenizer)))
            if len(waiting) > tokenizer.at_once:
                _pack(*waiting.popleft(), limits, packer, chunk)
        while waiting:
            _pack(*waiting.popleft(), limits, packer, chunk)
    return chunk


def _ask(rows: Sequence[Row | Ready], dataset: DatasetSettings, tokenizer: Tokenizer, chunk: Chunk) -> list[_Asked]:
    asked: list[_Asked] = []
    for row in rows:
        try:
            prompt = row.value if isinstance(row, Ready) else convert(row.value, dataset)
            text = _render(prompt, dataset, tokenizer) if prompt.input_ids is None else None
            asked.append(_Asked(row.index, prompt, text))
        except BadRow as bad:
            chunk.rejects.append(_reject(row.index, bad))
    return asked


def _render(prompt: Prompt, dataset: DatasetSettings, tokenizer: Tokenizer) -> Rendered:
    try:
        return tokenizer.render(prompt.messages, prompt.tools, dataset.chat_template_kwargs)
    except BadPrompt as bad:
        raise BadRow(bad.reason, bad.detail, prompt.meta.get("id")) from bad
    except TokenizerUnavailable:  # no fault of the row
        raise
    except Exception as error:
        raise BadRow("template_error", f"the chat template cannot render it: {error}", prompt.meta.get("id")) from error


def _encode(texts: Sequence[Rendered], tokenizer: Tokenizer) -> _Encoded:
    """All in one batch; where a text refuses, one by one."""
    try:
        return [*tokenizer.encode(texts)] if texts else []
    except BadPrompt as bad:
        if len(texts) == 1:
            return [bad]
        return [ids for text in texts for ids in _encode([text], tokenizer)]


def prompt_ids(prompt: Prompt, dataset: DatasetSettings, tokenizer: Tokenizer) -> list[int]:
    """The ids of one conversation, whatever the model's limits. Raises BadRow."""
    (ids,) = _encode([_render(prompt, dataset, tokenizer)], tokenizer)
    if isinstance(ids, BadPrompt):
        raise BadRow(ids.reason, ids.detail, prompt.meta.get("id"))
    return ids


def _pack(asked: Sequence[_Asked], encoded: Future[_Encoded], limits: Limits, packer: Packer, chunk: Chunk) -> None:
    remaining = iter(encoded.result())
    for one in asked:
        index, prompt = one.index, one.prompt
        input_ids = prompt.input_ids if one.text is None else next(remaining)
        try:
            ids, max_new_tokens = _checked(input_ids or (), limits, prompt)
            packed = packer.pack(ids, prompt.meta, max_new_tokens, turn=prompt.turn, turns=prompt.turns)
            chunk.samples.append((index, packed))
            chunk.prompts[index] = len(ids)
            if prompt.turn is not None:
                chunk.prompt_ends[index] = list(ids[-PROMPT_END:])
        except BadRow as bad:
            chunk.rejects.append(_reject(index, bad))


def _checked(input_ids: Sequence[int] | BadPrompt, limits: Limits, prompt: Prompt) -> tuple[Sequence[int], int | None]:
    """The ids, and the max_new_tokens of this prompt where it is not that of all; raises BadRow."""
    row_id = prompt.meta.get("id")
    if isinstance(input_ids, BadPrompt):
        raise BadRow(input_ids.reason, input_ids.detail, row_id)
    if not input_ids:
        raise BadRow("bad_input_ids", "the prompt has no ids", row_id)
    try:
        msgspec.convert(input_ids, _known_ids(limits.vocab_size))
    except msgspec.ValidationError:
        raise BadRow("id_out_of_range", f"an id is not within 0 to {limits.vocab_size - 1}", row_id) from None
    if limits.context_length is None:
        return input_ids, None
    room = limits.context_length - len(input_ids)
    if limits.fit == "cut" and room > _KEPT_OF_CONTEXT + _KEPT_OF_PROMPT:
        room -= _KEPT_OF_CONTEXT
        return input_ids, room if room < limits.max_new_tokens else None
    if limits.fit == "reject" and room >= limits.max_new_tokens:
        return input_ids, None
    asked = "an answer" if limits.fit == "cut" else f"max_new_tokens {limits.max_new_tokens}"
    raise BadRow(
        "too_long", f"{len(input_ids)} prompt tokens and {asked} exceed the context of {limits.context_length}", row_id
    )


@cache
def _known_ids(vocab_size: int) -> Any:
    """The type of a list of ids of the vocabulary. To check 1,000 against it takes 10 us; min() and max() take 25."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _reject(index: int, bad: BadRow) -> Reject:
    return Reject(index=index, reason=bad.reason, detail=bad.detail, id=bad.row_id)
