"""One row of data made by anyone: what was asked in it, what was answered, and what it claims about that.

Read with less care than producer/datasets/rows.py, and faster: nothing here is sent to a model. A text is taken as it
stands, and only what a check needs is taken out of the row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from producer.audit.answer_objects import Found, claims_of, objects_in
from producer.datasets.layouts.catalog import LAYOUTS, MESSAGE_LIST, Layout, find, read_list
from producer.datasets.layouts.turns import Turn
from producer.datasets.reasons import BadRow
from producer.datasets.rows import decoded

# Where a flat row keeps its answer, and the reasoning beside it; the first that is there counts.
ANSWERS = (
    *("content", "response", "answer", "output", "completion", "completions", "generated_text", "solution"),
    *("model_output", "prediction", "gemini_attempt", "chosen", "output_text", "generation"),
)
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "gemini_thinking_trajectory", "thought")
_NUMBERS = ("index", "idx", "row", "row_index", "custom_id", "id", "request_id")
_SECONDS = ("latency_seconds", "latency", "elapsed_seconds", "elapsed", "duration_seconds", "e2e_latency")
_PLAIN = [one for one in LAYOUTS if one.name in {"magicoder", "alpaca", "opencode", "openorca", "question", "query"}]
_NOT_PLAIN = frozenset(
    {"input_ids", "messages", "conversations", "conversation", "chat", "history", "trajectory", "traj", "data", "turns"}
)
_UNTRAINED = -100
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "tool_response", "refusal"})


class Said(msgspec.Struct):
    """An answer as text: `content` as it stands, think marks and all; `reasoning` is what stood in a field of its own.

    `field` says that there is such a field, be it empty.
    """

    content: str
    reasoning: str = ""
    field: bool = False
    calls: Any = None

    @property
    def empty(self) -> bool:
        """Whether nothing at all was said."""
        return not (self.calls or self.content.strip() or self.reasoning.strip())


class Seen(msgspec.Struct):
    """What a row holds. `turns` are the conversation before the answer, `roles` of all of it, with the answer.

    `input_ids` and `output_ids` are there for rows of ids; `mask` says what is wrong with a loss mask. `claims` is what
    the row says of its lengths; `error` why it has no answer, in its own words.
    """

    layout: str
    turns: Sequence[Turn] = ()
    tools: Any = None
    system: str = ""
    roles: Sequence[str] = ()
    said: list[Said] = []
    finish_reason: str | None = None
    claims: Mapping[str, int] = {}
    input_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = None
    mask: str = ""
    unanswered: bool = False  # the turns are questions
    error: str = ""
    unread: BadRow | None = None  # why the prompt beside the answer cannot be read
    number: int | None = None
    seconds: float | None = None
    row_id: str = ""

    @property
    def prompt(self) -> str:
        """What was asked, as one text to tell prompts apart; empty if the row does not say."""
        if len(self.turns) == 1:
            return _whole(self.turns[0].raw)
        return "\0".join(f"{turn.role}\1{_whole(turn.raw)}" for turn in self.turns)


class NotData(Exception):
    """A line of ours that is no row: `kind` is void (a record taken back) or reject."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def see(value: Any) -> Seen:
    """What a row holds, as a container gives it. Raises BadRow with the reason, and NotData."""
    row = decoded(value)
    if isinstance(row, list):
        return _conversation(Seen(MESSAGE_LIST, read_list(row).turns))
    if len(row) == 1 and "void" in row:
        raise NotData("void")
    if "reason" in row and "detail" in row and "index" in row:
        raise NotData("reject")
    found = objects_in(row)
    if found is not None:
        seen = _answered(found, row)
    elif row.get("input_ids") is not None:
        seen = _of_ids(row)
    else:
        seen = _of_text(row)
    _note(seen, row)
    return seen


def text_of(raw: Mapping[str, Any]) -> str:
    """The text of a turn; of a content in parts, that of its text parts."""
    for key in ("content", "value", "text"):
        given = raw.get(key)
        if given is not None:
            return given if isinstance(given, str) else _joined(given)
    return ""


