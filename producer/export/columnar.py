"""The formats `parquet` and `arrow`: rows gathered into batches of columns, without a Python object for each id."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.durable import sync_file
from producer.export.rows import Row
from producer.export.writers import columns

# A batch, and so a row group: some 20 MB of ids and masks. About four times that is held in memory.
_BATCH_TOKENS = 4_000_000
_TEXT = ("id", "dataset", "row_id", "finish_reason", "flags")
_NUMBERS = ("index", "prompt_tokens", "completion_tokens", "part", "parts")


def schema(*, seq_len: bool) -> pa.Schema:
    """input_ids and loss_mask as lists, then the flat columns; no column has nulls."""
    lists = [pa.field("input_ids", pa.list_(pa.int32())), pa.field("loss_mask", pa.list_(pa.int8()))]
    flat = [pa.field(name, pa.string()) for name in _TEXT] + [pa.field(name, pa.int64()) for name in _NUMBERS]
    length = [pa.field("seq_len", pa.int64())] if seq_len else []
    return pa.schema([field.with_nullable(False) for field in (flat[0], *lists, *length, *flat[1:])])


class Batch:
    """Rows on their way into one record batch."""

    def __init__(self, wanted: pa.Schema) -> None:
        self._schema = wanted
        self._rows: list[Row] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Keep it."""
        self._rows.append(row)
        self.tokens += len(row.input_ids)

    def take(self) -> pa.RecordBatch:
        """All of it as one record batch, ids of 32 and masks of 8 bits; empty again after."""
        rows, self._rows, self.tokens = self._rows, [], 0
        lengths = [len(row.input_ids) for row in rows]
        starts = np.cumsum([0, *lengths])
        masks = np.zeros(starts[-1], np.int8)
        for start, row in zip(starts.tolist(), rows, strict=False):
            for begin, end in row.spans:
                masks[start + begin : start + end] = 1
        offsets = pa.array(starts.astype(np.int32))
        ids = np.concatenate([row.input_ids for row in rows]).astype(np.int32, copy=False)
        made: dict[str, pa.Array] = {
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids)),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(masks)),
            "seq_len": pa.array(lengths, pa.int64()),
        }
        flat = [columns(row) for row in rows]
        for name in (*_TEXT, *_NUMBERS):
            made[name] = pa.array([one[name] for one in flat], self._schema.field(name).type)
        return pa.RecordBatch.from_arrays([made[name] for name in self._schema.names], schema=self._schema)


def _empty(columns: pa.Schema) -> pa.RecordBatch:
    """A batch without rows: `load_from_disk` cannot read a file without a batch."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in columns], schema=columns)


class _Sink(Protocol):
    def write_batch(self, batch: pa.RecordBatch) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """A file is followed by the next once it has so many rows, or bytes."""

    rows: int | None = None
    bytes: int = 512 * 1024 * 1024


class Shards:
    """Files of rows in one folder: `name(0, 3)` is that of the first of three."""

    def __init__(
        self,
        folder: Path,
        name: Callable[[int, int], str],
        columns: pa.Schema,
        begin: Callable[[str, pa.Schema], _Sink],
        limits: Limits,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name, self._schema, self._begin, self._limits = folder, name, columns, begin, limits
        self._batch = Batch(columns)
        self._done: list[tuple[Path, int]] = []
        self._sink: _Sink | None = None
        self._path, self._rows, self._bytes = folder, 0, 0
        # Copying and compression let go of the interpreter: the next batch is gathered meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._writing: Future[None] | None = None

    def add(self, row: Row) -> str:
        """Take a row; a full batch is written."""
        self._batch.add(row)
        full = self._limits.rows is not None and self._rows + len(self._batch) >= self._limits.rows
        if full or self._batch.tokens >= _BATCH_TOKENS:
            self._flush()
            if full or self._bytes >= self._limits.bytes:
                self._end_file()
        return ""

    def close(self) -> list[tuple[Path, int]]:
        """Finish the last file, and give all their names, which say how many there are."""
        if len(self._batch) or not self._done:
            self._flush()
        self._end_file()
        self._thread.shutdown()
        named = [
            (self._folder / self._name(number, len(self._done)), rows) for number, (_, rows) in enumerate(self._done)
        ]
        for (part, _), (path, _) in zip(self._done, named, strict=True):
            part.rename(path)
        return named

    def abandon(self) -> None:
        """Let go of the file that is open."""
        self._thread.shutdown()
        if self._sink is not None:
            with contextlib.suppress(OSError):
                self._sink.close()

    def _flush(self) -> None:
        if self._sink is None:
            self._path = self._folder / f".{self._name(len(self._done), 0)}.part"
            self._sink = self._begin(str(self._path), self._schema)
        self._rows += len(self._batch)
        batch = self._batch.take() if len(self._batch) else _empty(self._schema)
        self._wait()
        # Asked for now, while nothing is written: else it would depend on the machine's speed where a file ends.
        self._bytes = self._path.stat().st_size
        self._writing = self._thread.submit(self._sink.write_batch, batch)

    def _wait(self) -> None:
        """Until the batch before is written. Raises what its writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _end_file(self) -> None:
        if self._sink is None:
            return
        self._wait()
        self._sink.close()
        self._sink = None
        sync_file(self._path)
        self._done.append((self._path, self._rows))
        self._rows = 0


