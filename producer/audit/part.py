"""What is seen of a stretch of rows of a source, row by row.

Parts are gathered by processes that load no more than they need, and merged in the order of the file (gather.py). So a
part counts rows from its own first one, and what depends on the order of rows is kept in that order.
"""

import functools
import itertools
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from producer.audit.counts import Counts
from producer.audit.rows import NotData, Said, Seen, has_only_text, see, text_of, whole_of
from producer.audit.sample import Candidates
from producer.audit.texts import damages_of, damages_of_answer, may_be_damaged, thoughts_in
from producer.datasets.layouts.turns import Turn, is_media
from producer.datasets.reasons import BadRow

if TYPE_CHECKING:
    from common.errors import DataError

# Answers below so many characters are equal by their nature: yes, no, a number.
_LEAST_COMPARED = 64
_MOST = 2**32 - 1
_MOST_KEPT = 64  # turns of a conversation whose order is remembered: of longer ones no two are alike
_MOST_CHARACTERS = 40  # of a finish_reason
_TIMED_OUT = re.compile(r"time[d\s-]*out|deadline", re.IGNORECASE)


class Part:
    """What was seen of some rows of one source, one after the other. Lengths are lists, one of each row that has it."""

    def __init__(self, candidates: Candidates, file: int = 0) -> None:
        self.file = file
        self.error: OSError | DataError | None = None  # why there are no more rows, if they could not be read
        self.rows = self.bytes = 0
        self.layouts: Counter[str] = Counter()
        self.broken, self.notes, self.damages, self.roles = Counts(), Counts(), Counts(), Counts()
        self.silent = Counts()  # rows that end with no answer, by layout
        self.finish_reasons: Counter[str] = Counter()
        # Of rows that have an answer.
        self.answers = self.reasoned = self.empty_fields = self.in_content = self.ids_claimed = 0
        self.characters: list[int] = []
        self.reasoning_characters: list[int] = []
        self.claimed: list[int] = []
        self.cut_claimed: list[int] = []  # of those that ended by length
        self.id_tokens: list[int] = []
        # By row; 0 is none: digests of prompt and reply, ids or tokens claimed, characters.
        self.prompts, self.replies = array("q"), array("q")
        self.tokens, self.sizes = array("I"), array("I")
        self.numbers: list[int] = []
        self.longest_seconds = 0.0
        self.candidates = candidates

    def take(self, value: Any, size: int) -> None:
        """Take the next row, as a container gives it, of so many bytes."""
        index = self.rows
        self.rows += 1
        self.bytes += size
        try:
            seen = see(value)
        except NotData as other:
            self.notes.add(other.kind, index)
        except BadRow as bad:
            self.broken.add(bad.reason, index, bad.detail)
        else:
            _take(self, seen, index)
            return
        self.prompts.append(0)
        self.replies.append(0)
        self.tokens.append(0)
        self.sizes.append(0)


class _Asked(msgspec.Struct):
    """The texts of the turns of a row; those of them that have none; and whether some are in parts, or are no texts."""

    texts: list[str]
    blank: list[Turn]
    in_parts: bool = False
    media: bool = False


def _asked(seen: Seen) -> _Asked:
    asked = _Asked([], [])
    for turn in seen.turns:
        text = turn.raw.get("content")
        if type(text) is not str:
            if isinstance(text, list):
                asked.in_parts = True
                asked.media = asked.media or any(isinstance(one, dict) and is_media(one) for one in text)
            text = text_of(turn.raw)
        asked.texts.append(text)
        if not text or text.isspace():
            asked.blank.append(turn)
    return asked


