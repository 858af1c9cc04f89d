"""Rows per second of CPU, memory and the cost of a resume, for each container of rows.

    nice python -m tests.benchmarks.containers [--rows 1000000] [--small 10000] [--folder DIR]

Each measurement has a process of its own, which reads all rows and keeps none. `memory` is what it has at most (private
pages: those of a mapped Arrow file belong to the kernel's cache), with few and with many rows; `for rows` is what of
that it had not before it read. `resume` is the time from nothing to the first row behind nine tenths of them.
"""

import argparse
import gc
import gzip
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from producer.datasets.containers import Cursor, read_rows

_WORDS = ("Natalia", "sold", "clips", "to", "48", "of", "her", "friends", "in", "April", "and", "then", "she", "half")
_LOOKED_AT_ROWS, _CURSOR_ROWS = 500, 2_000


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Some 700 bytes each, no two alike."""
    source = Random(6)
    text = " ".join(source.choice(_WORDS) + "\n" * (at % 20 == 0) for at in range(100_000))
    for index in range(count):
        begin = source.randrange(len(text) - 700)
        yield {"id": f"row-{index}", "prompt": text[begin : begin + 600], "source": "made"}


def _lines(count: int) -> Iterator[bytes]:
    return (json.dumps(row).encode() + b"\n" for row in rows(count))


def jsonl(path: Path, count: int) -> None:
    with path.open("wb") as file:
        file.writelines(_lines(count))


def array(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for index, line in enumerate(_lines(count)):
            file.write((b"," if index else b"[") + line[:-1])
        file.write(b"]")


def csv_file(path: Path, count: int) -> None:
    with path.open("w") as file:
        file.write("id,prompt,source\n")
        file.writelines(f'{row["id"]},"{row["prompt"]}",{row["source"]}\n' for row in rows(count))


def gz(path: Path, count: int) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(_lines(count))


def zst(path: Path, count: int) -> None:
    with zstandard.open(path, "wb") as file:
        for line in _lines(count):
            file.write(line)


def _batches(count: int) -> Iterator[pa.RecordBatch]:
    part: list[dict[str, Any]] = []
    for row in rows(count):
        part.append(row)
        if len(part) == 1000:
            yield pa.RecordBatch.from_pylist(part)
            part.clear()
    if part:
        yield pa.RecordBatch.from_pylist(part)


def parquet(path: Path, count: int) -> None:
    batches = _batches(count)
    first = next(batches)
    with pq.ParquetWriter(path, first.schema) as writer:
        held = [first]
        for batch in batches:
            held.append(batch)
            if len(held) == 10:
                writer.write_table(pa.Table.from_batches(held))
                held.clear()
        if held:
            writer.write_table(pa.Table.from_batches(held))


def arrow(path: Path, count: int) -> None:
    batches = _batches(count)
    first = next(batches)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


CONTAINERS: dict[str, Callable[[Path, int], None]] = {
    "a.jsonl": jsonl,
    "a.json": array,
    "a.csv": csv_file,
    "a.jsonl.gz": gz,
    "a.jsonl.zst": zst,
    "a.parquet": parquet,
    "a.arrow": arrow,
}


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def read(path: Path) -> tuple[float, int, int, Cursor]:
    """Seconds of CPU for all rows, bytes of memory before and at most, and the cursor behind nine tenths of them."""
    gc.collect()
    before, peak = _private_bytes(), 0
    cursors: list[Cursor] = []
    began = time.process_time()
    for count, row in enumerate(read_rows(path, Cursor()), 1):
        if count % _LOOKED_AT_ROWS == 0:
            peak = max(peak, _private_bytes())
        if count % _CURSOR_ROWS == 0:
            cursors.append(row.after)
    seconds = time.process_time() - began
    return seconds, before, peak, cursors[len(cursors) * 9 // 10]


def resume(path: Path, cursor: Cursor) -> float:
    """Seconds until the first row from `cursor` on is there."""
    began = time.perf_counter()
    assert next(read_rows(path, cursor)).index == cursor.index
    return time.perf_counter() - began


def _apart(task: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print("container        MB    rows/s   MB/s     memory    of many     grew   for rows    resume")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, make in CONTAINERS.items():
            path = Path(folder) / name
            make(path, options.small)
            _, _, small, _ = _apart(read, path)
            _apart(make, path, options.rows)
            size = path.stat().st_size
            seconds, before, large, cursor = _apart(read, path)
            again = _apart(resume, path, cursor)
            path.unlink()
            print(
                f"{name:12} {size / 1e6:6.0f} {options.rows / seconds:9,.0f} {size / seconds / 1e6:6.0f} "
                f"{small / 1e6:7.1f} MB {large / 1e6:7.1f} MB {large / small - 1:+8.1%} "
                f"{(large - before) / 1e6:7.1f} MB {again:7.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
