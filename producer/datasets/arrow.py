"""Arrow files: the streams that `datasets` saves to disk, and Feather (version 2). A row is a dict by column."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from common.errors import DataError
from producer.datasets.cells import Form
from producer.datasets.cursor import Cursor, Row
from producer.datasets.parquet import of_batch, raise_if_of_system, row_bytes
from producer.datasets.places import is_url, open_file

FEATHER = b"ARROW1"
# Rows that are made objects at once.
_SLICE_ROWS = 64


def rows(where: str, start: Cursor) -> Iterator[Row]:
    """The rows from `start` on; its offset is a row of the file. Raises OSError, DataError.

    A local file is mapped: batches before `start` are skipped without being read.
    """
    at, begin = start, 0
    with _opened(where) as file:
        batches = _batches(file)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, EOFError, OSError) as error:
                raise_if_of_system(error)
                raise DataError(
                    f"{where} is cut off or damaged near byte {file.tell():,} ({str(error).partition(chr(10))[0]}); "
                    f"the rows before row {at.index:,} were read; put a whole copy in its place"
                ) from error
            if batch is None:
                return
            size, form = row_bytes(batch), Form.of(batch.schema)
            for first in range(max(0, at.offset - begin), batch.num_rows, _SLICE_ROWS):
                for row in of_batch(batch.slice(first, _SLICE_ROWS), at, size, form):
                    yield row
                    at = row.after
            begin += batch.num_rows


@contextmanager
def _opened(where: str) -> Iterator[pa.NativeFile]:
    if is_url(where):
        with open_file(where) as file, pa.PythonFile(file, mode="r") as wrapped:
            yield wrapped
    else:
        with pa.memory_map(where) as mapped:
            yield mapped


def _batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    head = file.read(len(FEATHER))
    file.seek(0)
    if head == FEATHER:
        feather = pa.ipc.open_file(file)
        for number in range(feather.num_record_batches):
            yield feather.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)
