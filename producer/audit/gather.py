"""Goes through the rows of one source, once, and keeps what the findings need."""

import functools
import itertools
import re
from array import array
from collections import Counter
from pathlib import Path

from common.errors import DataError
from producer.audit.rows import NotData, Said, Seen, is_empty, see, text_of
from producer.audit.tally import Counts, Digests, Lengths, digest_of, joined
from producer.audit.texts import damages_of, damages_of_answer, thoughts_in
from producer.audit.tokens import Sampled
from producer.datasets.containers import MAX_ROW_BYTES, Cursor, Row, read_rows
from producer.datasets.reasons import BadRow

# Answers below so many characters are equal by their nature: yes, no, a number.
_LEAST_COMPARED = 64
_MOST = 2**32 - 1
_TIMED_OUT = re.compile(r"time[d\s-]*out|deadline", re.IGNORECASE)


class Gathered:
    """What was seen of one source. `fault` says why it could not be read to its end, if so."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rows = self.bytes = 0
        self.fault = ""
        self.layouts: Counter[str] = Counter()
        self.broken, self.notes, self.damages, self.roles = Counts(), Counts(), Counts(), Counts()
        self.finish_reasons: Counter[str] = Counter()
        # Of rows that have an answer.
        self.answers = self.reasoned = self.empty_fields = self.in_content = 0
        self.characters, self.reasoning_characters = Lengths(), Lengths()
        self.claimed, self.id_tokens = Lengths(), Lengths()
        self.cut_claimed = Lengths()  # of those that ended by length
        self.empty_claimed = Lengths()  # of those without reasoning
        self.prompts, self.replies, self.pairs = Digests(), Digests(), Digests()
        self.tokens, self.sizes = array("I"), array("I")  # of each row, ids or claimed; characters; 0 is none
        self.numbers = Numbers()
        self.longest_seconds = 0.0
        self.sampled = Sampled()


class Numbers:
    """The numbers that rows have, as far as it takes to see that some are missing."""

    def __init__(self) -> None:
        self.count, self.low, self.high = 0, 0, -1

    def add(self, number: int) -> None:
        """Take the number of a row."""
        self.low = number if not self.count else min(self.low, number)
        self.high = max(self.high, number)
        self.count += 1

    @property
    def missing(self) -> int:
        """How many are not there between the lowest and the highest; 0 where that says nothing.

        Numbers that are mostly not there are those of a selection, and none of a row that was lost.
        """
        span = self.high - self.low + 1
        lost = span - self.count
        return lost if self.count >= 20 and 0 < lost <= 0.4 * span else 0


def gather(source: str | Path, sampled: Sampled | None = None, max_row_bytes: int = MAX_ROW_BYTES) -> Gathered:
    """Read all rows of `source`. Raises OSError, and DataError if not a single row can be read."""
    seen = Gathered(str(source))
    if sampled is not None:
        seen.sampled = sampled
    try:
        for row in read_rows(source, Cursor(), max_row_bytes):
            _take(seen, row)
    except (OSError, DataError) as error:
        if not seen.rows:
            raise
        seen.fault = str(error)
    return seen


def _take(gathered: Gathered, row: Row) -> None:
    where = f"row {row.index:,}"
    gathered.rows += 1
    gathered.bytes += row.size
    try:
        seen = see(row.value)
    except NotData as other:
        gathered.notes.add(other.kind, where)
    except BadRow as bad:
        gathered.broken.add(bad.reason, f"{where}: {bad.detail}")
    else:
        _take_seen(gathered, seen, where)
        return
    for digests in (gathered.prompts, gathered.replies, gathered.pairs):
        digests.add(0)
    gathered.tokens.append(0)
    gathered.sizes.append(0)


def _take_seen(gathered: Gathered, seen: Seen, where: str) -> None:
    gathered.layouts[seen.layout] += 1
    if seen.finish_reason:
        gathered.finish_reasons[seen.finish_reason] += 1
    _take_notes(gathered, seen, where)
    if seen.roles and not seen.unanswered:
        for fault in role_faults(seen):
            gathered.roles.add(fault, where)
    _take_digests(gathered, seen, where)
    if seen.output_ids is not None:
        _take_ids(gathered, seen, where)
    elif seen.said and not seen.error:
        _take_answer(gathered, seen, where)
    _take_damages(gathered, seen, where)
    if not seen.error:
        gathered.sampled.offer(seen, where)


def _take_notes(gathered: Gathered, seen: Seen, where: str) -> None:
    """What the row itself says, beside its answer."""
    if seen.number is not None:
        gathered.numbers.add(seen.number)
    if seen.seconds is not None:
        gathered.longest_seconds = max(gathered.longest_seconds, seen.seconds)
    if seen.error:
        timed_out = _TIMED_OUT.search(seen.error) is not None
        gathered.notes.add("timed_out" if timed_out else "failed", f"{where}: {seen.error[:160]}")
    if seen.unread is not None:
        gathered.notes.add("prompt_unread", f"{where}: {seen.unread.detail}")
    if seen.mask:
        gathered.notes.add(seen.mask, where)


def _take_ids(gathered: Gathered, seen: Seen, where: str) -> None:
    assert seen.output_ids is not None
    gathered.answers += 1
    gathered.id_tokens.add(len(seen.output_ids))
    claimed, claimed_prompt = seen.claims.get("completion_tokens"), seen.claims.get("prompt_tokens")
    if claimed is not None:
        gathered.claimed.add(claimed)
        if seen.finish_reason == "length":
            gathered.cut_claimed.add(claimed)
        if claimed != len(seen.output_ids):
            gathered.notes.add("ids_not_as_counted", f"{where}: {claimed:,} claimed, {len(seen.output_ids):,} ids")
    if claimed_prompt is not None and seen.input_ids is not None and claimed_prompt != len(seen.input_ids):
        gathered.notes.add(
            "prompt_ids_not_as_counted", f"{where}: {claimed_prompt:,} claimed, {len(seen.input_ids):,} ids"
        )
    if not seen.output_ids:
        gathered.notes.add("empty", where)


def _take_answer(gathered: Gathered, seen: Seen, where: str) -> None:
    gathered.answers += 1
    said = seen.said[0]
    reasoning, content = thoughts_in(said)
    thought = bool(reasoning.strip())
    gathered.reasoned += thought
    gathered.in_content += thought and not said.reasoning.strip()
    gathered.empty_fields += said.field and not thought
    gathered.characters.add(sum(len(one.content) + len(one.reasoning) for one in seen.said))
    if thought:
        gathered.reasoning_characters.add(len(reasoning))
    if said.empty:
        gathered.notes.add("empty", where)
    elif thought and not content.strip() and not said.calls:
        gathered.notes.add("think_only", where)
    if not thought and not said.empty:
        gathered.notes.add("no_reasoning", where)
    claimed = seen.claims.get("completion_tokens")
    if claimed is None:
        return
    gathered.claimed.add(claimed)
    if seen.finish_reason == "length":
        gathered.cut_claimed.add(claimed)
    if not thought:
        gathered.empty_claimed.add(claimed)
        if seen.claims.get("reasoning_tokens"):
            gathered.notes.add("reasoning_counted", f"{where}: {seen.claims['reasoning_tokens']:,} reasoning_tokens")
    # Every token but a control token is a byte at least: fewer bytes than tokens, and some of the text is not there.
    size = sum(_size(one.content) + _size(one.reasoning) for one in seen.said)
    if not said.calls and not said.empty and claimed > size + 16:
        gathered.notes.add("more_tokens_than_bytes", f"{where}: {claimed:,} tokens claimed, {size:,} bytes of text")


def _take_digests(gathered: Gathered, seen: Seen, where: str) -> None:
    asked = told = b""
    try:
        if seen.input_ids is not None:
            asked = array("I", seen.input_ids).tobytes()
        if seen.output_ids is not None:
            told = array("I", seen.output_ids).tobytes() if len(seen.output_ids) > _LEAST_COMPARED // 4 else b""
    except OverflowError:
        gathered.notes.add("not_ids", where)
    if seen.input_ids is None and seen.turns:
        asked = seen.prompt.encode("utf-8", "surrogatepass")
    if seen.output_ids is None and seen.said and not seen.said[0].calls:
        text = f"{seen.said[0].reasoning}\0{seen.said[0].content}"
        told = text.encode("utf-8", "surrogatepass") if len(text) > _LEAST_COMPARED else b""
    prompt, reply = digest_of(asked), digest_of(told)
    gathered.prompts.add(prompt)
    gathered.replies.add(reply)
    gathered.pairs.add(joined(prompt, reply))
    tokens = seen.claims.get("completion_tokens", 0) if seen.output_ids is None else len(seen.output_ids)
    gathered.tokens.append(min(tokens, _MOST))
    gathered.sizes.append(min(_MOST, sum(len(one.content) + len(one.reasoning) for one in seen.said)))


def _take_damages(gathered: Gathered, seen: Seen, where: str) -> None:
    found: set[str] = set()
    for said in seen.said:
        found.update(damages_of_answer(said))
        found.update(damages_of(said.content))
        if said.reasoning:
            found.update(damages_of(said.reasoning))
    if "think_unclosed" in found and seen.finish_reason == "length":
        found.discard("think_unclosed")  # it was cut off while it was thinking, which is told as that
    asked: set[str] = set()
    for turn in seen.turns:
        asked.update(damages_of(text_of(turn.raw)))
        if turn.role == "assistant":
            asked.update(damages_of_answer(Said(text_of(turn.raw), calls=turn.raw.get("tool_calls"))))
    for one in sorted(found):
        gathered.damages.add(one, where)
    for one in sorted(asked - found - {"think_end_alone"}):
        gathered.damages.add(f"prompt:{one}", where)


def role_faults(seen: Seen) -> list[str]:
    """What is wrong with the order of turns."""
    found = list(_order_faults(tuple(seen.roles)))
    if any(is_empty(turn) for turn in seen.turns):
        found.append("empty_turn")
    return found


@functools.lru_cache(maxsize=4096)
def _order_faults(roles: tuple[str, ...]) -> tuple[str, ...]:
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
        "no_answer": roles[-1] != "assistant",
    }
    return tuple(name for name, there in faults.items() if there)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