def is_empty(turn: Turn) -> bool:
    """Whether nothing stands in a turn that should say something."""
    raw = turn.raw
    return (
        turn.role in {"user", "assistant"}
        and not (text_of(raw).strip() or _calls(raw) or _reasoning(raw)[0])
        and not (isinstance(raw.get("content"), list) and raw["content"])
    )


def _joined(content: Any) -> str:
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return str(content)
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        if str(part.get("type", "text")) not in _TEXT_PARTS:
            return ""
        part = next((part[key] for key in ("text", "value", "content") if part.get(key) is not None), "")
    return part if isinstance(part, str) else ""


def _whole(raw: Mapping[str, Any]) -> str:
    """The content of a turn to tell it apart: with its images, where it has some."""
    content = raw.get("content")
    if not isinstance(content, list):
        return text_of(raw)
    try:
        return msgspec.json.encode(content).decode()
    except (TypeError, ValueError, UnicodeError, RecursionError):
        return text_of(raw)


def _calls(raw: Mapping[str, Any]) -> Any:
    """The tool calls of a turn as they stand there, in a field or in parts of the content; None if there are none."""
    given = raw.get("tool_calls") or raw.get("function_call")
    content = raw.get("content")
    if not given and isinstance(content, list):
        parts = [one for one in content if isinstance(one, dict) and str(one.get("type")) in {"tool_call", "tool_use"}]
        given = [one["value"] if one.get("value") is not None else one for one in parts]
    return given or None


def _answered(found: Found, row: Mapping[str, Any]) -> Seen:
    """A row with an answer object; the prompt may stand beside it."""
    said = [Said(text_of(one) or "", *_reasoning(one), _calls(one)) for one in found.messages]
    seen = Seen(found.layout, said=said, finish_reason=found.finish_reason, claims=found.claims, error=found.error)
    if found.output_ids is not None:
        seen.output_ids = found.output_ids
        seen.input_ids = _whole_numbers(row.get("input_ids")) or None
    try:
        asked = find({key: row[key] for key in row if key not in {"response", "choices", "output", "text"}})
        if asked.name != "input_ids":
            read = asked.read(row)
            seen.turns, seen.tools, seen.system = read.turns, read.tools, read.system
    except BadRow as bad:  # the answer alone, which is what servers give, or a prompt that cannot be read
        seen.unread = None if bad.reason == "no_prompt" else bad
    if seen.turns and seen.turns[-1].role == "assistant":
        seen.turns = seen.turns[:-1]  # the answer once more, as clients that go on with a conversation keep it
    seen.roles = [*(turn.role for turn in seen.turns), "assistant"] if seen.turns else []
    return seen


def _of_ids(row: Mapping[str, Any]) -> Seen:
    """Rows of ids: one of our records, or ids with a loss mask, or with labels."""
    ids = _whole_numbers(row["input_ids"])
    if not ids:
        raise BadRow("bad_input_ids")
    seen = Seen("ids", input_ids=ids, claims=claims_of(row))
    if row.get("output_ids") is not None:
        seen.layout, seen.output_ids = "record", _whole_numbers(row["output_ids"])
        if seen.output_ids is None:
            raise BadRow("bad_input_ids", "output_ids is not a list of whole numbers")
        return seen
    mask, labels = row.get("loss_mask"), row.get("labels")
    if mask is None and isinstance(labels, list) and _UNTRAINED in labels:
        mask = [int(one != _UNTRAINED) for one in labels]
    if mask is None:
        return seen  # a prompt
    if not isinstance(mask, list) or len(mask) != len(ids):
        seen.mask = "mask_length"
    elif 1 not in mask:
        seen.mask = "mask_learns_nothing"
    else:
        start = mask.index(1)
        seen.mask = "" if start else "mask_learns_prompt"
        learnt = mask.count(1)
        seen.input_ids = ids[:start]
        # With several runs of ones the ids between them are other turns: what is learnt is what was generated.
        plain = 0 not in mask[start : start + learnt]
        seen.output_ids = ids[start : start + learnt] if plain else [i for i, m in zip(ids, mask, strict=True) if m]
    return seen


