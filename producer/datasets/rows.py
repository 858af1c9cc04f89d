"""One row of a source to a prompt: a conversation to render, or ready ids. What is not right is rejected by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.sections import DatasetSettings
from common.segments import NOT_JSON

# Every reason for which a row is rejected before it is sent, with what it means.
REASONS = {
    "not_json": "the line is not a JSON object",
    "no_prompt": "the row has none of messages, conversations, input_ids, or the column that prompt_column names",
    "bad_messages": "the messages are not a list of turns with a known role and content",
    "no_user_turn": "no user or tool turn to answer is left once the final assistant turns are cut off",
    "bad_tools": "the tools are not a list of JSON objects",
    "bad_input_ids": "input_ids is not a list of whole numbers with at least one in it",
    "id_out_of_range": "an id is outside the model's vocabulary; it would kill the server",
    "template_error": "the chat template cannot render the messages",
    "too_long": "the prompt and max_new_tokens together exceed the model's context",
}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_ANSWERED = frozenset({"user", "tool"})
_MESSAGE_COLUMNS = ("messages", "conversations")
_ID_COLUMNS = ("id", "prompt_id", "uuid", "task_id", "question_id")
_LABEL_COLUMNS = ("source", "category", "language", "domain", "difficulty")
# A detail may quote the row, and a row may be a megabyte long.
_DETAIL_CHARACTERS = 500


class BadRow(Exception):
    """A row that cannot become a prompt; `reason` is a key of REASONS."""

    def __init__(self, reason: str, detail: str = "", row_id: Any = None) -> None:
        self.reason = reason
        self.detail = (detail or REASONS[reason])[:_DETAIL_CHARACTERS]
        super().__init__(f"{reason}: {self.detail}")
        self.row_id = row_id


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row asks: a conversation, or the ids that stand for one; and the row's own id and labels."""

    meta: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    input_ids: Sequence[int] | None = None


def convert(line: bytes, dataset: DatasetSettings) -> Prompt:
    """The prompt of one line; raises BadRow."""
    try:
        row = msgspec.json.decode(line)
    except NOT_JSON as error:
        raise BadRow("not_json", f"the line is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow("not_json")
    meta = _meta(row, dataset.meta)
    try:
        return _prompt(row, dataset, meta)
    except BadRow as bad:
        bad.row_id = meta.get("id")
        raise


def _prompt(row: Mapping[str, Any], dataset: DatasetSettings, meta: Mapping[str, Any]) -> Prompt:
    if dataset.prompt_column is not None or dataset.format == "text":
        column = dataset.prompt_column or "prompt"
        text = row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise BadRow("no_prompt", f"the column {column!r} holds no text")
        return Prompt(meta, messages=[{"role": "user", "content": text}])
    if dataset.format == "input_ids" or (dataset.format == "auto" and "input_ids" in row):
        return Prompt(meta, input_ids=_ids(row.get("input_ids")))
    column = next((name for name in _MESSAGE_COLUMNS if name in row), "")
    if not column:
        raise BadRow("no_prompt")
    return Prompt(meta, messages=_turns(row[column]), tools=_tools(row.get("tools")))


def _ids(value: Any) -> Sequence[int]:
    try:
        ids = msgspec.convert(value, list[int])  # refuses true and 1.0; 9 us for 1,000 ids, a Python loop takes 35
    except msgspec.ValidationError:
        raise BadRow("bad_input_ids") from None
    if not ids:
        raise BadRow("bad_input_ids")
    return ids


def _turns(value: Any) -> Sequence[Mapping[str, Any]]:
    """The turns up to the last user or tool turn: a final assistant turn is someone else's answer."""
    if not isinstance(value, list) or not value:
        raise BadRow("bad_messages")
    for number, turn in enumerate(value):
        _check_turn(number, turn)
    last = max((number for number, turn in enumerate(value) if turn["role"] in _ANSWERED), default=-1)
    if last < 0:
        raise BadRow("no_user_turn")
    content = value[last]["content"]
    if value[last]["role"] == "user" and isinstance(content, str) and not content.strip():
        raise BadRow("bad_messages", f"turn {last} (user) asks with a blank text")
    return value[: last + 1]


def _check_turn(number: int, turn: Any) -> None:
    """A template does not complain about most of these; it renders a system turn, or nothing."""
    if not isinstance(turn, dict):
        raise BadRow("bad_messages", f"turn {number} is not an object")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("bad_messages", f"turn {number} has the role {role!r}; known are {', '.join(sorted(ROLES))}")
    if isinstance(content, str):
        return
    if isinstance(content, list):
        texts = all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
        if texts:
            return
        raise BadRow("bad_messages", f"turn {number} has content parts that are no text")
    if content is None and role == "assistant" and turn.get("tool_calls"):
        return
    raise BadRow("bad_messages", f"turn {number} ({role}) has no text")


def _tools(value: Any) -> Sequence[Mapping[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value) if value.strip() else None
        except NOT_JSON:
            raise BadRow("bad_tools", "tools is a text that is not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("bad_tools")
    return value


def _meta(row: Mapping[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    """The row's own id and labels: the columns named in the configuration, else the usual ones that are there."""
    if columns is not None:
        return {name: row[name] for name in columns if name in row}
    meta: dict[str, Any] = {}
    for name in (*_ID_COLUMNS, *_LABEL_COLUMNS):
        if isinstance(row.get(name), str | int | float):
            meta["id" if name in _ID_COLUMNS and "id" not in meta else name] = row[name]
    return meta
