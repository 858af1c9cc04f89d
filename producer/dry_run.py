"""What a dataset would send, and what it would not: for `tokenmill enqueue --dry-run`. Needs no Redis."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.payload import Packer
from common.sections import DatasetSettings
from common.settings import Settings
from producer.datasets.cursor import Row
from producer.datasets.fed import fed
from producer.datasets.layouts.catalog import Detected
from producer.datasets.rows import layout_of
from producer.datasets.standard_input import STANDARD_INPUT, source_of
from producer.prepare import Chunk, Limits, prepare

# Of one dataset: to read its rows, and to render and encode them.
READ_SECONDS, _PREPARE_SECONDS = 5.0, 10.0
_CHUNK_ROWS = 64
_SHOWN_PROMPTS = 3
# Of a longer prompt so many tokens are shown at its head and at its end.
_HEAD_TOKENS, _END_TOKENS = 300, 150
# Around each control token: what a user typed has none.
MARKS = "⟦", "⟧"
# What a terminal would obey.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PERCENTILES = (50, 90, 99)
# Of standard input: it may never end.
_INPUT_BYTES, _PIECE_BYTES = 64 * 1024 * 1024, 1024 * 1024
_CUT_COPY = ".standard-input-head"


class ShownPrompt(msgspec.Struct, frozen=True):
    """A prompt as the model gets it; `text` has each control token between MARKS, and left_out_tokens in its middle."""

    place: str
    prompt_tokens: int
    max_new_tokens: int
    text: str
    left_out_tokens: int = 0


class ShownReject(msgspec.Struct, frozen=True):
    """The first row with this reason."""

    place: str
    reason: str
    detail: str


class DryRun(msgspec.Struct, frozen=True):
    """What was looked at of a dataset: `rows` rows, which are `all_rows` that are fed or not.

    `fed_rows`: how many are fed, where `limit` or `shuffle` say which and these could be counted; `order` says which.
    `prompt_tokens` is by `min`, `p50`, `p90`, `p99`, `max`; `cut` prompts ask for less than max_new_tokens, to fit.
    """

    name: str
    source: str
    turns: str
    layouts: dict[str, int]
    rows: int
    all_rows: bool
    converted: int
    cut: int
    rejected: dict[str, int]
    rejects: list[ShownReject]
    prompt_tokens: dict[str, int]
    sampling_params: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    prompts: list[ShownPrompt]
    limit: int | None = None
    shuffle: int | None = None
    fed_rows: int | None = None
    order: str = ""
    fault: str = ""


def dry_run(
    settings: Settings, dataset: DatasetSettings, tokenizer: Tokenizer, vocab_size: int, context_length: int | None
) -> DryRun:
    """Read, render, encode and check rows of `dataset` as the feed does. Raises OSError, DataError."""
    sampling = settings.sampling_of(dataset)
    limits = Limits(vocab_size, context_length, sampling.max_new_tokens, sampling.fit)
    with source_at_hand(settings, dataset) as source:
        taken, fed_rows, order = fed(source, dataset, READ_SECONDS)
    # Numbered anew: those from the middle of a source have no index that is known.
    rows = [msgspec.structs.replace(row, index=number) for number, row in enumerate(taken.rows)]
    packer = Packer()
    done, looked_at = prepared(rows, dataset, tokenizer, limits, packer)
    payloads = [(taken.places[index], packer.unpack(packed)) for index, packed in done.samples]
    first = {reject.reason: reject for reject in reversed(done.rejects)}
    counts = {reason: sum(one.reason == reason for one in done.rejects) for reason in first}
    shown = [payloads[place] for place in _spread(len(payloads))]
    return DryRun(
        name=dataset.name,
        source=str(dataset.path),
        turns=dataset.turns,
        layouts=Detected.of(layout_of(row.value, dataset) for row in rows[:looked_at]).rows,
        rows=looked_at,
        all_rows=taken.all and looked_at == len(rows),
        limit=dataset.limit,
        shuffle=dataset.shuffle,
        fed_rows=fed_rows,
        order=order,
        converted=len(payloads),
        cut=sum(payload.max_new_tokens is not None for _, payload in payloads),
        rejected=dict(sorted(counts.items(), key=lambda one: -one[1])),
        rejects=[
            ShownReject(taken.places[one.index], one.reason, one.detail)
            for one in sorted(first.values(), key=lambda one: one.index)
        ],
        prompt_tokens=_percentiles([payload.prompt_tokens for _, payload in payloads]),
        sampling_params=sampling.params(),
        chat_template_kwargs=settings.template_kwargs_of(dataset),
        prompts=[
            _shown(place, msgspec.json.decode(one.input_ids), one.max_new_tokens or sampling.max_new_tokens, tokenizer)
            for place, one in shown
        ],
        fault=taken.fault,
    )


def prepared(
    rows: Sequence[Row], dataset: DatasetSettings, tokenizer: Tokenizer, limits: Limits, packer: Packer
) -> tuple[Chunk, int]:
    """The first rows made ready, as many as there is time for, and how many these are."""
    done = Chunk()
    deadline, looked_at = time.monotonic() + _PREPARE_SECONDS, 0
    while looked_at < len(rows) and time.monotonic() < deadline:
        chunk = prepare(rows[looked_at : looked_at + _CHUNK_ROWS], dataset, tokenizer, limits, packer)
        done.samples.extend(chunk.samples)
        done.prompts.update(chunk.prompts)
        done.rejects.extend(chunk.rejects)
        looked_at = min(len(rows), looked_at + _CHUNK_ROWS)
    return done, looked_at


@contextmanager
def source_at_hand(settings: Settings, dataset: DatasetSettings) -> Iterator[str | Path]:
    """Where the rows are; of standard input that nobody has kept yet, a copy of its first 64 MiB."""
    source = source_of(settings.output, dataset)
    if dataset.path != STANDARD_INPUT or Path(source).exists():
        yield source
        return
    with NamedTemporaryFile(suffix=_CUT_COPY) as copy:
        while copy.tell() < _INPUT_BYTES and (piece := sys.stdin.buffer.read(_PIECE_BYTES)):
            copy.write(piece)
        copy.flush()
        yield copy.name


def is_cut(source: str | Path) -> bool:
    """Whether this is a copy of standard input that is not whole."""
    return str(source).endswith(_CUT_COPY) and Path(source).stat().st_size >= _INPUT_BYTES


def _spread(count: int) -> list[int]:
    """The first, one in the middle and the last of so many."""
    return sorted({0, count // 2, count - 1}) if count else []


def _percentiles(tokens: Sequence[int]) -> dict[str, int]:
    """By name; the p-th percentile is the smallest length that p % of the prompts do not exceed."""
    if not tokens:
        return {}
    ordered = sorted(tokens)
    marks = {f"p{percent}": ordered[-(-percent * len(ordered) // 100) - 1] for percent in _PERCENTILES}
    return {"min": ordered[0], **marks, "max": ordered[-1]}


def _shown(place: str, ids: Sequence[int], max_new_tokens: int, tokenizer: Tokenizer) -> ShownPrompt:
    left_out = max(0, len(ids) - _HEAD_TOKENS - _END_TOKENS)
    text = _marked(tokenizer, ids if not left_out else ids[:_HEAD_TOKENS])
    if left_out:
        end = _marked(tokenizer, ids[-_END_TOKENS:])
        text = f"{text}\n[... {left_out:,} of {len(ids):,} tokens are left out here ...]\n{end}"
    return ShownPrompt(place, len(ids), max_new_tokens, text, left_out)


def _marked(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    opening, closing = MARKS
    return "".join(f"{opening}{text}{closing}" if control else text for text, control in tokenizer.pieces(ids))


def lines(found: DryRun) -> Iterator[str]:
    """What was found as a person reads it."""
    yield f"{found.name}: {found.source}"
    layouts = ", ".join(f"{name} ({rows:,})" for name, rows in found.layouts.items()) or "none"
    which = "the first ones, and of a large source some from all over it"
    if found.all_rows:
        which = "all that are fed" if found.order else "all there are"
    cut = f", of which {found.cut:,} ask for fewer new tokens, to fit the context" if found.cut else ""
    yield f"  layout     {layouts}"
    if found.order:
        yield f"  fed        {'' if found.fed_rows is None else f'{found.fed_rows:,} rows: '}{found.order}"
    yield f"  looked at  {found.rows:,} rows: {which}"
    yield f"  converted  {found.converted:,}{cut}"
    if found.turns == "all":
        yield "             (the first turn of each conversation; the others wait for the answers before them)"
    yield f"  rejected   {', '.join(f'{rows:,} {reason}' for reason, rows in found.rejected.items()) or 'none'}"
    yield from (f"             {one.place}: {one.reason}: {_printable(one.detail)}" for one in found.rejects)
    tokens = ", ".join(f"{name} {value:,}" for name, value in found.prompt_tokens.items()) or "no prompts"
    yield f"  prompt     {tokens}{' tokens' if found.prompt_tokens else ''}"
    yield f"  sampling   {msgspec.json.encode(found.sampling_params).decode()}"
    if found.chat_template_kwargs:
        yield f"  template   {msgspec.json.encode(found.chat_template_kwargs).decode()}"
    if found.fault:
        yield f"  fault      {found.fault}"
    for prompt in found.prompts:
        yield ""
        yield f"  {prompt.place}: {prompt.prompt_tokens:,} tokens, max_new_tokens {prompt.max_new_tokens:,}"
        yield from (f"  | {line}" for line in _printable(prompt.text).split("\n"))


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
