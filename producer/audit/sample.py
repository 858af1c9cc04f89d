"""The rows of a source that are tokenized, each with the same chance, whatever processes read it.

Each row draws a number, and those with the lowest are the sample. So a part of a source needs to keep no more rows than
are wanted, and none above what is known to be too high already. The seed of each part is its place in the source: the
same rows are drawn each time.
"""

import random
from typing import Any

import msgspec

from producer.audit.rows import Seen
from producer.datasets.layouts.calls import read_calls
from producer.datasets.reasons import BadRow

ROWS = 1_000
# Of one row: 1,000 rows take some 200 MB at the very most. Longer ones are left out, and counted.
_MOST_CHARACTERS = 200_000
_PROMPT_END = 4


class Taken(msgspec.Struct):
    """What is needed of a row to tokenize it; `texts` is None for a row that is too long."""

    index: int
    texts: list[str] | None
    claimed: int | None
    finish_reason: str | None
    reasoned: bool
    ids: list[int] | None = None
    cut: bool = False
    prompt_end: tuple[int, ...] = ()  # the last ids of the prompt, among which a think block is opened


class Candidates:
    """Of the rows that were offered, the `wanted` that drew the lowest numbers, if these are below `below`."""

    def __init__(self, wanted: int = 0, below: float = 1.0, seed: int = 0) -> None:
        """Without rows nothing is kept; that is for those who have no tokenizer."""
        self.wanted, self.below = wanted, below
        self.drawn: list[tuple[float, Taken]] = []
        self._random = random.Random(seed).random

    def offer(self, seen: Seen, index: int) -> None:
        """Take the row, or not."""
        if not (seen.said or seen.output_ids):
            return
        number = self._random()
        if number >= self.below:
            return
        self.drawn.append((number, _taken(seen, index)))
        if len(self.drawn) >= 2 * self.wanted:
            self._let_go()

    def merge(self, later: "Candidates", base: int) -> None:
        """Take those of a part that begins with row `base`."""
        for number, taken in later.drawn:
            taken.index += base
            self.drawn.append((number, taken))
        self._let_go()

    def rows(self) -> list[Taken]:
        """Those that were chosen, in the order of their rows."""
        self._let_go()
        return sorted((taken for _, taken in self.drawn), key=lambda one: one.index)

    def _let_go(self) -> None:
        if len(self.drawn) >= self.wanted:
            self.drawn = sorted(self.drawn, key=lambda one: one[0])[: self.wanted]
            self.below = self.drawn[-1][0] if self.drawn else 0.0


def _taken(seen: Seen, index: int) -> Taken:
    texts: list[str] | None
    texts = [text for one in seen.said for text in (one.reasoning, one.content, *_calls(one.calls)) if text]
    ids = list(seen.output_ids) if seen.output_ids is not None else None
    if sum(map(len, texts)) > _MOST_CHARACTERS or len(ids or ()) > _MOST_CHARACTERS:
        texts = ids = None
    return Taken(
        index,
        texts,
        seen.claims.get("completion_tokens"),
        seen.finish_reason,
        any(one.reasoning for one in seen.said),
        ids,
        seen.cut,
        tuple((seen.input_ids or ())[-_PROMPT_END:]),
    )


def _calls(value: Any) -> list[str]:
    if not value:
        return []
    try:
        calls = [call["function"] for call in read_calls(value)]
        return [msgspec.json.encode(call).decode() for call in calls]
    except (BadRow, TypeError, ValueError, UnicodeError):
        return [str(value)]
