"""Conversations of which every assistant turn is made anew (`turns = "all"`).

A row's first prompt ends with its first user turn. Each next prompt is that history with this model's own answer behind
it, as the chat template renders it, and the user or tool turns that the row goes on with. What the row's own assistant
said is left out; but where tools answered, their results stand only behind the same calls.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import msgspec
import zstandard

from common.answers import Answer, parse
from common.chat_template import Tokenizer
from common.errors import DataError
from common.ledger import Ending, Ledger, NextTurn
from common.payload import Packer
from common.rejects import Reject
from common.sections import DatasetSettings
from common.turns import MAX_ROWS, TURNS, Made, index_of, row_of, unpack_made
from producer.datasets.containers import Row
from producer.datasets.layouts.calls import Call, Message
from producer.datasets.layouts.cuts import answered_turns
from producer.datasets.reasons import BadRow
from producer.datasets.rows import Prompt, convert
from producer.prepare import PROMPT_END, Chunk, Limits, Ready, prepare, prompt_ids

# Why a conversation ends before its last turn: these, `truncated` and `rejected` as the ledger finds them, and the
# reasons of a reject for a prompt that cannot be made of it (reasons.py).
STOPS = {
    "damaged_answer": "the answer cannot be read: a mark of its reasoning or tool calls is missing, and the like",
    "tool_calls_unanswered": "the answer calls tools, and the row goes on without their results",
    "other_tool_calls": "the row goes on with results of other tool calls than those of the answer",
    "blank_turn": "the row goes on with a user turn without text",
    "other_prompt": "the ledger was lost, and the row gives other prompts by now than those that were answered",
    "too_many_turns": f"the row has more than {TURNS} turns",
}
_LEVEL = 1  # of zstd, as for payloads
_MAX_BYTES = 1024 * 1024 * 1024


class Conversation(msgspec.Struct, frozen=True, array_like=True):
    """A conversation at turn `turn`, counted from 0, of `turns`.

    `messages` are the history that this turn answers, `rest` is how the row goes on. `prompt_end` are the last ids of
    this turn's prompt, which say where its answer begins.
    """

    messages: list[Message]
    rest: list[Message]
    tools: list[dict[str, Any]] | None
    meta: dict[str, Any]
    turn: int
    turns: int
    prompt_end: list[int] = []

    @property
    def prompt(self) -> Prompt:
        """What this turn asks."""
        return Prompt(self.meta, self.messages, self.tools, turn=self.turn, turns=self.turns)

    def pack(self) -> bytes:
        """As the ledger keeps it."""
        return zstandard.ZstdCompressor(level=_LEVEL).compress(msgspec.msgpack.encode(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Conversation":
        """The conversation again."""
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_BYTES)
        return msgspec.msgpack.decode(raw, type=cls)


class Stopped(Exception):
    """The conversation cannot go on; `reason` is one of STOPS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def begin(prompt: Prompt) -> Conversation:
    """The conversation of a row that was converted whole, at its first turn. Raises BadRow."""
    messages = [dict(message) for message in prompt.messages]
    cuts = answered_turns(messages)
    first = cuts[0]
    if _is_blank(messages[first - 1]):
        raise BadRow("bad_messages", f"turn {first - 1} (user) asks with a blank text", prompt.meta.get("id"))
    tools = [dict(tool) for tool in prompt.tools] if prompt.tools is not None else None
    return Conversation(messages[:first], messages[first:], tools, dict(prompt.meta), 0, len(cuts))


def follow(conversation: Conversation, answer: Answer) -> Conversation:
    """The conversation at its next turn, with `answer` in its history. Raises Stopped."""
    if conversation.turn + 1 >= TURNS:
        raise Stopped("too_many_turns")
    if answer.damage is not None:
        raise Stopped("damaged_answer")
    cut = answered_turns(conversation.rest)[0]
    theirs, rest = conversation.rest[:cut], conversation.rest[cut:]
    ours = _linked([one for one in theirs if one["role"] != "assistant"], _calls(theirs), answer.tool_calls)
    if _is_blank(ours[-1]):
        raise Stopped("blank_turn")
    return msgspec.structs.replace(
        conversation,
        messages=[*conversation.messages, answer.message(), *ours],
        rest=rest,
        turn=conversation.turn + 1,
        prompt_end=[],
    )


