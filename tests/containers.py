"""One and the same rows in every container that is read, for the tests of those that read them."""

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Table = Sequence[dict[str, Any]]

TEXTS = [
    "",
    "plain",
    'quote " and \\ and \\" end\\',
    "two\nlines\r\nthree",
    "a\u2028b\u0085c",
    "[{,]}",
    "日本",
    "\x00",
]


def table(rows: int) -> list[dict[str, Any]]:
    """Rows that hold what readers trip over; every value is a text, since a CSV has no others."""
    return [{"id": str(index), "prompt": TEXTS[index % len(TEXTS)] * (index % 5)} for index in range(rows)]


def lines(rows: Table) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=index % 2 == 0).encode() + b"\n" for index, row in enumerate(rows))


def jsonl(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_bytes(lines(rows))
    return path


def jsonl_named_json(path: Path, rows: Table) -> Path:
    return jsonl(path, rows).rename(path.with_suffix(".json"))


def bare_lists(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_bytes(b"".join(json.dumps([row]).encode() + b"\n" for row in rows))
    return path


def array(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".json")
    path.write_bytes(b"\xef\xbb\xbf " + json.dumps(list(rows)).encode())
    return path


def indented_array(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(list(rows), indent=2, ensure_ascii=False) + "\n")
    return path


def documents(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".json")
    path.write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    return path


def csv_file(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["id", "prompt"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def gz(path: Path, rows: Table) -> Path:
    """Two members, as `cat a.gz b.gz` leaves them, and padding."""
    path = path.with_suffix(".jsonl.gz")
    half = len(rows) // 2
    path.write_bytes(gzip.compress(lines(rows[:half])) + gzip.compress(lines(rows[half:])) + b"\0" * 512)
    return path


def zst(path: Path, rows: Table) -> Path:
    """A frame without data as pzstd begins with, and two that have some."""
    path = path.with_suffix(".jsonl.zst")
    half = len(rows) // 2
    frames = (zstandard.compress(lines(part)) for part in (rows[:half], rows[half:]))
    path.write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + b"".join(frames))
    return path


def csv_gz(path: Path, rows: Table) -> Path:
    plain = csv_file(path, rows)
    path = path.with_suffix(".csv.gz")
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def array_zst(path: Path, rows: Table) -> Path:
    plain = array(path, rows)
    path = path.with_suffix(".json.zst")
    path.write_bytes(zstandard.compress(plain.read_bytes()))
    return path


def parquet(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    return path


def saved_dataset(path: Path, rows: Table) -> Path:
    """As `datasets` saves it: two streams of several batches, listed in state.json."""
    path.mkdir()
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        written = pa.Table.from_pylist(list(part), schema=pa.schema({"id": pa.string(), "prompt": pa.string()}))
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, written.schema) as stream:
            stream.write_table(written, max_chunksize=5)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def feather(path: Path, rows: Table) -> Path:
    path = path.with_suffix(".feather")
    written = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, written.schema) as stream:
        stream.write_table(written, max_chunksize=6)
    return path


def shards(path: Path, rows: Table) -> Path:
    """A folder of several kinds, more than ten so that their order is not that of the letters; some are empty."""
    path.mkdir()
    makers: list[Callable[[Path, Table], Path]] = [jsonl, gz, parquet, indented_array, csv_file, zst]
    size = max(1, len(rows) // 11)
    for number in range(12):
        part = rows[number * size : (number + 1) * size] if number < 11 else rows[11 * size :]
        maker = makers[number % len(makers)] if part else jsonl
        made = maker(path / f"part-{number}", part)
        made.rename(path / f"part-{number}{''.join(made.suffixes)}")
    (path / "README.md").write_text("what it is")
    (path / "_SUCCESS").touch()
    return path


CONTAINERS: dict[str, Callable[[Path, Table], Path]] = {
    "jsonl": jsonl,
    "jsonl named .json": jsonl_named_json,
    "bare lists": bare_lists,
    "array": array,
    "indented array": indented_array,
    "documents": documents,
    "csv": csv_file,
    "gz": gz,
    "zst": zst,
    "csv.gz": csv_gz,
    "array.zst": array_zst,
    "parquet": parquet,
    "saved dataset": saved_dataset,
    "feather": feather,
    "shards": shards,
}


def decoded(value: Any) -> Any:
    """The row as an object, whichever container it came from."""
    row = json.loads(value) if isinstance(value, bytes) else value
    return row[0] if isinstance(row, list) else row
