"""Parquet: row groups are found by the footer, and read in batches; a row is a dict by column."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import DataError
from producer.datasets.cells import Form, rows_of_batch
from producer.datasets.cursor import Cursor, Row
from producer.datasets.places import open_file

# Rows that are decoded at once: as many as take about so many bytes in the file.
_BATCH_BYTES, _BATCH_ROWS = 1024 * 1024, 64
_BUFFER_BYTES = 64 * 1024
# While 1,000,000 rows are read Arrow holds 3 to 5 MB at most; mimalloc, its default, keeps 40 MB of the process then.
pa.set_memory_pool(pa.system_memory_pool())


def rows(where: str, start: Cursor) -> Iterator[Row]:
    """The rows from `start` on; its offset is a row of the file. Raises OSError, DataError."""
    with open_file(where) as file:
        try:
            parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise_if_of_system(error)
            end = file.seek(0, 2)
            raise DataError(
                f"{where} is no whole Parquet file: no footer ends at its last byte, {end:,} ({_short(error)}); "
                "without it no row can be read; put a whole copy in its place"
            ) from error
        at, begin = start, 0
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            if at.offset < begin + group.num_rows:
                for row in _of_group(where, parquet, number, at, at.offset - begin):
                    yield row
                    at = row.after
                pa.default_memory_pool().release_unused()
            begin += group.num_rows


def count(where: str) -> int:
    """How many rows the file has, by its footer. Raises OSError, DataError."""
    with open_file(where) as file:
        try:
            return int(pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False).metadata.num_rows)
        except (pa.ArrowException, OSError) as error:
            raise_if_of_system(error)
            raise DataError(f"{where} is no whole Parquet file ({_short(error)})") from error


def _of_group(where: str, parquet: pq.ParquetFile, number: int, at: Cursor, skipped: int) -> Iterator[Row]:
    group = parquet.metadata.row_group(number)
    batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
    form = Form.of(parquet.schema_arrow)
    batches = parquet.iter_batches(batch_size=batch_rows, row_groups=[number], use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise_if_of_system(error)
            column = group.column(0)
            first = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            raise DataError(
                f"{where} is damaged in row group {number}, which begins at byte {first:,} ({_short(error)}); "
                f"the rows before row {at.index:,} were read; put a whole copy in its place"
            ) from error
        if batch is None:
            return
        if skipped >= batch.num_rows:
            skipped -= batch.num_rows
            continue
        for row in of_batch(batch.slice(skipped), at, row_bytes(batch), form):
            yield row
            at = row.after
        skipped = 0


def row_bytes(batch: pa.RecordBatch) -> int:
    """What a row of the batch takes, on average."""
    size, rows = int(batch.nbytes), int(batch.num_rows)
    return size // max(1, rows)


def of_batch(batch: pa.RecordBatch, at: Cursor, size: int, form: Form) -> Iterator[Row]:
    """The rows of a batch, of which the first is at the cursor `at`, and each takes some `size` bytes."""
    for value in rows_of_batch(batch, form):
        at = at.behind(at.offset + 1)
        yield Row(at.index - 1, value, at, size)


def raise_if_of_system(error: Exception) -> None:
    """Raise an error that the system gave, with its number: Arrow's own, of what is in a file, can be OSErrors too."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
