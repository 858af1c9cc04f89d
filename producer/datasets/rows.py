"""One row of a source to a prompt: a conversation to render, or ready ids. What is not right is rejected by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.sections import ColumnSettings, DatasetSettings
from producer.datasets.decoding import decoded
from producer.datasets.layouts.calls import Message
from producer.datasets.layouts.catalog import MESSAGE_LIST, Asked, find, layout_name, read_list
from producer.datasets.layouts.cuts import cut
from producer.datasets.layouts.ids import ready_ids
from producer.datasets.layouts.tools import Tool, read_tools
from producer.datasets.layouts.turns import Media, read_turns
from producer.datasets.reasons import REASONS, BadRow

__all__ = ["REASONS", "BadRow", "Prompt", "convert", "layout_of"]

_UNNAMED = vars(ColumnSettings())
_ID_COLUMNS = ("id", "prompt_id", "uuid", "task_id", "question_id")
_USUAL_COLUMNS = (*_ID_COLUMNS, "source", "category", "language", "domain", "difficulty")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row asks: a conversation, or the ids that stand for one; and the row's own id and labels.

    Where every turn of a conversation is made anew, this is number `turn`, counted from 0, of `turns`.
    """

    meta: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    input_ids: Sequence[int] | None = None
    turn: int | None = None
    turns: int | None = None


def convert(value: Any, dataset: DatasetSettings, *, whole: bool = False) -> Prompt:
    """The prompt of one row, cut as `dataset.turns` says; raises BadRow and nothing else.

    `value` is a line (bytes), a row that a library has decoded (an object or a list), or a BadLine of a container.
    `whole` leaves a conversation uncut, for those who cut it by `answered_turns`; it has an answer to ask for.
    """
    row = decoded(value)
    meta = _meta(row, dataset.meta) if isinstance(row, dict) else {}
    try:
        asked = _asked(row, dataset)
        if not isinstance(asked, Asked):
            return Prompt(meta, input_ids=asked)
        return Prompt(meta, *_conversation(asked, row if isinstance(row, dict) else {}, dataset, whole=whole))
    except BadRow as bad:
        bad.row_id = meta.get("id")
        raise


def layout_of(value: Any, dataset: DatasetSettings) -> str:
    """The layout by which a row of `dataset` is read, or "none"."""
    try:
        row = decoded(value)
        if isinstance(row, list):
            return layout_name(row)
        return find(_mapped(row, dataset.columns), dataset.format).name
    except BadRow:
        return "none"


def _asked(row: dict[str, Any] | list[Any], dataset: DatasetSettings) -> Asked | Sequence[int]:
    """What the row asks, as it stands in the row, or the ids that do."""
    if isinstance(row, list):
        if dataset.format not in {"auto", MESSAGE_LIST} or dataset.columns.asks:
            raise BadRow("no_prompt", "the row is a list, and the configuration says that it has columns")
        return read_list(row)
    if vars(dataset.columns) != _UNNAMED:
        row = _mapped(row, dataset.columns)
    layout = find(row, dataset.format)
    return ready_ids(row, dataset.turns) if layout.name == "input_ids" else layout.read(row)


def _mapped(row: dict[str, Any], columns: ColumnSettings) -> dict[str, Any]:
    """The row with the columns that the configuration names; where one of these is the prompt, no other counts."""
    mapped = {ours: row[theirs] for ours, theirs in columns if theirs is not None and theirs in row}
    if not columns.asks:
        return row | mapped
    if not columns.asks & mapped.keys():
        raise BadRow("no_prompt", "the row has none of the columns that the configuration names")
    return mapped


def _conversation(
    asked: Asked, row: Mapping[str, Any], dataset: DatasetSettings, *, whole: bool
) -> tuple[list[Message], list[Tool] | None]:
    """The messages up to the turn that asks, and the tools. What follows that turn is not even read."""
    roles = [turn.role for turn in asked.turns]
    end = cut(roles, "first" if asked.unanswered else dataset.turns)
    if end == 0:
        raise BadRow("no_user_turn")
    media = Media(row, drop=dataset.drop_media)
    messages = read_turns(asked.turns if whole else asked.turns[:end], media)
    if not whole and messages[-1]["role"] == "user" and not messages[-1]["content"].strip():
        if media.dropped:
            raise BadRow("not_text", f"no text is left in turn {end - 1} (user), which asks")
        raise BadRow("bad_messages", f"turn {end - 1} (user) asks with a blank text")
    system = asked.system or dataset.system
    if system and not any(turn["role"] == "system" and turn["content"].strip() for turn in messages):
        messages = [{"role": "system", "content": system}, *(turn for turn in messages if turn["role"] != "system")]
    return messages, read_tools(asked.tools)


def _meta(row: Mapping[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    """The row's own id and labels: the columns named in the configuration, else the usual ones that are there."""
    if columns is not None:
        return {name: row[name] for name in columns if name in row}
    meta: dict[str, Any] = {}
    for name in _USUAL_COLUMNS:
        value = row.get(name)
        if value is not None and isinstance(value, (str, int, float)):  # a union of types takes three times as long
            meta["id" if name in _ID_COLUMNS and "id" not in meta else name] = value
    return meta
