"""What the source of a dataset holds: how many rows, and how long its prompts are, in bounded time."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from common.chat_template import Tokenizer
from common.errors import DataError
from common.payload import Packer, Payload
from common.sections import DatasetSettings
from common.settings import Settings
from common.turns import TURNS
from producer.datasets import parquet
from producer.datasets.compressed import Text
from producer.datasets.containers import rows_of
from producer.datasets.cursor import Cursor, Row
from producer.datasets.kinds import kind_of
from producer.datasets.layouts.cuts import answered_turns
from producer.datasets.places import size_of
from producer.datasets.rows import BadRow, convert
from producer.datasets.sample import FIRST_ROWS, ROWS_AT_A_PLACE, sample
from producer.datasets.shards import files_of
from producer.dry_run import READ_SECONDS, is_cut, prepared, source_at_hand
from producer.prepare import Limits

# Of one dataset. A file of JSON lines that is counted to its end is read at some 0.5 GB/s.
COUNT_SECONDS = 5.0
_ROWS_A_LOOK = 256
# Of the rows that are counted; at least half as many are kept.
_MOST_KEPT = 600

How = Literal["counted", "estimated", "at least"]


class Rows(msgspec.Struct, frozen=True):
    """How many rows a source has, and how that is known: at least so many of a large compressed file."""

    count: int
    how: How


@dataclass(frozen=True, slots=True)
class Source:
    """What was seen of a source. `prompts` are of rows from all over it, unless it can only be read from its start.

    looked_at, rejected: rows; rejected_share: of all rows of the source, as estimated. spread: whether they are all
    rows, or from all over. mean_prompt_tokens: of the samples.
    samples_a_row: 1, or with turns = "all" how many answers a conversation asks for. id_bytes: of one id in JSON.
    """

    rows: Rows
    looked_at: int
    rejected: int
    rejected_share: float
    spread: bool
    prompts: list[Payload]
    mean_prompt_tokens: float
    samples_a_row: float
    id_bytes: float
    fault: str


def look(
    settings: Settings,
    dataset: DatasetSettings,
    tokenizer: Tokenizer,
    vocab_size: int,
    context_length: int | None,
    count_seconds: float = COUNT_SECONDS,
) -> Source:
    """Count the rows of `dataset`, and render and encode some. Raises OSError, DataError if no row can be read."""
    sampling = settings.sampling_of(dataset)
    limits = Limits(vocab_size, context_length, sampling.max_new_tokens, sampling.fit)
    with source_at_hand(settings, dataset) as source:
        counted, rows, weights, spread, fault = _read_some(source, dataset, count_seconds)
    # In no order: if there is time for some of them only, these are from all over as well.
    order = random.Random(0).sample(range(len(rows)), len(rows))
    rows = [msgspec.structs.replace(rows[place], index=number) for number, place in enumerate(order)]
    weights = [weights[place] for place in order]
    packer = Packer()
    done, looked_at = prepared(rows, dataset, tokenizer, limits, packer)
    prompts = [packer.unpack(packed) for _, packed in done.samples]
    mean, samples_a_row = _mean(done.prompts, weights), 1.0
    if dataset.turns == "all":
        # A prompt grows with each turn, about evenly: from the first to the last, both of which the row has.
        last, _ = prepared(rows, dataset.model_copy(update={"turns": "last"}), tokenizer, limits, packer)
        mean = (mean + max(mean, _mean(last.prompts, weights))) / 2
        samples_a_row = _mean({row.index: _turns(row, dataset) for row in rows[:looked_at]}, weights) or 1.0
    ids = sum(prompt.prompt_tokens for prompt in prompts)
    return Source(
        rows=counted,
        looked_at=looked_at,
        rejected=len(done.rejects),
        rejected_share=sum(weights[one.index] for one in done.rejects) / max(sum(weights[:looked_at]), 1e-9),
        spread=spread,
        prompts=prompts,
        mean_prompt_tokens=mean,
        samples_a_row=samples_a_row,
        id_bytes=sum(len(prompt.input_ids) for prompt in prompts) / ids if ids else 6.0,
        fault=fault,
    )


def _read_some(
    source: str | Path, dataset: DatasetSettings, count_seconds: float
) -> tuple[Rows, list[Row], list[float], bool, str]:
    """How many rows there are, some of them with their weights, whether they are from all over, and what is wrong."""
    taken = sample(source, dataset.max_row_bytes, READ_SECONDS)
    rows, spread = taken.rows, taken.all or len(taken.rows) > FIRST_ROWS
    weights = [1.0] * len(rows)
    if taken.all:
        counted = Rows(len(rows), "counted")
    else:
        if spread:
            rows = _evenly(rows)
            weights = _weights(rows, files_of(source))
        row_bytes = _mean({number: row.size + 1 for number, row in enumerate(rows)}, weights)
        counted, kept = count_rows(source, dataset.max_row_bytes, row_bytes, count_seconds)
        if kept and counted.how == "counted":  # better than rows at some places
            rows, weights, spread = kept, [1.0] * len(kept), True
    if counted.how == "counted" and is_cut(source):
        counted = Rows(counted.count, "at least")
    if dataset.limit is not None and counted.count >= dataset.limit:
        counted = Rows(dataset.limit, "counted")
    return counted, rows, weights, spread, taken.fault


def _evenly(rows: Sequence[Row]) -> list[Row]:
    """As many of the first rows as of each other place, so that none counts for more."""
    return [*rows[: FIRST_ROWS : FIRST_ROWS // ROWS_AT_A_PLACE], *rows[FIRST_ROWS:]]


def _turns(row: Row, dataset: DatasetSettings) -> int:
    """How many answers a row asks for; a bad one asks for one, which is rejected."""
    try:
        prompt = convert(row.value, dataset, whole=True)
    except BadRow:
        return 1
    return 1 if prompt.input_ids is not None else min(TURNS, len(answered_turns(list(prompt.messages))))


def _mean(values: Mapping[int, float], weights: Sequence[float]) -> float:
    """Of values by the row that they are of; 0 of none."""
    weight = sum(weights[number] for number in values)
    return sum(value * weights[number] for number, value in values.items()) / weight if weight else 0.0


def _weights(rows: Sequence[Row], files: Sequence[str]) -> list[float]:
    """How many rows each of these stands for.

    Places are even in the bytes of a file (of Parquet in its rows), and in the number of files. So where rows are long
    there are too many places: a source whose prompts grow from 100 to 400 tokens seemed to have 280 on average, not
    250. The first place stands for the half of its surroundings that there is.
    """
    groups: list[list[Row]] = []
    for number, row in enumerate(rows):
        if row.index == 0 or not number:  # each place counts anew
            groups.append([])
        groups[-1].append(row)
    weights: list[float] = []
    for group in groups:
        where = files[group[0].after.file]
        if kind_of(where).layout == "parquet":
            weight = parquet.count(where) / len(group)
        else:
            weight = size_of(where) / sum(row.size + 1 for row in group)
        weights += [weight if weights else weight / 2] * len(group)
    return weights


def count_rows(source: str | Path, max_row_bytes: int, row_bytes: float, seconds: float) -> tuple[Rows, list[Row]]:
    """The rows of a source, by Parquet's footers or by reading on for `seconds`; what is left then is estimated.

    That is by its size, at `row_bytes` a row (the mean of rows from all over it); of a compressed file by those that
    were counted to their end, and if there are none only the rows that were read are told. With them some of the rows
    that were read, evenly spread; none if the source has files of Parquet. Raises OSError, DataError.
    """
    deadline = time.monotonic() + seconds
    kept = _Kept()
    rows = packed_rows = packed_bytes = packed_left = 0
    plain_left, unknown, footers = 0.0, 0, False
    for where in files_of(source):
        kind = kind_of(where)
        if kind.layout == "parquet":
            rows, footers = rows + parquet.count(where), True
            continue
        counted, read_bytes, ended = _read(where, max_row_bytes, deadline, kept)
        if ended is None:  # nobody reads on behind a damaged place
            return Rows(rows + counted, "at least"), []
        if ended:
            rows += counted
            if kind.compression:
                packed_rows, packed_bytes = packed_rows + counted, packed_bytes + size_of(where)
        elif kind.compression:
            packed_left, unknown = packed_left + size_of(where), unknown + counted
        else:
            rows += counted
            plain_left += max(0.0, size_of(where) - read_bytes)
    estimated = rows + round(plain_left / max(1.0, row_bytes))
    if packed_left and not packed_rows:
        return Rows(estimated + unknown, "at least"), []
    if packed_left:
        estimated += round(packed_left * packed_rows / packed_bytes)
    return Rows(estimated, "estimated" if packed_left or plain_left else "counted"), [] if footers else kept.rows


class _Kept:
    """Some of the rows that pass, evenly spread: every n-th, where n doubles whenever there are too many."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._step, self._seen = 1, 0

    def add(self, row: Row) -> None:
        if self._seen % self._step == 0:
            self.rows.append(row)
            if len(self.rows) > _MOST_KEPT:
                del self.rows[1::2]
                self._step *= 2
        self._seen += 1


def _read(where: str, max_row_bytes: int, deadline: float, kept: _Kept) -> tuple[int, int, bool | None]:
    """The rows and bytes up to the deadline, and whether the file ended before it; None: it is damaged there."""
    kind = kind_of(where)
    count = size = 0
    if time.monotonic() > deadline:
        return 0, 0, False
    try:
        for row in rows_of(Text(where, kind.compression), kind.layout, Cursor(), max_row_bytes):
            count += 1
            size = size + row.size if kind.columnar else row.after.offset
            kept.add(row)
            if not count % _ROWS_A_LOOK and time.monotonic() > deadline:
                return count, size, False
    except DataError:
        return count, size, None
    return count, size, True
