"""Reasoning in old answers, split from the answer: a template that is given it within the content doubles the tags."""

import re
from collections.abc import Mapping
from typing import Any

# Where a layout keeps reasoning beside the answer. SWE-agent's `thought` is none: it repeats the content.
_KEYS = ("reasoning_content", "reasoning", "thinking")
# What encloses reasoning at the head of an answer. The second pair is that of OpenThoughts-114k.
_TAGS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
_SPACE = re.compile(r"\s*")
_ANSWER, _ANSWER_END = "<|begin_of_solution|>", "<|end_of_solution|>"


def split_reasoning(turn: Mapping[str, Any], content: str, part: str = "") -> tuple[str, str]:
    """The reasoning of an assistant turn and its content without it; either may be empty.

    `part` is reasoning that stood in a content part of its own. Reasoning that is there twice is kept once. What a tag
    encloses loses the newlines at its ends, and the content those at its head, as Qwen3's own template does it. A tag
    that is never closed is an answer that was cut off while it was thinking: all of it is reasoning. A closing tag
    alone closes what the prompt opened. A tag within an answer is part of what was said, and stays.
    """
    within, rest = _enclosed(content)
    pieces: list[str] = []
    for piece in (_beside(turn), part, within):
        if piece.strip() and piece.strip() not in [earlier.strip() for earlier in pieces]:
            pieces.append(piece)
    return "\n".join(pieces), rest


def _beside(turn: Mapping[str, Any]) -> str:
    for key in _KEYS:
        value = turn.get(key)
        if isinstance(value, str) and value.strip():
            return value
    return ""


def _enclosed(content: str) -> tuple[str, str]:
    for opening, closing in _TAGS:
        if opening not in content and closing not in content:
            continue
        pieces: list[str] = []
        end = 0
        while content.startswith(opening, start := _behind_space(content, end)):
            start += len(opening)
            stop = content.find(closing, start)
            end = stop + len(closing) if stop >= 0 else len(content)
            pieces.append(content[start : stop if stop >= 0 else end].strip("\n"))
        if not pieces:
            stop = content.find(closing)
            if stop >= 0 and content.find(opening, 0, stop) < 0:
                end = stop + len(closing)
                pieces.append(content[:stop].strip("\n"))
        if pieces:
            return "\n".join(piece for piece in pieces if piece), _solution(content[end:].lstrip("\n"))
    return "", content


def _behind_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found  # it matches nothing at least
    return found.end()


def _solution(text: str) -> str:
    if not text.startswith(_ANSWER):
        return text
    return text[len(_ANSWER) :].strip("\n").removesuffix(_ANSWER_END).strip("\n")
