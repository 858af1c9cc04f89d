"""Rows of a source for people to look at: its first ones, and of a large one some from all over it."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from common.sections import DatasetSettings
from common.words import counted
from producer.datasets import parquet
from producer.datasets.containers import Cursor, Row, read_rows
from producer.datasets.kinds import kind_of
from producer.datasets.layouts.catalog import DETECTED_ROWS, Detected
from producer.datasets.places import open_file, size_of
from producer.datasets.reasons import BadRow
from producer.datasets.rows import convert, layout_of
from producer.datasets.shards import files_of

# How many rows come first, and how many follow at each of the places behind them.
FIRST_ROWS, PLACES, ROWS_AT_A_PLACE = 300, 10, 30
_DETECT_SECONDS = 2.0
_BYTES = 32_000_000  # of the first rows, and of the others


class Sample(NamedTuple):
    """`rows` and where each of them is; whether these are `all` rows of the source; why it could not be read on."""

    rows: list[Row]
    places: list[str]
    all: bool
    fault: str = ""


def sample(source: str | Path, max_row_bytes: int, seconds: float) -> Sample:
    """The first rows of `source`, then some at each of 10 places spread evenly over it, for `seconds` at most.

    JSON lines can be entered anywhere, and Parquet by its rows; of other files the beginning is seen. Raises OSError
    and DataError if not a single row can be read.
    """
    deadline = time.monotonic() + seconds
    taken = Sample([], [], all=False)
    try:
        ended = _take(taken, source, Cursor(), FIRST_ROWS, max_row_bytes, deadline)
        if ended:
            return taken._replace(all=True)
        files = files_of(source)
        for place in range(1, PLACES + 1):
            start = _entered(files, place * len(files) / (PLACES + 1), max_row_bytes)
            last = taken.rows[-1].after
            if time.monotonic() < deadline and start and (start.file, start.offset) >= (last.file, last.offset):
                _take(taken, source, start, ROWS_AT_A_PLACE, max_row_bytes, deadline)
    except (OSError, DataError) as error:
        if not taken.rows:
            raise
        return taken._replace(fault=str(error))
    return taken


def _take(taken: Sample, source: str | Path, start: Cursor, rows: int, max_row_bytes: int, deadline: float) -> bool:
    """Take up to `rows` rows from `start` on; whether the source ended before that."""
    files, at, size, count = files_of(source), start, 0, 0
    for row in read_rows(source, start, max_row_bytes):
        if count == rows or size > _BYTES or (taken.rows and time.monotonic() > deadline):
            return False
        begins = at if row.after.file == at.file else Cursor(file=row.after.file)
        known = f"row {row.index:,}" if start == Cursor() else _place(files[begins.file], begins)
        taken.rows.append(row)
        taken.places.append(known)
        at, size, count = row.after, size + row.size, count + 1
    return True


def _place(where: str, begins: Cursor) -> str:
    unit = "row" if kind_of(where).columnar else "byte"
    return f"{unit} {begins.offset:,} of {where.rpartition('/')[2]}"


def _entered(files: list[str], place: float, max_row_bytes: int) -> Cursor | None:
    """The first row at a place, counted in files: 2.5 is in the middle of the third."""
    number = int(place)
    where, kind = files[number], kind_of(files[number])
    if kind.layout == "parquet":
        return Cursor(file=number, offset=int((place - number) * parquet.count(where)))
    if str(kind) != "jsonl":
        return Cursor(file=number)
    offset = int((place - number) * size_of(where))
    with open_file(where) as file:
        file.seek(offset)
        line = file.readline(max_row_bytes) if offset else b""
    return Cursor(file=number, offset=offset + len(line)) if not offset or line.endswith(b"\n") else None


def first_look(source: str | Path, dataset: DatasetSettings) -> tuple[str, str | None]:
    """Of the first rows, for people: their layouts, as `layout messages`; and why none can be a prompt, if none can.

    The former says so where they cannot be read.
    """
    try:
        taken, ended = _first(source, dataset)
    except (OSError, DataError) as error:
        return f"its rows cannot be read: {error}", None
    return _layouts(taken.rows, dataset, ended=ended), _unusable(taken.rows, dataset, ended=ended)


def _layouts(rows: Sequence[Row], dataset: DatasetSettings, *, ended: bool) -> str:
    found = Detected.of(layout_of(row.value, dataset) for row in rows)
    if not rows:
        return "no rows"
    of = f" of {'all' if ended else 'the first'} {counted(len(rows), 'row')}" if len(found.rows) > 1 else ""
    return f"{found}{of}"


def _unusable(rows: Sequence[Row], dataset: DatasetSettings, *, ended: bool) -> str | None:
    reasons: Counter[str] = Counter()
    details: dict[str, str] = {}
    for row in rows:
        try:
            convert(row.value, dataset, whole=dataset.turns == "all")
        except BadRow as bad:
            reasons[bad.reason] += 1
            details.setdefault(bad.reason, bad.detail)
        else:
            return None
    if not reasons:
        return None
    reason, count = reasons.most_common(1)[0]
    only = ended and len(rows) == 1
    which = "its only row cannot" if only else f"none of its {'' if ended else 'first '}{len(rows)} rows can"
    return f"{which} be a prompt: {count} {reason} ({details[reason]})"


def _first(source: str | Path, dataset: DatasetSettings) -> tuple[Sample, bool]:
    """The first rows, and whether they are all. Raises OSError, DataError if none can be read."""
    taken, deadline = Sample([], [], all=False), time.monotonic() + _DETECT_SECONDS
    try:
        return taken, _take(taken, source, Cursor(), DETECTED_ROWS, dataset.max_row_bytes, deadline)
    except (OSError, DataError):
        if not taken.rows:
            raise
        return taken, False