def _take(part: Part, seen: Seen, index: int) -> None:
    asked = _asked(seen)
    part.layouts[seen.layout] += 1
    _take_notes(part, seen, index, media=asked.media or seen.media)
    if seen.roles and not seen.unanswered:
        for fault in (_order_faults if len(seen.roles) <= _MOST_KEPT else _look_for_faults)(tuple(seen.roles)):
            part.roles.add(fault, index)
        if asked.blank and any(map(has_only_text, asked.blank)):
            part.roles.add("empty_turn", index)
    size = 0
    for said in seen.said:
        size += len(said.content) + len(said.reasoning)
    _take_digests(part, seen, asked, size, index)
    if seen.output_ids is not None:
        _take_ids(part, seen, index)
    elif seen.said and not seen.error:
        _take_answer(part, seen, size, index)
    elif not (seen.error or seen.mask):
        part.silent.add(seen.layout, index)
    if _may_be_damaged(seen, asked.texts):
        _take_damages(part, seen, asked.texts, index)
    if part.candidates.wanted and not seen.error:
        part.candidates.offer(seen, index)


def _take_notes(part: Part, seen: Seen, index: int, *, media: bool) -> None:
    """What the row itself says, beside its answer."""
    if seen.finish_reason:
        reason = "cut" if seen.cut and seen.finish_reason == "length" else seen.finish_reason[:_MOST_CHARACTERS]
        part.finish_reasons[reason] += 1
    if seen.number is not None:
        part.numbers.append(seen.number)
    if seen.seconds is not None:
        part.longest_seconds = max(part.longest_seconds, seen.seconds)
    if seen.error:
        timed_out = _TIMED_OUT.search(seen.error) is not None
        part.notes.add("timed_out" if timed_out else "failed", index, seen.error[:160])
    if seen.unread is not None:
        part.notes.add("prompt_unread", index, seen.unread.detail)
    if seen.mask and not (seen.cut and seen.mask == "mask_learns_prompt"):
        part.notes.add(seen.mask, index)
    if seen.cut:
        part.notes.add("cut", index)
    if media:
        part.notes.add("media", index)


def _take_ids(part: Part, seen: Seen, index: int) -> None:
    assert seen.output_ids is not None
    part.answers += 1
    part.id_tokens.append(len(seen.output_ids))
    claimed, claimed_prompt = seen.claims.get("completion_tokens"), seen.claims.get("prompt_tokens")
    if claimed is not None:
        part.claimed.append(claimed)
        part.ids_claimed += 1
        if seen.finish_reason == "length" and not seen.cut:
            part.cut_claimed.append(claimed)
        if claimed != len(seen.output_ids) and not seen.cut:
            part.notes.add("ids_not_as_counted", index, f"{claimed:,} claimed, {len(seen.output_ids):,} ids")
    if claimed_prompt is not None and seen.input_ids is not None and claimed_prompt != len(seen.input_ids):
        detail = f"{claimed_prompt:,} claimed, {len(seen.input_ids):,} ids"
        part.notes.add("prompt_ids_not_as_counted", index, detail)
    if not seen.output_ids:
        part.notes.add("empty", index)


def _take_answer(part: Part, seen: Seen, size: int, index: int) -> None:
    part.answers += 1
    said = seen.said[0]
    reasoning, content = thoughts_in(said)
    thought = bool(reasoning) and not reasoning.isspace()
    part.characters.append(size)
    if thought:
        part.reasoned += 1
        part.in_content += not said.reasoning.strip()
        part.reasoning_characters.append(len(reasoning))
        if not (said.calls or content.strip()):
            part.notes.add("think_only", index)
    else:
        part.empty_fields += said.field
        part.notes.add("empty" if said.empty else "no_reasoning", index)
    claimed = seen.claims.get("completion_tokens")
    if claimed is None:
        return
    part.claimed.append(claimed)
    if seen.finish_reason == "length":
        part.cut_claimed.append(claimed)
    if not thought and seen.claims.get("reasoning_tokens"):
        part.notes.add("reasoning_counted", index, f"{seen.claims['reasoning_tokens']:,} reasoning_tokens")
    # Every token but a control token is a byte at least: fewer bytes than tokens, and some of the text is not there.
    if claimed > size + 16 and not said.calls and not said.empty:
        held = sum(_bytes_of(one.content) + _bytes_of(one.reasoning) for one in seen.said)
        if claimed > held + 16:
            part.notes.add("more_tokens_than_bytes", index, f"{claimed:,} tokens claimed, {held:,} bytes of text")


