"""Tokens in the text against tokens claimed, and what ids say when they are decoded: on a sample, by the tokenizer."""

import random
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.messages import BadPrompt
from producer.audit.rows import Seen
from producer.audit.tally import Counts, Lengths
from producer.datasets.layouts.calls import read_calls
from producer.datasets.reasons import BadRow

ROWS = 1_000
# Of one row: 1,000 rows take some 200 MB at the very most. Longer ones are left out, and counted.
_MOST_CHARACTERS = 200_000
_PROMPT_END = 4


class _Taken(msgspec.Struct):
    where: str
    texts: list[str]
    claimed: int | None
    finish_reason: str | None
    reasoned: bool
    ids: list[int] | None = None
    prompt_end: tuple[int, ...] = ()  # the last ids of the prompt, among which a think block is opened


class Sampled:
    """`rows` rows with an answer, each with the same chance (reservoir sampling; the seed is fixed)."""

    def __init__(self, rows: int = 0) -> None:
        """Without rows nothing is kept; that is for those who have no tokenizer."""
        self.wanted = rows
        self.offered = self.too_long = 0
        self._taken: list[_Taken] = []
        self._random = random.Random(0)

    def offer(self, seen: Seen, where: str) -> None:
        """Take the row, or not."""
        if not self.wanted or not (seen.said or seen.output_ids):
            return
        self.offered += 1
        place = len(self._taken) if len(self._taken) < self.wanted else self._random.randrange(self.offered)
        if place >= self.wanted:
            return
        texts = [text for one in seen.said for text in (one.reasoning, one.content, *_calls(one.calls)) if text]
        ids = list(seen.output_ids) if seen.output_ids is not None else None
        if sum(map(len, texts)) > _MOST_CHARACTERS or len(ids or ()) > _MOST_CHARACTERS:
            self.too_long += 1
            return
        taken = _Taken(
            where,
            texts,
            seen.claims.get("completion_tokens"),
            seen.finish_reason,
            any(s.reasoning for s in seen.said),
            ids,
            tuple((seen.input_ids or ())[-_PROMPT_END:]),
        )
        if place == len(self._taken):
            self._taken.append(taken)
        else:
            self._taken[place] = taken

    def measure(self, tokenizer: Tokenizer) -> "Measured":
        """Tokenize what was taken."""
        measured = Measured()
        for one in self._taken:
            if one.ids is not None:
                _decode(measured, one, tokenizer)
            else:
                _encode(measured, one, tokenizer)
        return measured


class Measured:
    """Of the rows in the sample: tokens in their text, and those that they claim where they do."""

    def __init__(self) -> None:
        self.rows = self.refused = 0
        self.tokens = Lengths()
        self.both: list[tuple[int, int]] = []  # claimed, in the text
        self.counts = Counts()
        self.known: set[int] = set()

    @property
    def claimed_mean(self) -> float:
        return sum(one for one, _ in self.both) / len(self.both) if self.both else 0.0

    @property
    def text_mean(self) -> float:
        return sum(two for _, two in self.both) / len(self.both) if self.both else 0.0


def _calls(value: Any) -> list[str]:
    if not value:
        return []
    try:
        calls = [call["function"] for call in read_calls(value)]
        return [msgspec.json.encode(call).decode() for call in calls]
    except (BadRow, TypeError, ValueError, UnicodeError):
        return [str(value)]


def _encode(measured: Measured, one: _Taken, tokenizer: Tokenizer) -> None:
    try:
        tokens = sum(map(len, tokenizer.encode(one.texts)))
    except (BadPrompt, UnicodeError):
        measured.refused += 1
        return
    measured.rows += 1
    # What is not in a text: the mark behind the reasoning, and the end token of what has ended.
    tokens += one.reasoned + (one.finish_reason != "length")
    if hash(tuple(one.texts)) not in measured.known:  # answers that are alike are of one length without being cut
        measured.known.add(hash(tuple(one.texts)))
        measured.tokens.add(tokens)
    if one.claimed is not None:
        measured.both.append((one.claimed, tokens))


def _decode(measured: Measured, one: _Taken, tokenizer: Tokenizer) -> None:
    assert one.ids is not None
    measured.rows += 1
    measured.tokens.add(len(one.ids))
    if any(not 0 <= token_id < tokenizer.vocab_size for token_id in one.ids):
        measured.counts.add("out_of_range", one.where)
        return
    control, ends = set(tokenizer.control_ids.values()), tokenizer.special_ids.end
    if one.finish_reason != "length" and (not one.ids or one.ids[-1] not in ends):
        measured.counts.add("no_end", one.where)
    inner = one.ids[:-1]
    if any(token_id in ends for token_id in inner):
        measured.counts.add("end_within", one.where)
    think, think_end = tokenizer.special_ids.think, tokenizer.special_ids.think_end
    if think_end is not None:
        times = one.ids.count(think_end)
        opened = think in one.prompt_end and think_end not in one.prompt_end
        kind = "unclosed" if opened and not times else ("no_think_end", "think_end", "think_end_again")[min(times, 2)]
        measured.counts.add(kind, one.where)
    text = tokenizer.decode([token_id for token_id in one.ids if token_id not in control])
    if "\ufffd" in text:
        measured.counts.add("replacement", one.where)
