"""An answer's ids, cut at its marks: where they have ids by these, else by their text."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from common.answer_layout import THINK, THINK_END, Layout

Decode = Callable[[Sequence[int]], str]


class Piece(NamedTuple):
    """`ids[start:stop]` and its text; `mark` if it is a control token, or stands for one.

    A mark of plain text has the ids that hold any part of it; the texts of its neighbours may end or begin there.
    """

    start: int
    stop: int
    text: str
    mark: bool


def pieces_of(ids: Sequence[int], layout: Layout, decode: Decode, *, thinking: bool) -> Iterator[Piece]:
    """The pieces of an answer, in order; `thinking` says that it begins within a think block.

    A control token ends a stretch of text and nothing else does, unless marks are text in this tokenizer.
    """
    control = layout.control
    start = 0
    by_text = layout.tags is not None or not layout.think_by_id
    for at in itertools.chain(itertools.compress(range(len(ids)), map(control.__contains__, ids)), [len(ids)]):
        if start < at:
            text = decode(ids[start:at])
            if by_text:
                tags = _tags(text, layout, thinking=thinking, first=start == 0)
                for _, _, mark in tags:
                    thinking = mark == THINK if mark in {THINK, THINK_END} else thinking
                yield from _cut(ids[start:at], text, tags, decode, start)
            else:
                yield Piece(start, at, text, mark=False)
        if at < len(ids):
            name = control[ids[at]]
            thinking = name == THINK if name in {THINK, THINK_END} else thinking
            yield Piece(at, at + 1, name, mark=True)
        start = at + 1


def _tags(text: str, layout: Layout, *, thinking: bool, first: bool) -> list[tuple[int, int, str]]:
    """The marks in a text as (start, end, mark).

    A think block opens at the head of an answer and closes once: further on `</think>` is what the model says.
    """
    tags: list[tuple[int, int, str]] = []
    at = 0
    if not layout.think_by_id:
        if first and not thinking and text.lstrip().startswith(THINK):
            at = text.find(THINK) + len(THINK)
            tags.append((at - len(THINK), at, THINK))
            thinking = True
        if thinking:
            end = text.find(THINK_END, at)
            at = end + len(THINK_END) if end >= 0 else len(text)
            if end >= 0:
                tags.append((end, at, THINK_END))
    elif thinking:
        return tags
    if layout.tags is not None:
        tags += [(*found.span(), found[0]) for found in layout.tags.finditer(text, at)]
    return tags


def _cut(
    ids: Sequence[int], text: str, tags: list[tuple[int, int, str]], decode: Decode, offset: int
) -> Iterator[Piece]:
    """The ids of `text`, cut at tags in it; `offset` is the place of the first id."""
    at = behind = 0
    for start, end, mark in tags:
        first = max(behind, _ids_up_to(start + 1, ids, text, decode) - 1)
        if at < start:
            yield Piece(offset + behind, offset + first, text[at:start], mark=False)
        at, behind = end, max(first, _ids_up_to(end, ids, text, decode))
        yield Piece(offset + first, offset + behind, mark, mark=True)
    if at < len(text) or behind < len(ids):
        yield Piece(offset + behind, offset + len(ids), text[at:], mark=False)


def _ids_up_to(end: int, ids: Sequence[int], text: str, decode: Decode) -> int:
    """How many ids it takes until `text[:end]` is there: that many, and more, decode to a text that begins with it."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if decode(ids[:middle]).startswith(text[:end]):
            high = middle
        else:
            low = middle + 1
    return low
