"""What durability costs: answers a second that reach a segment with fsync and without, and bytes written an answer.

    python -m tests.benchmarks.commit [--folder DIR] [--seconds 1] [--runs 3]

The writer alone, with batches as a commit window of 20 ms collects them. Runs with and without fsync alternate, and
what counts is their ratio on this disk; `--folder` names another one.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import msgspec

from common.records import Written, encode_line, sample_id, timestamp
from workers.segment_writer import SegmentWriter

_PROMPT_TOKENS, _ANSWER_TOKENS = 1000, 256
_VOCAB_SIZE = 163_840
_BATCHES = (1, 4, 16, 64)


def _line(index: int) -> bytes:
    ids = [(index * 7919 + n * 104_729) % _VOCAB_SIZE for n in range(_PROMPT_TOKENS + _ANSWER_TOKENS)]
    return encode_line(
        Written(
            dataset="A",
            index=index,
            sample_id=sample_id("A", index),
            attempt=round(time.time() * 1000),
            input_ids=msgspec.Raw(msgspec.json.encode(ids[:_PROMPT_TOKENS])),
            output_ids=ids[_PROMPT_TOKENS:],
            finish_reason="stop",
            prompt_tokens=_PROMPT_TOKENS,
            completion_tokens=_ANSWER_TOKENS,
            cached_tokens=0,
            latency_seconds=1.0,
            server="http://127.0.0.1:30000",
            created_at=timestamp(time.time()),
            flags=(),
            meta={"id": f"row {index}"},
        )
    )


def _rate(folder: Path, lines: Sequence[bytes], seconds: float, *, durable: bool) -> float:
    """Answers a second, appended batch by batch."""
    writer = SegmentWriter(folder, "bench", 1 << 40)
    answers = 0
    without = nullcontext() if durable else mock.patch.object(os, "fdatasync", return_value=None)
    with without:
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds:
            writer.append("A", lines)
            answers += len(lines)
    writer.close()
    return answers / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; by default the temporary folder")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind; their medians are shown")
    given = parser.parse_args()
    lines = [_line(index) for index in range(max(_BATCHES))]
    print(f"{_PROMPT_TOKENS} prompt and {_ANSWER_TOKENS} answer tokens: {len(lines[0]):,} bytes written an answer")
    print("answers a write   with fsync   without   with/without   ms a write")
    for batch in _BATCHES:
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(given.runs):
            for durable in (True, False):
                with TemporaryDirectory(dir=given.folder, prefix="tokenmill-commit-") as folder:
                    found[durable].append(_rate(Path(folder), lines[:batch], given.seconds, durable=durable))
        synced, volatile = statistics.median(found[True]), statistics.median(found[False])
        shown = f"{synced:10,.0f}/s {volatile:8,.0f}/s {synced / volatile:14.2f} {1000 * batch / synced:12.2f}"
        print(f"{batch:15} {shown}")


if __name__ == "__main__":
    main()
