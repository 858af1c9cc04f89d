"""One row of data made by anyone: what was asked in it, what was answered, and what it claims about that.

Read with less care than producer/datasets/rows.py, and faster: nothing here is sent to a model. A text is taken as it
stands, and only what a check needs is taken out of the row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from producer.audit.answer_objects import Found, asked_in, claims_of, objects_in
from producer.audit.shape import REASONING, Shape, shape_of
from producer.datasets.decoding import decoded
from producer.datasets.layouts.catalog import MESSAGE_LIST, Asked, Layout, find, read_list
from producer.datasets.layouts.turns import Media, Turn
from producer.datasets.reasons import BadRow

_QUESTIONS = frozenset({"turns", "bfcl", "ultrachat"})  # layouts without an answer beside the turns
_NOTHING = Asked([])
_UNTRAINED = -100
_CUT = frozenset({"cut", "split"})  # as producer/export/rows.py has them, which loads NumPy
_REASONING = frozenset(REASONING)
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
    media: bool = False  # in columns beside the turns
    cut: bool = False  # by an export of ours, which says so
    error: str = ""
    unread: BadRow | None = None  # why the prompt beside the answer cannot be read
    number: int | None = None
    seconds: float | None = None
    row_id: str = ""


class NotData(Exception):
    """A line of ours that is no row: `kind` is void (a record taken back) or reject."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def see(value: Any) -> Seen:
    """What a row holds, as a container gives it. Raises BadRow with the reason, and NotData."""
    row = decoded(value)
    if isinstance(row, list):
        turns, roles, said = _told(read_list(row).turns)
        return Seen(MESSAGE_LIST, turns, roles=roles, said=said)
    shape = shape_of(row)
    if shape.not_data:
        raise NotData(shape.not_data)
    if shape.is_request and isinstance(row["body"], dict):
        row = asked_in(row)
        shape = shape_of(row)
    found = objects_in(row) if shape.may_be_object else None
    if found is not None:
        seen = _answered(found, row)
    elif shape.has_ids and row["input_ids"] is not None:
        seen = _of_ids(row, cut=shape.has_flags and _is_cut(row["flags"]))
    else:
        seen = _of_text(row, shape)
    if shape.is_noted:
        _note(seen, row, shape)
    if shape.may_have_media:
        seen.media = _has_media(seen, row)
    return seen


def text_of(raw: Mapping[str, Any]) -> str:
    """The text of a turn; of a content in parts, that of its text parts."""
    given = raw.get("content")
    if given is None:
        given = raw.get("value")
    if given is None:
        given = raw.get("text")
    if given is None:
        return ""
    return given if isinstance(given, str) else _joined(given)


def has_only_text(turn: Turn) -> bool:
    """Whether a turn that should say something has nothing beside its text."""
    raw = turn.raw
    return (
        turn.role in {"user", "assistant"}
        and not (_calls(raw) or _reasoning(raw)[0])
        and not (isinstance(raw.get("content"), list) and raw["content"])
    )


def _has_media(seen: Seen, row: Mapping[str, Any]) -> bool:
    """Whether columns hold an image, audio or video that belongs to a turn."""
    media = Media(row, drop=True)
    for turn in seen.turns if media.marked else ():
        media.unmarked(turn, text_of(turn.raw))
    media.rest()
    return media.dropped


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


def whole_of(raw: Mapping[str, Any]) -> str:
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


def _is_cut(flags: Any) -> bool:
    """Whether `tokenmill export` has cut the row, or split it."""
    return isinstance(flags, str) and not _CUT.isdisjoint(flags.split(","))


def _of_ids(row: Mapping[str, Any], *, cut: bool) -> Seen:
    """Rows of ids: one of our records, or ids with a loss mask, or with labels."""
    ids = _whole_numbers(row["input_ids"])
    if not ids:
        raise BadRow("bad_input_ids")
    seen = Seen("ids", input_ids=ids, claims=claims_of(row), cut=cut)
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


def _of_text(row: dict[str, Any], shape: Shape) -> Seen:
    answer = None
    for column in shape.answers:
        if row[column] != []:
            answer = column
            break
    name, read = "flat", _NOTHING
    try:
        layout = _layout(row, shape)
        name = layout.name
        read = layout.read(row)
    except BadRow:
        if answer is None and not shape.reasoning:
            raise
    turns, roles, said = _told(read.turns)
    if not said:
        if name in _QUESTIONS:
            answer = None
        if answer is not None or shape.reasoning:
            said = [Said(_flat(row[answer]) if answer else "", *_reasoning(row), row.get("tool_calls"))]
            if roles:
                roles.append("assistant")
    claims = claims_of(row) if shape.may_claim else {}
    # At once, since setting a field of a Struct takes as long as making half of it.
    return Seen(name, turns, read.tools, read.system, roles, said, None, claims, unanswered=read.unanswered)


def _layout(row: Mapping[str, Any], shape: Shape) -> Layout:
    """As find() has it, without ids; only the layouts that have their columns in the row are tried."""
    for layout in shape.layouts:
        if layout.fits(row):
            break
    else:
        layout = find(row)
    if layout.name == "input_ids":  # the column is there, and null
        raise BadRow("bad_input_ids")
    return layout


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return "" if value is None else _joined(value)


def _told(turns: Sequence[Turn]) -> tuple[Sequence[Turn], list[str], list[Said]]:
    """The turns before the answer, the roles of all, and the answer, which is the last turn if that is one."""
    roles = [turn.role for turn in turns]
    if not roles or roles[-1] != "assistant":
        return turns, roles, []
    last, raw = turns[-1], turns[-1].raw
    text = text_of(raw)
    if last.is_call:
        said = Said("", *_reasoning(raw), text)
    elif len(raw) == 2 and text and not isinstance(raw.get("content"), list):  # a role and a text, as most have
        said = Said(text)
    else:
        said = Said(text, *_reasoning(raw), _calls(raw))
    return turns[:-1], roles, [said]


def _reasoning(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """The reasoning in a field of its own, and whether there is such a field."""
    field = not _REASONING.isdisjoint(raw)
    for name in REASONING if field else ():
        if name in raw and isinstance(raw[name], str) and raw[name].strip():
            return raw[name], True
    content = raw.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and str(part.get("type")) in {"reasoning", "thinking"}:
            text = next((part[key] for key in ("text", "value", "thinking", "content") if key in part), None)
            if isinstance(text, str):
                return text, True
    return "", field


def _note(seen: Seen, row: Mapping[str, Any], shape: Shape) -> None:
    if shape.may_end and seen.finish_reason is None:
        given = row.get("finish_reason", row.get("stop_reason"))
        seen.finish_reason = given if isinstance(given, str) else None
    error = row.get("error")
    if error and not seen.error and (not seen.said or seen.said[0].empty):
        seen.error = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    if shape.number:
        seen.row_id = str(row[shape.number])
        # Of records and exports `tokenmill verify` tells what is missing.
        seen.number = _number(row[shape.number]) if seen.input_ids is None else None
    if shape.seconds:
        seconds = row[shape.seconds]
        if isinstance(seconds, int | float) and seconds >= 0:
            seen.seconds = float(seconds)


def _number(value: Any) -> int | None:
    """The number of a row: 17, "17" or "request-17"."""
    if isinstance(value, str):
        if not value[-1:].isdecimal() or len(value) >= 80:
            return None
        digits = value[len(value.rstrip("0123456789")) :]
        return int(digits) if digits.isascii() and len(digits) < 16 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