def _take_digests(part: Part, seen: Seen, asked: _Asked, size: int, index: int) -> None:
    """By hash(), which takes a tenth of the time of a BLAKE2: all parts of an audit are made with one hash seed."""
    prompt = reply = tokens = 0
    if seen.input_ids is not None or seen.output_ids is not None:
        prompt, reply = _digests_of_ids(part, seen, index)
    if seen.input_ids is None and (texts := asked.texts):
        if asked.in_parts:
            texts = [whole_of(turn.raw) for turn in seen.turns]
        if len(texts) == 1:
            prompt = (hash(texts[0]) or 1) if texts[0] else 0
        else:
            prompt = hash((*[turn.role for turn in seen.turns], *texts)) or 1
    if seen.output_ids is not None:
        tokens = len(seen.output_ids)
    elif seen.said:
        said = seen.said[0]
        if not said.calls and len(said.content) + len(said.reasoning) + 1 > _LEAST_COMPARED:
            reply = hash((said.reasoning, said.content)) or 1
        if seen.claims:
            tokens = seen.claims.get("completion_tokens", 0)
    part.prompts.append(prompt)
    part.replies.append(reply)
    part.tokens.append(0 if seen.cut else tokens)
    part.sizes.append(min(_MOST, size))


def _digests_of_ids(part: Part, seen: Seen, index: int) -> tuple[int, int]:
    """Of the prompt, and of the reply; 0 for what is none, or is too short."""
    prompt = reply = 0
    try:
        if seen.input_ids:
            prompt = hash(array("I", seen.input_ids).tobytes()) or 1
        if seen.output_ids is not None and len(seen.output_ids) > _LEAST_COMPARED // 4:
            reply = hash(array("I", seen.output_ids).tobytes()) or 1
    except OverflowError:
        part.notes.add("not_ids", index)
    return prompt, reply


def _may_be_damaged(seen: Seen, texts: Sequence[str]) -> bool:
    """Whether any text of a row has what damage is made of. Most have not, and one search for all is soon done."""
    if len(texts) == len(seen.said) == 1:
        said = seen.said[0]
        return may_be_damaged(f"{texts[0]}\n{said.content}\n{said.reasoning}")
    whole = list(texts)
    for said in seen.said:
        whole += said.content, said.reasoning
    return may_be_damaged("\n".join(whole))


def _take_damages(part: Part, seen: Seen, texts: Sequence[str], index: int) -> None:
    found: list[str] = []
    for said in seen.said:
        found += damages_of_answer(said)
        found += damages_of(said.content)
        if said.reasoning:
            found += damages_of(said.reasoning)
    asked: list[str] = []
    for turn, text in zip(seen.turns, texts, strict=True):
        asked += damages_of(text)
        if turn.role == "assistant":
            asked += damages_of_answer(Said(text, calls=turn.raw.get("tool_calls")))
    if not (found or asked):
        return
    told = {*found}
    if seen.finish_reason == "length":
        told.discard("think_unclosed")  # it was cut off while it was thinking, which is told as that
    for one in sorted(told):
        part.damages.add(one, index)
    for one in sorted({*asked} - told - {"think_end_alone"}):
        part.damages.add(f"prompt:{one}", index)


def _look_for_faults(roles: tuple[str, ...]) -> tuple[str, ...]:
    pairs = set(itertools.pairwise(roles))
    turns = [role for role in roles if role != "system"]
    system = roles.index(turns[0]) if turns else len(roles)  # how many stand at the head
    faults = {
        "starts_with_assistant": turns[:1] == ["assistant"],
        "no_user": "user" not in roles,
        "user_twice": ("user", "user") in pairs,
        "assistant_twice": ("assistant", "assistant") in pairs,
        "late_system": "system" in roles[system:],
        "tool_without_call": not pairs.isdisjoint({("user", "tool"), ("system", "tool")}),
    }
    return tuple(name for name, there in faults.items() if there)


_order_faults = functools.lru_cache(maxsize=4096)(_look_for_faults)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