def parquet(folder: Path, split: str, limits: Limits) -> Shards:
    """`<folder>/parquet/train-00000-of-00003.parquet`, …: list<int32>, zstd."""

    def begin(path: str, columns: pa.Schema) -> _Sink:
        # Ids are spread over the whole vocabulary: a dictionary of them costs time and saves little.
        texts = ["dataset", "finish_reason", "flags"]
        writer: _Sink = pq.ParquetWriter(path, columns, compression="zstd", use_dictionary=texts)
        return writer

    def name(number: int, of: int) -> str:
        return f"{split}-{number:05d}-of-{of:05d}.parquet"

    return Shards(folder / "parquet", name, schema(seq_len=False), begin, limits)


class Arrow:
    """`<folder>/arrow/train`, as `datasets` saves it to disk (`load_from_disk`), with seq_len."""

    def __init__(self, folder: Path, split: str, limits: Limits) -> None:
        self._folder, self._split = folder / "arrow" / split, split
        plain = schema(seq_len=True)
        self._features = _features(plain)
        told = {"huggingface": msgspec.json.encode({"info": {"features": self._features}})}
        self._shards = Shards(self._folder, _arrow_name, plain.with_metadata(told), pa.ipc.new_stream, limits)

    def add(self, row: Row) -> str:
        """Take a row."""
        return self._shards.add(row)

    def abandon(self) -> None:
        """Let go of the file that is open."""
        self._shards.abandon()

    def close(self) -> list[tuple[Path, int]]:
        """Finish the files, and write the two that `load_from_disk` reads first."""
        files = self._shards.close()
        state: dict[str, Any] = {
            "_data_files": [{"filename": path.name} for path, _ in files],
            "_fingerprint": "0" * 16,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self._split,
        }
        info = {"citation": "", "description": "", "features": self._features, "homepage": "", "license": ""}
        for name, content in (("state.json", state), ("dataset_info.json", info)):
            path = self._folder / name
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
            sync_file(path)
            files.append((path, 0))
        return files


def _arrow_name(number: int, of: int) -> str:
    return f"data-{number:05d}-of-{of:05d}.arrow"


def _features(wanted: pa.Schema) -> dict[str, object]:
    """The columns in the words of `datasets`."""

    def feature(kind: pa.DataType) -> dict[str, object]:
        if pa.types.is_list(kind):
            return {"feature": feature(kind.value_type), "_type": "List"}
        return {"dtype": str(kind), "_type": "Value"}

    return {field.name: feature(field.type) for field in wanted}
