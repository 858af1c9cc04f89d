"""Reads the rows of a source, whatever it is: a file of any kind, a folder or pattern of files, by path or by URL."""

from collections.abc import Iterator
from pathlib import Path

from common.errors import DataError
from producer.datasets import arrow, csv_file, json_array, jsonl, parquet
from producer.datasets.compressed import Text
from producer.datasets.cursor import MAX_ROW_BYTES, BadLine, Cursor, Row
from producer.datasets.kinds import kind_of
from producer.datasets.places import stamp
from producer.datasets.shards import files_of

__all__ = ["MAX_ROW_BYTES", "BadLine", "Cursor", "Reader", "Row", "read_rows", "rows_of"]


def read_rows(source: str | Path, start: Cursor, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """The rows from `start` on, read as they are asked for; the index runs through all files of the source.

    Raises OSError, and DataError where a file is damaged or ends too early, once all rows before were given.
    """
    files = files_of(source)
    if start.file >= len(files):
        raise DataError(f"{source} has {len(files)} files, and was read up to its file {start.file + 1}; put them back")
    at = start
    for number in range(start.file, len(files)):
        if number != at.file:
            at = Cursor(at.index, number)
        kind = kind_of(files[number])
        for row in rows_of(Text(files[number], kind.compression), kind.layout, at, max_row_bytes):
            yield row
            at = row.after


def rows_of(text: Text, layout: str, start: Cursor, limit: int) -> Iterator[Row]:
    """The rows of one file from `start` on. Raises as read_rows does."""
    match layout:
        case "parquet":
            return parquet.rows(text.where, start)
        case "arrow":
            return arrow.rows(text.where, start)
        case "csv":
            return csv_file.rows(text, start, limit)
        case "array" | "documents":
            return json_array.rows(text, start, limit, array=layout == "array")
        case _:
            return jsonl.rows(text, start, limit)


class Reader:
    """Rows of one source for one who takes some, and comes back for the next.

    What was opened stays open in between: a compressed file can only be read from its start, and a Parquet file has a
    footer to be read and a page to be decoded first. A file that was written to since is opened again.
    """

    def __init__(self, source: str | Path, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self.source, self.max_row_bytes = source, max_row_bytes
        self._rows: Iterator[Row] = iter(())
        self._at: Cursor | None = None  # where the next row of _rows begins
        self._stamp: tuple[object, ...] = ()

    def rows(self, start: Cursor) -> Iterator[Row]:
        """The rows from `start` on. Raises as read_rows does."""
        rows = self._open(start)
        self._at = None  # what fails is opened again
        for row in rows:
            if row.index < start.index:
                continue
            self._at = row.after
            yield row
            self._at = None
        self._rows = iter(())

    def _open(self, start: Cursor) -> Iterator[Row]:
        files = files_of(self.source)
        now = (*files, *stamp(files[start.file])) if start.file < len(files) else ()
        if self._at is None or self._stamp != now or not self._reaches(start, files):
            self._rows = read_rows(self.source, start, self.max_row_bytes)
        self._stamp = now
        return self._rows

    def _reaches(self, start: Cursor, files: list[str]) -> bool:
        """Whether to read on leads to `start`, and is not slower than to begin there."""
        if self._at == start:
            return True
        ahead = self._at is not None and self._at.file == start.file and self._at.index < start.index
        return ahead and bool(kind_of(files[start.file]).compression)
