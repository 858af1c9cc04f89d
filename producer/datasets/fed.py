"""The rows of a source that a dataset feeds, in the order in which it does, for people to look at."""

import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from common.sections import DatasetSettings
from producer.datasets.containers import Cursor, Row, read_rows
from producer.datasets.permutation import Permutation
from producer.datasets.sample import FIRST_ROWS, PLACES, ROWS_AT_A_PLACE, Sample, sample

_MOST_ROWS = FIRST_ROWS + PLACES * ROWS_AT_A_PLACE


class Fed(NamedTuple):
    """Some of the rows that are fed, all of them if `taken.all`; `order` says which these are, where not all there are.

    `rows` are all that are fed; None if that is not known.
    """

    taken: Sample
    rows: int | None = None
    order: str = ""


def fed(source: str | Path, dataset: DatasetSettings, seconds: float) -> Fed:
    """What `limit` and `shuffle` of a dataset leave of its source, and in which order. Raises OSError, DataError.

    For that its rows are counted (up to the limit, where they are not shuffled), and read a second time. Where this
    takes longer than `seconds`, or the source is damaged, rows from all over the source stand for them.
    """
    if dataset.limit is None and dataset.shuffle is None:
        return Fed(sample(source, dataset.max_row_bytes, seconds))
    said = ", ".join(f"{key} = {value}" for key in ("shuffle", "limit") if (value := getattr(dataset, key)) is not None)
    found = _counted(source, dataset, time.monotonic() + seconds)
    if found is None:
        taken = sample(source, dataset.max_row_bytes, seconds)
        return Fed(taken._replace(all=False), order=f"{said}: which rows that is takes too long to say here")
    rows = min(found, dataset.limit or found)
    steps = range(rows) if rows <= _MOST_ROWS else [*range(FIRST_ROWS), *_spread(FIRST_ROWS, rows)]
    permutation = None if dataset.shuffle is None else Permutation(found, dataset.shuffle)
    wanted = [step if permutation is None else permutation[step] for step in steps]
    picked = _picked(source, dataset, wanted)
    taken = Sample([picked[index] for index in wanted], [f"row {index:,}" for index in wanted], rows <= _MOST_ROWS)
    return Fed(taken, rows, said if permutation is None else f"{said}, of {found:,}")


def _counted(source: str | Path, dataset: DatasetSettings, deadline: float) -> int | None:
    """The rows that there are; if they are fed as they stand, those of the limit at most. None: not by the deadline."""
    count = 0
    try:
        for count, _ in enumerate(read_rows(source, Cursor(), dataset.max_row_bytes), 1):
            if time.monotonic() > deadline:
                return None
            if dataset.shuffle is None and count == dataset.limit:
                break
    except DataError:
        return None
    return count


def _spread(first: int, rows: int) -> list[int]:
    """So many steps that the most rows are taken, evenly from behind the first ones to the last."""
    others = _MOST_ROWS - first
    return [first + (rows - first) * number // others for number in range(others)]


def _picked(source: str | Path, dataset: DatasetSettings, wanted: list[int]) -> dict[int, Row]:
    """The rows of these indices."""
    indices = set(wanted)
    last = max(indices, default=-1)
    read = islice(read_rows(source, Cursor(), dataset.max_row_bytes), last + 1)
    return {row.index: row for row in read if row.index in indices}
