"""What is odd about an answer, by name; docs/quality.md says what each means, and what a gate makes of it.

Flags are facts: what follows from them is the gates' to say. Taken when an answer is accepted, before its record is
written; nothing here needs a tokenizer. What needs the model's Reading is left out where there is none.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from common.loops import copied_share, find_loop
from common.reading import Parts, Reading

_OUT_OF_PLACE = frozenset({"control_in_content", "think_reopened", "think_end_unopened"})
_OF_CALLS = frozenset({"unbalanced_tool_calls", "tool_call_not_json"})
_MIN_COPIED_SHARE = 0.75
# The last control token of a prompt says whether it opens a think block; it stands within so many ids of its end.
_PROMPT_END = 12
_PROMPT_END_BYTES = 12 * _PROMPT_END

Found = Iterator[tuple[str, Any]]


def flags_of(
    output_ids: Sequence[int], input_ids: bytes, reading: Reading | None, *, truncated: bool, asked_to_think: bool
) -> dict[str, Any]:
    """The flags of an accepted answer, each with what more there is to say of it (None: nothing).

    `input_ids` is the prompt as a JSON array. Without `asked_to_think` a model that does not think is not told of.
    Takes 0.1 to 0.2 ms for 1,000 ids (tests/benchmarks/flags.py).
    """
    found = dict(_of_ids(output_ids, input_ids))
    if reading is not None:
        parts = reading.parts(output_ids, prompt_end(input_ids), truncated=truncated)
        found |= dict(_of_parts(parts, truncated=truncated, thinks=asked_to_think and reading.thinks))
    return found


def prompt_end(input_ids: bytes) -> list[int]:
    """The last ids of a JSON array; a long one is not parsed for that."""
    tail = input_ids[-_PROMPT_END_BYTES:].strip().strip(b"[]").split(b",")
    whole = tail if len(input_ids) <= _PROMPT_END_BYTES else tail[1:]  # the first may be half a number
    return [int(one) for one in whole[-_PROMPT_END:] if one.strip()]


def _of_ids(output_ids: Sequence[int], input_ids: bytes) -> Found:
    if (loop := find_loop(output_ids)) is not None:
        yield "repetition", {"start": loop.start, "length": loop.length, "period": loop.period}
    if (share := copied_share(output_ids, input_ids)) >= _MIN_COPIED_SHARE:
        yield "copied_prompt", {"share": share}


def _of_parts(parts: Parts, *, truncated: bool, thinks: bool) -> Found:
    out_of_place = [one for one in parts.damages if one in _OUT_OF_PLACE]
    if out_of_place:
        yield "control_tokens", {"kinds": out_of_place}
    unclosed = "no_think_end" in parts.damages
    if unclosed:
        yield "no_think_end", None
    elif parts.reasoning is False and thinks:
        yield "empty_think", None
    elif parts.reasoning is None and thinks and "think_end_unopened" not in parts.damages:
        yield "no_think", None
    broken = [one for one in parts.damages if one in _OF_CALLS]
    if not truncated:
        yield from ((flag, None) for flag in broken)
    if not (parts.content or broken or parts.reasoning):
        yield "empty_answer", None
    elif not (parts.content or broken or unclosed):
        yield "think_only", None
    if parts.broken_share:
        yield "bad_text", {"share": parts.broken_share}
