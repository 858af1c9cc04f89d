"""What the names of a row's columns alone say of it: told once for all rows with the same columns.

Rows of a few hundred bytes are many, and to look for some eighty names in each took a quarter of an audit's time.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from producer.audit.answer_objects import CLAIMING
from producer.datasets.layouts.catalog import LAYOUTS, Layout
from producer.datasets.layouts.turns import MEDIA_COLUMNS

# Where a flat row keeps its answer, and the reasoning beside it; the first that is there counts.
ANSWERS = (
    *("content", "response", "answer", "output", "completion", "completions", "generated_text", "solution"),
    *("model_output", "prediction", "gemini_attempt", "chosen", "output_text", "generation"),
)
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "gemini_thinking_trajectory", "thought")
_NUMBERS = ("index", "idx", "row", "row_index", "custom_id", "id", "request_id")
_SECONDS = ("latency_seconds", "latency", "elapsed_seconds", "elapsed", "duration_seconds", "e2e_latency")
_ENDS = ("finish_reason", "stop_reason")
_OBJECTS = frozenset({"response", "custom_id", "object", "choices", "meta_info"})
# The columns without which a row does not fit a layout; its own name where it is not here.
_COLUMNS = {
    "glaive": {"chat"},
    "swe_agent": {"history"},
    "trajectory": {"trajectory", "traj"},
    "ultrachat": {"data"},
    "bfcl": {"question"},
    "magicoder": {"instruction", "problem"},
    "alpaca": {"instruction"},
    "opencode": {"output"},
    "openorca": {"system_prompt"},
}
# Shapes that are kept: a file may have other columns in every row.
_MOST, _MOST_COLUMNS, _MOST_CHARACTERS = 1_000, 64, 2_000


class Shape(msgspec.Struct, frozen=True):
    """Of the columns of a row: those that count, in their order of preference, and what they may hold."""

    not_data: str  # void or reject, for lines of ours that are no rows
    may_be_object: bool
    has_ids: bool
    may_claim: bool
    may_end: bool
    is_noted: bool  # it has an error, a number, seconds or a finish reason
    is_request: bool  # a line of the input of the batch API
    may_have_media: bool  # in columns of its own
    has_flags: bool
    answers: tuple[str, ...]
    reasoning: tuple[str, ...]
    number: str
    seconds: str
    layouts: tuple[Layout, ...]  # that it may fit


_known: dict[tuple[str, ...], Shape] = {}


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape of a row with these columns."""
    columns = tuple(row)
    shape = _known.get(columns)
    if shape is None:
        shape = _made(columns)
        if len(columns) <= _MOST_COLUMNS and sum(map(len, columns)) <= _MOST_CHARACTERS:
            if len(_known) >= _MOST:
                _known.clear()
            _known[columns] = shape
    return shape


def _made(columns: tuple[str, ...]) -> Shape:
    names = frozenset(columns)
    not_data = "void" if names == {"void"} else "reject" if names >= {"reason", "detail", "index"} else ""
    return Shape(
        not_data=not_data,
        may_be_object=not names.isdisjoint(_OBJECTS),
        has_ids="input_ids" in names,
        may_claim=not names.isdisjoint(CLAIMING),
        may_end=not names.isdisjoint(_ENDS),
        is_noted=not names.isdisjoint({"error", *_ENDS, *_NUMBERS, *_SECONDS}),
        is_request=names >= {"custom_id", "body"} and names.isdisjoint({"response", "messages"}),
        may_have_media=not names.isdisjoint(MEDIA_COLUMNS),
        has_flags="flags" in names,
        answers=tuple(name for name in ANSWERS if name in names),
        reasoning=tuple(name for name in REASONING if name in names),
        number=next((name for name in _NUMBERS if name in names), ""),
        seconds=next((name for name in _SECONDS if name in names), ""),
        layouts=tuple(one for one in LAYOUTS if not names.isdisjoint(_COLUMNS.get(one.name, {one.name}))),
    )