def _whole_numbers(value: Any) -> list[int] | None:
    try:
        return msgspec.convert(value, list[int])
    except (msgspec.ValidationError, RecursionError):
        return None


def _of_text(row: dict[str, Any]) -> Seen:
    seen = Seen("flat", claims=claims_of(row))
    answer = next((name for name in ANSWERS if name in row and row[name] != []), None)
    try:
        layout = _layout(row)
        seen.layout = layout.name
        read = layout.read(row)
        seen.turns, seen.tools, seen.system = read.turns, read.tools, read.system
        seen.unanswered = read.unanswered
    except BadRow:
        if answer is None and not any(name in row for name in REASONING):
            raise
    _conversation(seen)
    if not seen.said and seen.layout in {"turns", "bfcl", "ultrachat"}:
        answer = None  # questions
    if not seen.said and (answer is not None or any(name in row for name in REASONING)):
        seen.said = [Said(_flat(row[answer]) if answer else "", *_reasoning(row), row.get("tool_calls"))]
        seen.roles = [*seen.roles, "assistant"] if seen.roles else []
    return seen


def _layout(row: Mapping[str, Any]) -> Layout:
    """As find() has it, without ids; rows of text columns are many, and not tried for all other layouts."""
    if _NOT_PLAIN.isdisjoint(row) and not isinstance(row.get("question"), list):
        plain = next((one for one in _PLAIN if one.fits(row)), None)
        if plain is not None:
            return plain
    found = find(row)
    if found.name == "input_ids":  # the column is there, and null
        raise BadRow("bad_input_ids")
    return found


def _flat(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return str(value[0])
    return "" if value is None else value if isinstance(value, str) else _joined(value)


def _conversation(seen: Seen) -> Seen:
    """Take the answer, which is the last turn, from the turns."""
    turns = seen.turns
    seen.roles = [turn.role for turn in turns]
    if turns and turns[-1].role == "assistant":
        last = turns[-1]
        calls = text_of(last.raw) if last.is_call else _calls(last.raw)
        seen.said = [Said("" if last.is_call else text_of(last.raw), *_reasoning(last.raw), calls)]
        seen.turns = turns[:-1]
    return seen


def _reasoning(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """The reasoning in a field of its own, and whether there is such a field."""
    field = False
    for name in REASONING:
        if name in raw:
            field = True
            if isinstance(raw[name], str) and raw[name].strip():
                return raw[name], True
    content = raw.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and str(part.get("type")) in {"reasoning", "thinking"}:
            text = next((part[key] for key in ("text", "value", "thinking", "content") if key in part), None)
            if isinstance(text, str):
                return text, True
    return "", field


def _note(seen: Seen, row: Mapping[str, Any]) -> None:
    if seen.finish_reason is None:
        given = row.get("finish_reason", row.get("stop_reason"))
        seen.finish_reason = given if isinstance(given, str) else None
    error = row.get("error")
    if error and not seen.error and (not seen.said or seen.said[0].empty):
        seen.error = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    for name in _NUMBERS:
        if name in row:
            seen.row_id = str(row[name])
            # Of records and exports `tokenmill verify` tells what is missing.
            seen.number = _number(row[name]) if seen.input_ids is None else None
            break
    seconds = next((row[name] for name in _SECONDS if name in row), None)
    if isinstance(seconds, int | float) and seconds >= 0:
        seen.seconds = float(seconds)


def _number(value: Any) -> int | None:
    """The number of a row: 17, "17" or "request-17"."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and value[-1:].isdecimal() and len(value) < 80:
        digits = value[len(value.rstrip("0123456789")) :]
        return int(digits) if digits.isascii() and len(digits) < 16 else None
    return None
