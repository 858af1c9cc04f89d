"""One sample as a person reads it: prompt and answer decoded, what is thought, said, called and control told apart."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.answers import parse
from common.chat_template import Tokenizer
from common.records import Record
from common.segments import Entry, record_at
from common.turns import row_of
from producer.dry_run import MARKS
from producer.monitor.grid import Line

Kind = Literal["text", "think", "answer", "tool_call", "control"]
_HEADS = {"think": "think", "answer": "answer", "tool_call": "tool call"}
_STYLES = {"text": "", "think": "think", "answer": "", "tool_call": "tool", "control": "mark"}
# What a terminal would obey, or read backwards; a model may write anything.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Part(msgspec.Struct, frozen=True):
    """A stretch of ids of one kind, and its text; `control` is one control token."""

    kind: Kind
    text: str
    tokens: int | None = None  # of a part of the answer


class Sample(msgspec.Struct, frozen=True):
    """A record, decoded. `damages` are those of common.answers; `segment` and `offset` say where it stands."""

    record: Record
    prompt: list[Part]
    answer: list[Part]
    damages: tuple[str, ...]
    segment: Path
    offset: int
    superseded: tuple[int, ...] = ()  # attempts whose records do not count

    def as_json(self, *, ids: bool) -> dict[str, Any]:
        """For programs; with `ids` also what the texts were decoded from."""
        record = msgspec.to_builtins(self.record)
        if not ids:
            del record["input_ids"], record["output_ids"]
        shown = {
            name: msgspec.to_builtins(getattr(self, name)) for name in ("prompt", "answer", "damages", "superseded")
        }
        return {**record, **shown, "segment": str(self.segment), "offset": self.offset}


def read_sample(entry: Entry, tokenizer: Tokenizer, superseded: Sequence[int] = ()) -> Sample:
    """Read and decode the record of `entry`. Raises OSError, and DataError where it cannot be read."""
    record = record_at(entry)
    read = parse(record.output_ids, tokenizer, input_ids=record.input_ids)
    answer: list[Part] = []
    for span in read.spans:
        ids = record.output_ids[span.start : span.stop]
        if span.kind == "control":
            answer += [Part("control", text, 1) for text, _ in tokenizer.pieces(ids)]
        else:
            answer.append(Part(span.kind, tokenizer.decode(ids), len(ids)))
    prompt = [Part("control" if control else "text", text) for text, control in tokenizer.pieces(record.input_ids)]
    return Sample(record, prompt, answer, read.damages, entry.path, entry.offset, tuple(superseded))


def told(sample: Sample, *, ids: bool = False) -> list[Line]:
    """The sample in lines; control tokens stand in MARKS, and each kind of text under a heading of its own."""
    record = sample.record
    lines = _facts(sample)
    lines += [[], [(f"--- prompt: {record.prompt_tokens:,} tokens ---", "head")], *_flowing(sample.prompt)]
    if ids:
        lines += _ids("input_ids", record.input_ids)
    lines += [[], [(f"--- made by the model: {record.completion_tokens:,} tokens ---", "head")], []]
    for part in sample.answer:
        if part.kind != "control":
            lines += [[(f"--- {_HEADS[part.kind]}: {part.tokens:,} tokens ---", "head")], []]
        lines[-1:] = _joined(lines[-1], part)
    if ids:
        lines += _ids("output_ids", record.output_ids)
    return lines


def _facts(sample: Sample) -> list[Line]:
    record = sample.record
    turn = "" if record.turn is None else f", row {row_of(record.index):,}, turn {record.turn} (of {record.turns})"
    tokens = f"{record.prompt_tokens:,} + {record.completion_tokens:,} tokens ({record.cached_tokens:,} cached)"
    lines: list[Line] = [
        [(record.sample_id, "head"), (f"{turn}: {record.finish_reason}, attempt {record.attempt}", "")],
        [(f"{tokens}, {record.latency_seconds:.1f} s at {record.server}, {record.created_at}", "")],
    ]
    if record.flags:
        lines.append([(f"flags: {', '.join(record.flags)}", "bad")])
    if sample.damages:
        lines.append([(f"damage, as it is read now: {', '.join(sample.damages)}", "bad")])
    if sample.superseded:
        attempts = ", ".join(map(str, sample.superseded))
        lines.append([(f"superseded, and not shown: attempt {attempts}", "warn")])
    if record.meta:
        lines.append([(f"meta: {visible(msgspec.json.encode(record.meta).decode())}", "")])
    lines.append([(f"{sample.segment}, byte {sample.offset:,}", "dim")])
    return lines


def _flowing(parts: Sequence[Part]) -> list[Line]:
    lines: list[Line] = [[]]
    for part in parts:
        lines[-1:] = _joined(lines[-1], part)
    return lines


def _joined(line: Line, part: Part) -> list[Line]:
    """`line` with the part behind it, in as many lines as its text has."""
    style = _STYLES[part.kind]
    text = visible(part.text)
    if part.kind == "control":
        text = MARKS[0] + text + MARKS[1]
    first, *others = text.split("\n")
    return [[*line, (first, style)], *([(other, style)] for other in others)]


def _ids(name: str, ids: Sequence[int]) -> list[Line]:
    return [[(f"--- {name} ---", "head")], [(" ".join(map(str, ids)), "dim")]]


def visible(text: str) -> str:
    r"""The text with what a terminal would obey written out, as in \x1b; new lines and tabs stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
