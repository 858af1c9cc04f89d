"""Where in the files of a source its rows stand, for people who look for one: `part-2.jsonl:68`."""

import time
from collections.abc import Collection
from pathlib import Path

from common.errors import DataError
from producer.datasets.compressed import Text
from producer.datasets.containers import read_rows
from producer.datasets.cursor import Cursor
from producer.datasets.kinds import kind_of
from producer.datasets.shards import files_of


def places(source: str | Path, rows: Collection[int], max_row_bytes: int, seconds: float) -> dict[int, str]:
    """File and line of each of `rows`, or the row of the file where it has no lines; of those found in `seconds`.

    A source tells only by reading where a row stands. What cannot be read is left out.
    """
    found: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    try:
        files, first, file, last = files_of(source), 0, 0, max(rows, default=-1)
        for row in read_rows(source, Cursor(), max_row_bytes) if rows else ():
            if row.index > last or time.monotonic() > deadline:
                break
            if row.after.file != file:
                first, file = row.index, row.after.file
            if row.index in rows:
                found[row.index] = _place(files[file], row.index - first, row.after.offset)
    except (OSError, DataError):
        pass
    return found


def _place(where: str, row: int, end: int) -> str:
    """`row` counts from 0 in the file, `end` is the byte behind it; lines count from 1."""
    name, kind = where.rpartition("/")[2], kind_of(where)
    if kind.layout != "jsonl":
        return f"{name}, its row {row:,}"
    line, at = 1, 0
    for chunk in Text(where, kind.compression).chunks(0):
        line += chunk[: max(0, end - 1 - at)].count(b"\n")
        at += len(chunk)
        if at >= end:
            break
    return f"{name}:{line}"
