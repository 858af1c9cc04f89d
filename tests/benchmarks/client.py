"""CPU of one call of the client alone: no queue, no ledger, no files.

    python -m tests.benchmarks.client [--seconds 5] [--runs 3] [--latency-mean 1]

The simulated server is a process of its own, and answers at once unless told otherwise. What is counted is what the
system says that this process, the client, has used (getrusage), over the calls that were answered. The aim is under
0.8 ms at 500 in flight.
"""

import argparse
import asyncio
import itertools
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.benchmarks.prompts import Prompts
from tests.benchmarks.throughput import server
from workers.sglang.answer import Acceptance
from workers.sglang.client import SGLangClient

_PROMPT_TOKENS, _ANSWER_TOKENS = 1000, 256
_VOCAB_SIZE = 163_840
_PROMPTS = 256
_AIM_MS, _AIM_AT = 0.8, 500


class Run(NamedTuple):
    """One run: milliseconds of CPU a call, calls a second, resident memory at its peak so far."""

    cpu_ms: float
    rate: float
    rss_mb: float


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(url: str, in_flight: int, seconds: float, prompts: Sequence[bytes]) -> Run:
    """`in_flight` calls at once, each followed by the next, for `seconds` after a tenth of that to warm up."""
    client = SGLangClient(
        [url],
        acceptance=Acceptance(_VOCAB_SIZE, "default"),
        sampling_params={"max_new_tokens": _ANSWER_TOKENS, "temperature": 1.0},
        max_connections=in_flight,
    )
    answered = 0
    begin = time.monotonic() + seconds / 10
    end = begin + seconds
    prompt = itertools.cycle(prompts)

    async def slot() -> None:
        nonlocal answered
        while time.monotonic() < end:
            answer, _, _ = await client.generate(next(prompt), prompt_tokens=_PROMPT_TOKENS)
            assert answer.completion_tokens == _ANSWER_TOKENS
            answered += 1

    async def count() -> tuple[float, int]:
        """From when all slots are at work to just before they end."""
        await asyncio.sleep(begin - time.monotonic())
        cpu, before = _cpu_seconds(), answered
        await asyncio.sleep(end - time.monotonic() - 0.05)
        return _cpu_seconds() - cpu, answered - before

    try:
        counting = asyncio.create_task(count())
        await asyncio.gather(*(slot() for _ in range(in_flight)))
        cpu, calls = await counting
    finally:
        await client.aclose()
    assert not client.failed_attempts, client.failed_attempts
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return Run(1000 * cpu / calls, calls / seconds, rss_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a run lasts [5]")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median counts [3]")
    parser.add_argument("--in-flight", type=int, nargs="*", default=[64, 128, 500], metavar="N")
    parser.add_argument(
        "--latency-mean", type=float, default=0.0, metavar="S", help="mean time of an answer; 0: they come at once [0]"
    )
    given = parser.parse_args()
    pace = ("--latency-mean", str(given.latency_mean), "--latency-cv", "1") if given.latency_mean else ("--speed", "0")
    made = Prompts(_PROMPT_TOKENS, _VOCAB_SIZE)
    prompts = [made.input_ids(index) for index in range(_PROMPTS)]
    print(
        f"{_PROMPT_TOKENS} prompt tokens, {_ANSWER_TOKENS} output tokens, median of {given.runs} runs (lowest-highest)"
    )
    print(f"{'in flight':>9} {'CPU ms a call':>22} {'calls/s':>8} {'RSS MB':>7}")
    with TemporaryDirectory(prefix="tm-") as folder, server(Path(folder), *pace) as (url, _):
        for in_flight in given.in_flight:
            runs = [asyncio.run(measure(url, in_flight, given.seconds, prompts)) for _ in range(given.runs)]
            cpu = sorted(run.cpu_ms for run in runs)
            median = statistics.median(cpu)
            told = f"{median:.3f} ({cpu[0]:.3f}-{cpu[-1]:.3f})"
            rate = statistics.median(run.rate for run in runs)
            aim = f"  aim: under {_AIM_MS}" if in_flight == _AIM_AT else ""
            print(f"{in_flight:>9} {told:>22} {rate:>8.0f} {runs[-1].rss_mb:>7.0f}{aim}", flush=True)


if __name__ == "__main__":
    main()
