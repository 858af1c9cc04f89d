"""Rows per second of CPU, memory and the cost of a resume, for each container of rows; the same in a shuffled order.

    nice python -m tests.benchmarks.containers [--rows 1000000] [--small 10000] [--folder DIR]
    nice python -m tests.benchmarks.containers --shuffled [--rows 1000000] [--small 10000] [--folder DIR]
    nice python -m tests.benchmarks.containers --far [--rows 9000000] [--folder DIR]

Each measurement has a process of its own, which reads all rows and keeps none. `memory` is what it has at most (private
pages: those of a mapped Arrow file belong to the kernel's cache), with few and with many rows; `for rows` is what of
that it had not before it read. `resume` is the time from nothing to the first row behind nine tenths of them.

`--shuffled`: rows per second to make the table of the rows (and the copy, where one is needed), and to read 50,000 of
them in the order of a seed from the middle on, a step of the feed at a time. `--far`: the resume at row 9,000,000 of
short rows, as a feed that was just started makes it, with what it logs.
"""

import argparse
import gc
import gzip
import itertools
import json
import logging
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from producer.datasets.containers import MAX_ROW_BYTES, Cursor, Reader, read_rows
from producer.datasets.row_table import ShuffledReader, keep_table, make_table, read_table

_WORDS = ("Natalia", "sold", "clips", "to", "48", "of", "her", "friends", "in", "April", "and", "then", "she", "half")
_LOOKED_AT_ROWS, _CURSOR_ROWS = 500, 2_000
_STEP_ROWS = 128


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


def make_shuffled(path: Path, folder: Path) -> tuple[float, int, bool, int]:
    """Seconds of CPU to make the table, its bytes, whether the rows were copied, and bytes of memory at the end."""
    began = time.process_time()
    made = make_table(path, folder, MAX_ROW_BYTES)
    keep_table(folder, made, "")
    return time.process_time() - began, made.bytes, made.copied, _peak_bytes()


def read_shuffled(path: Path, folder: Path, count: int) -> tuple[float, int]:
    """Seconds of CPU for `count` rows from the middle on, and bytes of memory at most."""
    made = read_table(folder)
    assert made is not None
    began, at = time.process_time(), made.rows // 2
    end = min(made.rows, at + count)
    while at < end:
        reader = ShuffledReader(path, folder, made, 6, [made.rows])
        at += sum(1 for _ in itertools.islice(reader.rows(Cursor(at)), min(_STEP_ROWS, end - at)))
    return time.process_time() - began, _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def far(path: Path, rows: int) -> Cursor:
    """Write rows of 110 bytes, one behind another `rows`; the cursor of that one."""
    line = json.dumps({"id": "row-%08d", "prompt": "Natalia sold clips to 48 of her friends in April, and then she"})
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for first in range(0, rows + 1, 1000):
            file.write("".join(f"{line % index}\n" for index in range(first, first + 1000)).encode())
    return Cursor(rows, 0, rows * (len(line % 0) + 1))


def resume_far(path: Path, cursor: Cursor) -> float:
    """Seconds until a Reader has the row."""
    logging.basicConfig(level=logging.INFO, format="  log: %(message)s")
    began = time.perf_counter()
    assert next(Reader(path).rows(cursor)).index == cursor.index
    return time.perf_counter() - began


def show_shuffled(folder: Path, count: int, small: int) -> None:
    print("container        MB    made/s   table MB  copied     rows/s    memory of few, of many")
    for name, make in CONTAINERS.items():
        path, tables = folder / name, folder / "tables"
        make(path, small)
        _apart(make_shuffled, path, tables)
        _, least = _apart(read_shuffled, path, tables, 50_000)
        _apart(make, path, count)
        size = path.stat().st_size
        seconds, table_bytes, copied, _ = _apart(make_shuffled, path, tables)
        shuffled, most = _apart(read_shuffled, path, tables, 50_000)
        print(
            f"{name:12} {size / 1e6:6.0f} {count / seconds:9,.0f} {table_bytes / 1e6:10.1f} {copied!s:>7} "
            f"{min(50_000, count // 2) / shuffled:10,.0f} {least / 1e6:8.1f} MB {most / 1e6:7.1f} MB",
            flush=True,
        )
        path.unlink()
        shutil.rmtree(tables)


def show_far(folder: Path, rows: int) -> None:
    for name in ("far.jsonl", "far.jsonl.gz"):
        path = folder / name
        cursor = _apart(far, path, rows)
        print(f"{name:12} {path.stat().st_size / 1e6:6.0f} MB, row {rows:,} at byte {cursor.offset:,}", flush=True)
        print(f"  first row after {_apart(resume_far, path, cursor):.3f} s", flush=True)
        path.unlink()


def _apart(task: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--far", action="store_true")
    options = parser.parse_args()
    count = options.rows or (9_000_000 if options.far else 1_000_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.far:
            show_far(Path(folder), count)
        elif options.shuffled:
            show_shuffled(Path(folder), count, options.small)
        else:
            show(Path(folder), count, options.small)


def show(folder: Path, count: int, small_count: int) -> None:
    print("container        MB    rows/s   MB/s     memory    of many     grew   for rows    resume")
    for name, make in CONTAINERS.items():
        path = folder / name
        make(path, small_count)
        _, _, small, _ = _apart(read, path)
        _apart(make, path, count)
        size = path.stat().st_size
        seconds, before, large, cursor = _apart(read, path)
        again = _apart(resume, path, cursor)
        path.unlink()
        print(
            f"{name:12} {size / 1e6:6.0f} {count / seconds:9,.0f} {size / seconds / 1e6:6.0f} "
            f"{small / 1e6:7.1f} MB {large / 1e6:7.1f} MB {large / small - 1:+8.1%} "
            f"{(large - before) / 1e6:7.1f} MB {again:7.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