def _is_blank(message: Mapping[str, Any]) -> bool:
    return message["role"] == "user" and not message["content"].strip()


def _calls(messages: Iterable[Mapping[str, Any]]) -> list[Call]:
    return [call for one in messages for call in one.get("tool_calls") or ()]


def _linked(messages: Sequence[Message], theirs: Sequence[Call], ours: Sequence[Call]) -> list[Message]:
    """The turns that the row goes on with, where tool results have the ids of our calls. Raises Stopped."""
    if not any(one["role"] == "tool" for one in messages):
        if ours:
            raise Stopped("tool_calls_unanswered")
        return list(messages)
    if [_asked(call) for call in ours] != [_asked(call) for call in theirs]:
        raise Stopped("other_tool_calls")
    ids = {call["id"]: own["id"] for call, own in zip(theirs, ours, strict=True)}
    if any(one["role"] == "tool" and one["tool_call_id"] not in ids for one in messages):
        raise Stopped("other_tool_calls")
    return [{**one, "tool_call_id": ids[one["tool_call_id"]]} if one["role"] == "tool" else one for one in messages]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def _asked(call: Call) -> tuple[str, Any]:
    """What a call asks: the name, and the arguments whichever way they are written down."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(arguments)
    if isinstance(arguments, dict):
        # Models that write arguments as XML have texts alone.
        arguments = {name: _text(one) for name, one in arguments.items()}
    return function["name"], arguments


@dataclass(frozen=True, slots=True)
class Turns:
    """Makes the prompts of a dataset's conversations."""

    dataset: DatasetSettings
    limits: Limits
    packer: Packer
    tokenizer: Tokenizer

    def of_rows(self, rows: Sequence[Row], ledger: Ledger) -> tuple[list[NextTurn | Ending], Chunk]:
        """The turns that are due of `rows`, and a chunk of rejects. Raises DataError."""
        # In this order: a turn that a worker settles in between is found by the ledger (converse.lua).
        begun = ledger.done_among(self.dataset.name, [index_of(row.index, 0) for row in rows])
        resumed = ledger.resumed(self.dataset.name, map(row_of, begun))
        due = [row for row in rows if index_of(row.index, 0) not in begun or row.index in resumed]
        turns, rejects = self._begin(due, resumed)
        return turns, Chunk(rejects=rejects)

    def _begin(
        self, rows: Sequence[Row], resumed: Mapping[int, Sequence[Made]]
    ) -> tuple[list[NextTurn | Ending], list[Reject]]:
        """The first turns of `rows`, or the next ones of those that `resumed` has the answers of; and bad rows."""
        drafts: list[_Draft] = []
        ready: list[Ready] = []
        endings: list[NextTurn | Ending] = []
        rejects: list[Reject] = []
        for row in rows:
            if row.index >= MAX_ROWS:
                raise DataError(
                    f'with turns = "all" a source may have {MAX_ROWS:,} rows, and this one has more; split it'
                )
            answers = resumed.get(row.index, ())
            try:
                prompt = convert(row.value, self.dataset, whole=True)
                if prompt.input_ids is not None:
                    # Ready ids are one turn: how a conversation would go on is not in them.
                    ready.append(Ready(index_of(row.index, 0), replace(prompt, turn=0, turns=1)))
                    continue
                drafts.append(self._replayed(begin(prompt), row.index, answers))
            except BadRow as bad:
                if answers:  # its turns were made with other settings
                    endings.append(Ending(index_of(row.index, len(answers) - 1), bad.reason, 1, len(answers) - 1))
                else:
                    index = index_of(row.index, 0)
                    rejects.append(Reject(index=index, reason=bad.reason, detail=bad.detail, id=bad.row_id))
            except _Ended as ended:
                endings.append(ended.ending)
        turns, others = self._prepare(drafts, ready)
        return [*endings, *turns], [*rejects, *others]

    def behind(self, answered: Iterable[tuple[int, bytes, bytes]]) -> list[NextTurn | Ending]:
        """The turns that follow these: (index, answer, conversation) as the ledger has them."""
        drafts: list[_Draft] = []
        endings: list[NextTurn | Ending] = []
        for index, packed, conversation in answered:
            try:
                drafts.append(self._follow(Conversation.unpack(conversation), index, unpack_made(packed).output_ids))
            except _Ended as ended:
                endings.append(ended.ending)
        turns, _ = self._prepare(drafts, [])
        return [*endings, *turns]

    def _follow(self, before: Conversation, index: int, output_ids: Sequence[int], earlier: int = 0) -> "_Draft":
        """The turn behind the answer of the sample `index`. Raises _Ended."""
        calls = len(_calls(before.messages))
        answer = parse(output_ids, self.tokenizer, input_ids=before.prompt_end or None, calls_before=calls)
        try:
            return _Draft(follow(before, answer), index + 1, index, earlier)
        except Stopped as stopped:
            raise _Ended(Ending(index, stopped.reason, before.turns - before.turn - 1, earlier)) from None

    def _replayed(self, conversation: Conversation, row: int, made: Sequence[Made]) -> "_Draft":
        """The turn behind those that have been made already. Raises _Ended, BadRow."""
        draft = _Draft(conversation, index_of(row, 0))
        for turn, answer in enumerate(made):
            now, index = draft.conversation, index_of(row, turn)
            input_ids = prompt_ids(now.prompt, self.dataset, self.tokenizer)
            if crc32(msgspec.json.encode(input_ids)) != answer.prompt_crc32:
                last = len(made) - 1
                raise _Ended(Ending(index_of(row, last), "other_prompt", max(1, now.turns - len(made)), last))
            now = msgspec.structs.replace(now, prompt_end=input_ids[-PROMPT_END:])
            draft = self._follow(now, index, answer.output_ids, turn)
        return draft

    def _prepare(
        self, drafts: Sequence["_Draft"], ready: Sequence[Ready]
    ) -> tuple[list[NextTurn | Ending], list[Reject]]:
        by_index = {draft.index: draft for draft in drafts}
        asked = [Ready(draft.index, draft.conversation.prompt) for draft in drafts]
        chunk = prepare([*asked, *ready], self.dataset, self.tokenizer, self.limits, self.packer)
        turns: list[NextTurn | Ending] = [
            self._turn(index, payload, by_index.get(index), chunk) for index, payload in chunk.samples
        ]
        rejects: list[Reject] = []
        for reject in chunk.rejects:
            draft = by_index.get(reject.index)
            if draft is None or draft.follows is None:
                rejects.append(reject)
            else:
                left = draft.conversation.turns - draft.conversation.turn
                turns.append(Ending(draft.follows, reject.reason, left, draft.earlier))
        return turns, rejects

    def _turn(self, index: int, payload: bytes, draft: "_Draft | None", chunk: Chunk) -> NextTurn:
        tokens = chunk.prompts[index] if self.dataset.count == "total" else 0
        if draft is None:
            return NextTurn(index, payload, b"", tokens)
        now = draft.conversation
        is_last = now.turn + 1 == now.turns
        packed = b"" if is_last else msgspec.structs.replace(now, prompt_end=chunk.prompt_ends[index]).pack()
        return NextTurn(index, payload, packed, tokens, draft.follows, draft.earlier)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A turn to be prepared: behind the answer of the sample `follows`, which has `earlier` ones before it."""

    conversation: Conversation
    index: int
    follows: int | None = None
    earlier: int = 0


class _Ended(Exception):
    """A conversation does not go on."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending
