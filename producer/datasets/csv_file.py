"""CSV: a header of column names, then a row a record; a quoted field may hold newlines. Every value is a text."""

import csv
import io
from collections.abc import Iterator

from common.errors import DataError
from producer.datasets.compressed import Text
from producer.datasets.cursor import BadLine, Cursor, Row, too_long
from producer.datasets.jsonl import BOM, lines

_DELIMITERS = ",;\t"
# A header has to end within so many bytes.
_HEADER_BYTES = 1024 * 1024


def rows(text: Text, start: Cursor, limit: int) -> Iterator[Row]:
    """The records behind the header from `start` on. Raises OSError, DataError."""
    header, begin, delimiter = _header(text)
    at, offset = start, max(start.offset, begin)
    while True:
        records = _Records(text, offset, limit, delimiter)
        for fields, end in records:
            at = at.behind(end)
            value = _checked(fields, header) if isinstance(fields, list) else fields
            yield Row(at.index - 1, value, at, end - records.begin)
        if records.open_row is None:
            return
        offset = records.first_end
        at = at.behind(offset)
        yield Row(at.index - 1, records.open_row, at, limit)


class _Records:
    """Records from a byte on, with the byte behind each.

    A quote that is never closed makes one record of the rest of the file. Where that is found, at the end or beyond
    `limit` bytes, reading stops with `open_row`, and goes on at `first_end`, the byte behind the record's first line.
    """

    def __init__(self, text: Text, offset: int, limit: int, delimiter: str) -> None:
        self.begin = self.first_end = offset  # of the record at hand
        self.open_row: BadLine | None = None
        self._lines = lines(text.chunks(offset), offset, limit)
        self._limit, self._delimiter = limit, delimiter
        self._end = offset
        self._decodable = True
        csv.field_size_limit(limit)

    def __iter__(self) -> Iterator[tuple[list[str] | BadLine, int]]:
        reader = self._reader()
        while True:
            self.begin, self.first_end, self._decodable = self._end, 0, True
            fields: list[str] | BadLine
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fields = BadLine("not_csv", f"the record is not CSV: {error}")
                if "unexpected end" in str(error) and self.first_end < self._end:
                    self.open_row = self.open_row or BadLine("not_csv", "a quote of this line is not closed")
                reader = self._reader()
            if self.open_row:
                return
            if not self._decodable:
                fields = BadLine("not_csv", "the record is not UTF-8")
            if fields:
                yield fields, self._end

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._texts(), delimiter=self._delimiter, strict=True)

    def _texts(self) -> Iterator[str]:
        for line, end in self._lines:
            self._end = end
            self.first_end = self.first_end or end
            if line is None or end - self.begin > self._limit:
                self.open_row = too_long(self._limit)
                return
            try:
                yield line.decode()
            except UnicodeDecodeError:
                self._decodable = False
                yield line.decode("utf-8", "replace")


def _checked(fields: list[str], header: list[str]) -> dict[str, str] | BadLine:
    if len(fields) != len(header):
        return BadLine("not_csv", f"the record has {len(fields)} fields, and the header {len(header)}")
    return dict(zip(header, fields, strict=True))


def _header(text: Text) -> tuple[list[str], int, str]:
    """The column names, the byte behind them, and the delimiter. Raises DataError."""
    first = next(lines(text.chunks(0), 0, _HEADER_BYTES), None)
    if first is None:
        return [], 0, ","
    head, end = first
    try:
        line = (head or b"").removeprefix(BOM).decode()
    except UnicodeDecodeError:
        raise DataError(f"{text.where} is not UTF-8: its header cannot be read; convert it") from None
    delimiter = max(_DELIMITERS, key=line.count)
    try:
        names = next(csv.reader(io.StringIO(line), delimiter=delimiter), [])
    except csv.Error as error:
        cure = "let its lines end with LF, not with CR alone" if "\r" in line.rstrip() else "correct it"
        raise DataError(f"the header of {text.where} is not CSV ({error}); {cure}") from None
    if not any(names):
        raise DataError(f"{text.where} has no header; let its first line name the columns")
    if len(set(names)) != len(names):
        raise DataError(f"the header of {text.where} names a column twice; give each a name of its own")
    return names, end, delimiter
