"""What `tokenmill top` costs at one frame a second.

    python -m tests.benchmarks.top [--datasets 20] [--workers 50] [--servers 4] [--size 120x40] [--seconds 30]

A Valkey of its own holds a job of that size, in which every figure changes each second; `top` runs in a terminal of its
own. Printed: what a snapshot takes here, from the call to its answer, and the share of one core that the process of top
takes by /proc, in user and system time. Linux only.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from common.ledger import Ledger
from producer.embedded import EmbeddedRedis
from producer.status import snapshot
from tests.acceptance.commands import TOKENMILL, environment
from tests.benchmarks.processes import cpu_seconds, rss_mb
from tests.lines import write_config
from tests.terminals import Terminal
from tests.watched import begin, move


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=20)
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--seconds", type=int, default=30)
    given = parser.parse_args()
    size = given.datasets, given.workers, given.servers
    with TemporaryDirectory(prefix="tm-") as name:
        folder = Path(name)
        redis = EmbeddedRedis(folder, folder / "s").start()
        ledger = Ledger.connect(f"unix://{folder / 's'}")
        begin(ledger, *size, cap_tokens=100_000_000)
        times = []
        for _ in range(50):
            started = time.perf_counter()
            snapshot(ledger)
            times.append(1000 * (time.perf_counter() - started))
        print(f"snapshot of {size[0]} datasets and {size[1]} workers: {statistics.median(times):.1f} ms", end="")
        print(f" (median; {min(times):.1f} to {max(times):.1f})")
        _watch(ledger, folder, size, given.size, given.seconds)
        redis.stop()


def _watch(ledger: Ledger, folder: Path, size: tuple[int, int, int], screen: str, seconds: int) -> None:
    width, height = map(int, screen.split("x"))
    config = write_config(folder, f"unix://{folder / 's'}")
    command = [*TOKENMILL, "top", "-c", str(config)]
    terminal = Terminal(command, folder, environment(folder, TERM="xterm-256color"), width, height)
    try:
        terminal.wait_for("top shows the datasets", lambda: "D1 " in terminal.text())
        for tick in range(1, 6):  # what is imported and cached at first is no frame
            _second(ledger, terminal, tick, size)
        pid = terminal.process.pid
        began, before, written = time.monotonic(), cpu_seconds([pid]), len(terminal.written)
        for tick in range(6, 6 + seconds):
            _second(ledger, terminal, tick, size)
        spent, passed = cpu_seconds([pid]) - before, time.monotonic() - began
        frame = (len(terminal.written) - written) / passed / 1000
        print(f"top at {screen}: {100 * spent / passed:.2f} % of one core over {passed:.0f} s, ", end="")
        print(f"{frame:.1f} kB/s to the terminal, {rss_mb([pid]):.0f} MB")
        terminal.type("q")
        print(f"left with exit code {terminal.end()}", file=sys.stderr)
    finally:
        terminal.close()


def _second(ledger: Ledger, terminal: Terminal, tick: int, size: tuple[int, int, int]) -> None:
    deadline = time.monotonic() + 1
    move(ledger, tick, *size)
    while (left := deadline - time.monotonic()) > 0:
        terminal.read(left / 10)


if __name__ == "__main__":
    main()
