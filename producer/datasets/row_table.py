"""Rows of a source by their number, for a shuffle: where each of them begins stands in a file, 8 bytes a row.

It is made once, by reading the whole source. Local text that is not compressed is then read where it is. Of all else
the rows are copied into a plain file beside the table: a row of a `.gz` is only found by decompressing all before it,
one of a Parquet file by decoding its row group (24 ms of 10,000 rows), and one behind a URL is a request.

`shuffle.json` says what the table is of. It is removed before the files that it speaks of are replaced.
"""

import contextlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from common.durable import make_folder, replace_file, sync_folder
from common.errors import DataError
from common.segments import NOT_JSON
from producer.datasets.compressed import Text
from producer.datasets.containers import read_rows, rows_of
from producer.datasets.cursor import BadLine, Cursor, Row
from producer.datasets.kinds import kind_of
from producer.datasets.permutation import Permutation
from producer.datasets.places import is_url
from producer.datasets.shards import files_of

_FACTS, _OFFSETS, _ROWS = "shuffle.json", "shuffle.offsets", "shuffle.rows"
_OFFSET_BYTES = 8
# Offsets that are held before they are written.
_TOGETHER = 65_536
_BUFFER_BYTES = 1024 * 1024
# Read behind where a row ends: its newline or comma, and what the end of an array is known by.
_BEHIND_BYTES = 256
# Files of a source that are open at once.
_OPEN_FILES = 64
# A row of a copy: its value, or None with reason and detail of a BadLine. MessagePack keeps bytes bytes.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, str, str]).decode


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What the files beside it hold: `rows` rows of the source, in the order of the source.

    `firsts` has the number of the first row of each file, and `ends` the byte behind the last one; a copy is one file.
    `bytes` is what table and copy take on disk.
    """

    source: str = ""  # what was read, in the words of whoever asked for the table
    max_row_bytes: int
    rows: int
    after: Cursor  # behind the last row of the source
    firsts: list[int]
    ends: list[int]
    copied: bool
    bytes: int


def read_table(folder: Path) -> Table | None:
    """The table in `folder`; None if there is none that is whole. Raises OSError."""
    try:
        table = msgspec.json.decode((folder / _FACTS).read_bytes(), type=Table)
        whole = (folder / _OFFSETS).stat().st_size == _OFFSET_BYTES * table.rows
        return table if whole and (not table.copied or (folder / _ROWS).exists()) else None
    except (FileNotFoundError, NotADirectoryError, *NOT_JSON):
        return None


def make_table(source: str | Path, folder: Path, max_row_bytes: int) -> Table:
    """Read `source` to its end, and write its table into `folder`; it is there once keep_table has said of what it is.

    Raises OSError, and DataError where the source is damaged: a part of it is not shuffled in place of the whole.
    """
    make_folder(folder)
    (folder / _FACTS).unlink(missing_ok=True)
    copied = not all(map(_is_plain, files_of(source)))
    parts = [folder / f"{name}.part" for name in (_OFFSETS, _ROWS)]
    try:
        with parts[0].open("wb", _BUFFER_BYTES) as offsets, parts[1].open("wb", _BUFFER_BYTES) as rows:
            writer = _Writer(offsets, rows if copied else None)
            for row in read_rows(source, Cursor(), max_row_bytes):
                writer.add(row)
            writer.flush()
            table = writer.table(max_row_bytes)
            for file in (offsets, rows):
                file.flush()
                os.fsync(file.fileno())
        parts[0].replace(folder / _OFFSETS)
        if copied:
            parts[1].replace(folder / _ROWS)
        else:
            (folder / _ROWS).unlink(missing_ok=True)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    sync_folder(folder)
    return table


def keep_table(folder: Path, table: Table, source: str) -> None:
    """Say that the table which was made is that of `source`. Raises OSError."""
    replace_file(folder / _FACTS, [msgspec.json.encode(msgspec.structs.replace(table, source=source)), b"\n"])


def _is_plain(where: str) -> bool:
    kind = kind_of(where)
    return not is_url(where) and not kind.columnar and not kind.compression


class _Writer:
    """Writes where each row begins, and the rows themselves if they are copied."""

    def __init__(self, offsets: BinaryIO, copy: BinaryIO | None) -> None:
        self._offsets, self._copy = offsets, copy
        self._held = array("Q")
        self._after = Cursor()
        self._copied_bytes = 0
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, row: Row) -> None:
        while len(self._firsts) <= (0 if self._copy else row.after.file):  # some files may be empty
            self._firsts.append(row.index)
            self._ends.append(0)
        if self._copy:
            self._held.append(self._copied_bytes)
            bad = row.value if isinstance(row.value, BadLine) else None
            raw = _encode((None, bad.reason, bad.detail) if bad else (row.value, "", ""))
            self._copied_bytes = self._ends[0] = self._copied_bytes + len(raw)
            self._copy.write(raw)
        else:
            self._held.append(self._after.offset if row.after.file == self._after.file else 0)
            self._ends[-1] = row.after.offset
        self._after = row.after
        if len(self._held) == _TOGETHER:
            self.flush()

    def flush(self) -> None:
        self._offsets.write(self._held.tobytes())
        del self._held[:]

    def table(self, max_row_bytes: int) -> Table:
        return Table(
            max_row_bytes=max_row_bytes,
            rows=self._after.index,
            after=self._after,
            firsts=self._firsts,
            ends=self._ends,
            copied=self._copy is not None,
            bytes=_OFFSET_BYTES * self._after.index + self._copied_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Piece(Text):
    """An open file of text, of which a row is read, and little more."""

    descriptor: int
    piece_bytes: int

    def chunks(self, offset: int) -> Iterator[bytes]:
        """Its bytes from `offset` on. Raises OSError."""
        while piece := os.pread(self.descriptor, self.piece_bytes, offset):
            yield piece
            offset += len(piece)


class _Files:
    """The files of a table while rows of it are read."""

    def __init__(self, source: str | Path, folder: Path, table: Table) -> None:
        self._table = table
        self._files = [str(folder / _ROWS)] if table.copied else files_of(source)
        self._behind = [*table.firsts[1:], table.rows]  # the number of the row behind each file
        self._offsets = os.open(folder / _OFFSETS, os.O_RDONLY | os.O_CLOEXEC)
        self._open: dict[int, tuple[int, str]] = {}

    def close(self) -> None:
        os.close(self._offsets)
        self._close_files()

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1][0])

    def row(self, number: int, after: Cursor, limit: int) -> Row:
        """The row of this number, with `after` as its cursor. Raises OSError, DataError."""
        file = bisect_right(self._table.firsts, number) - 1
        found = array("Q", os.pread(self._offsets, 2 * _OFFSET_BYTES, number * _OFFSET_BYTES))
        begin, end = found[0], self._table.ends[file] if number + 1 == self._behind[file] else found[1]
        descriptor, layout = self._opened(file)
        if self._table.copied:
            value, reason, detail = _decode(os.pread(descriptor, end - begin, begin))
            return Row(number, BadLine(reason, detail) if reason else value, after, end - begin)
        text = _Piece(self._files[file], "", descriptor, end - begin + _BEHIND_BYTES)
        row = next(rows_of(text, layout, Cursor(number, file, begin), limit), None)
        if row is None:
            raise DataError(f"{text.where} has no row at byte {begin:,} any more; put the earlier file back")
        return Row(number, row.value, after, row.size)

    def _opened(self, file: int) -> tuple[int, str]:
        """Descriptor and layout of a file."""
        if file not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._close_files()
            layout = "" if self._table.copied else kind_of(self._files[file]).layout
            self._open[file] = os.open(self._files[file], os.O_RDONLY | os.O_CLOEXEC), layout
        return self._open[file]


class ShuffledReader:
    """The rows of one source in the order of a seed; its cursors count steps, and a row's index is that of the source.

    `parts` are how many rows the source had each time that it had grown: what is appended is shuffled by itself, and
    comes behind all that was there.
    """

    def __init__(self, source: str | Path, folder: Path, table: Table, seed: int, parts: Sequence[int]) -> None:
        self.source, self.max_row_bytes = source, table.max_row_bytes
        self._folder, self._table = folder, table
        self._begins = [0, *parts[:-1]]
        self._orders = [Permutation(end - begin, seed) for begin, end in zip(self._begins, parts, strict=True)]

    def rows(self, start: Cursor) -> Iterator[Row]:
        """The rows from step `start.index` on. Raises OSError, DataError."""
        with contextlib.closing(_Files(self.source, self._folder, self._table)) as files:
            for step in range(start.index, self._table.rows):
                part = bisect_right(self._begins, step) - 1
                begin = self._begins[part]
                yield files.row(begin + self._orders[part][step - begin], Cursor(step + 1), self.max_row_bytes)
