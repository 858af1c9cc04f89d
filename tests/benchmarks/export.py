"""How fast an export is beside pyarrow writing the same table to Parquet, in one run; and its memory.

    python -m tests.benchmarks.export [--rows 200000] [--tokens 1500] [--times 3]

The segments are made first (some 5 kB a row at 1,500 ids), in a folder that is removed. Processes are timed whole, and
their memory is the most that they had resident, for a tenth of the rows and for all. Each is timed so many times, in
turns with pyarrow, and the shortest counts.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from common.records import Written, encode_line

_PLAIN = """
import sys, time
import pyarrow.parquet as pq
table = pq.read_table(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
pq.write_table(table, sys.argv[2], compression="zstd", use_dictionary=["dataset", "finish_reason", "flags"])
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
_CONFIG = 'output = "out"\n[tokenizer]\npath = "none"\n[[datasets]]\nname = "A"\npath = "a.jsonl"\n'


def segments(folder: Path, rows: int, tokens: int) -> Path:
    """A configuration with one dataset of `rows` records; a fifth of each row's ids are its prompt."""
    place = folder / "out" / "A"
    place.mkdir(parents=True)
    rng = np.random.default_rng(rows)
    with (place / "w-1.jsonl").open("wb") as file:
        for index in range(rows):
            # As text has them: few ids often, many seldom.
            ids = np.minimum(rng.zipf(1.2, tokens), 160_000).tolist()
            record = Written(
                dataset="A", index=index, sample_id=f"A/{index}", attempt=index,
                input_ids=msgspec.Raw(msgspec.json.encode(ids[: tokens // 5])), output_ids=ids[tokens // 5 :],
                finish_reason="stop", prompt_tokens=tokens // 5, completion_tokens=tokens - tokens // 5,
                cached_tokens=0, latency_seconds=1.0, server="http://gpu1:30000",
                created_at="2026-01-31T12:00:00.000Z", flags=(), meta={"id": f"row-{index}"},
            )  # fmt: skip
            file.write(encode_line(record))
    config = folder / "tokenmill.toml"
    config.write_text(_CONFIG)
    return config


def exported(config: Path, layout: str) -> tuple[float, float, float]:
    """Wall and CPU seconds of one export, and the MB that it had resident at most."""
    shutil.rmtree(config.parent / layout, ignore_errors=True)
    before = time.perf_counter()
    command = [sys.executable, "-m", "producer.cli.main", "export", "-c", str(config), "--format", layout]
    process = subprocess.Popen(
        [*command, "-o", str(config.parent / layout)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the export to {layout} failed")
    return time.perf_counter() - before, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def plain(folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds that pyarrow takes to write the table that was exported."""
    command = [sys.executable, "-c", _PLAIN, str(folder / "parquet" / "parquet"), str(folder / "plain.parquet")]
    wall, cpu = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    return float(wall), float(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--tokens", type=int, default=1_500, help="ids of a row, prompt and answer")
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tm-export-") as name:
        for rows in (asked.rows // 10, asked.rows):
            config = segments(Path(name) / str(rows), rows, asked.tokens)
            timed = [(exported(config, "parquet"), plain(config.parent)) for _ in range(asked.times)]
            wall, cpu = (min(ours[n] for ours, _ in timed) for n in (0, 1))
            alone, alone_cpu = (min(theirs[n] for _, theirs in timed) for n in (0, 1))
            peak = max(ours[2] for ours, _ in timed)
            print(
                f"parquet {rows:>8,} rows: {wall:6.1f} s, {cpu:6.1f} s CPU, {peak:5.0f} MB; pyarrow alone "
                f"{alone:6.1f} s, {alone_cpu:6.1f} s CPU: {wall / alone:.2f} times its time, "
                f"{cpu / alone_cpu:.2f} times its CPU"
            )
            wall, cpu, peak = exported(config, "ids")
            print(f"ids     {rows:>8,} rows: {wall:6.1f} s, {cpu:6.1f} s CPU, {peak:5.0f} MB", flush=True)


if __name__ == "__main__":
    main()
