"""Answers a second, CPU an answer and slots in flight of the whole path, beside a plain loop on the same server.

    python -m tests.benchmarks.throughput [--seconds 20] [--rounds 1]

Real parts: Valkey, `tokenmill control`, `tokenmill worker` with events on, Flower, the simulated server, each a process
of its own. Part one: answers come at once. Part two: they take a lognormal time with a mean of one second.
CPU figures come from /proc and hold on a busy machine; rates are what was left of its cores.
"""

import argparse
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from common.broker import GENERATE_QUEUE, waiting_messages
from common.ledger import Ledger
from producer.embedded import EmbeddedRedis
from tests.benchmarks.processes import busy_seconds, child_named, cpu_seconds, rss_mb, started, tree, wait_for
from tests.benchmarks.prompts import Prompts

_REPO = Path(__file__).parents[2]
_PROMPT_TOKENS, _ANSWER_TOKENS, _MAX_NEW_TOKENS = 1000, 256, 512
_VOCAB_SIZE = 163_840
_DATASET = "bench"
_POLL_SECONDS = 0.1
_CONFIG = """\
output = "{folder}/out"
redis = "unix://{folder}/valkey.sock"
[server]
urls = ["{url}"]
[tokenizer]
path = "{repo}/examples/tokenizer"
vocab_size = {vocab_size}
[gates]
action = "none"
[sampling]
max_new_tokens = {max_new_tokens}
temperature = 1.0
[worker]
concurrency = {slots}
governed = false
[[datasets]]
name = "{dataset}"
path = "{folder}/source.jsonl"
"""


@dataclass(frozen=True)
class Given:
    """What to measure."""

    seconds: float
    warm_seconds: float
    rows: int
    slots: int
    workers: int
    flower: bool


@dataclass(frozen=True)
class Figures:
    """What one run did: a rate, shares (0 to 1) of slots, time and cores, and (CPU ms an answer, MB) by process."""

    rate: float
    in_flight: float  # of the slots
    others: float  # of the cores, that other work on this machine took
    queue_empty: float | None = None  # of the looks at it
    processes: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@contextmanager
def server(folder: Path, *timing: str) -> Iterator[tuple[str, int]]:
    """The simulated server: its address and process id."""
    port = folder / "port"
    port.unlink(missing_ok=True)
    arguments = ["simulate", "--port-file", str(port), "--mean-tokens", str(_ANSWER_TOKENS), "--cv", "0"]
    arguments += [
        "--vocab-size",
        str(_VOCAB_SIZE),
        "--max-total-tokens",
        "100000000",
        "--max-running-requests",
        "10000",
    ]
    with started("producer.cli.main", [*arguments, *timing], folder / "simulate.log") as process:
        wait_for("the simulated server listens", port.exists)
        yield f"http://127.0.0.1:{port.read_text().strip()}", process.pid


def plain_loop(given: Given, folder: Path, url: str, simulator: int) -> Figures:
    """The yardstick in a process of its own."""
    arguments = [url, "--slots", str(given.slots), "--seconds", str(given.seconds), "--warm-seconds", "3"]
    arguments += ["--prompt-tokens", str(_PROMPT_TOKENS), "--vocab-size", str(_VOCAB_SIZE)]
    arguments += ["--sampling", json.dumps({"max_new_tokens": _MAX_NEW_TOKENS, "temperature": 1.0})]
    with started("tests.benchmarks.plain_loop", arguments, folder / "plain.log") as process:
        time.sleep(4)  # its start and its warm seconds
        pids = {"loop": [process.pid], "simulator": [simulator]}
        cores = Cores(pids)
        running = mean(lambda: running_at(url), given.seconds - 2)
        cpu, others = cores.since()
        out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    memory = {"loop": told["rss_mb"], "simulator": rss_mb([simulator])}
    processes = {name: (1000 * share / told["rate"], memory[name]) for name, share in cpu.items()}
    return Figures(told["rate"], running / given.slots, others, processes=processes)


class Cores:
    """What each process, and all other work on this machine, take of the cores from now on."""

    def __init__(self, pids: Mapping[str, list[int]]) -> None:
        self._pids = pids
        self._start = self._now()

    def _now(self) -> tuple[float, float, dict[str, float], float]:
        return (
            time.monotonic(),
            busy_seconds(),
            {name: cpu_seconds(of) for name, of in self._pids.items()},
            cpu_seconds([os.getpid()]),
        )

    def since(self) -> tuple[dict[str, float], float]:
        """CPU seconds a second by process, and the share of all cores that others took."""
        (then, busy, cpu, own), (now, busy_now, cpu_now, own_now) = self._start, self._now()
        spent = {name: (cpu_now[name] - cpu[name]) / (now - then) for name in cpu}
        ours = sum(spent.values()) + (own_now - own) / (now - then)
        return spent, max(0.0, (busy_now - busy) / (now - then) - ours) / len(os.sched_getaffinity(0))


def mean(look: Callable[[], float], seconds: float) -> float:
    """The mean of what is seen in ten looks a second."""
    seen = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen.append(look())
        time.sleep(_POLL_SECONDS)
    return sum(seen) / len(seen)


def running_at(url: str) -> int:
    """The requests that the server runs or holds waiting; none if it answers at once."""
    with urllib.request.urlopen(url + "/v1/loads", timeout=30) as response:
        load = json.load(response)["loads"][0]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


@contextmanager
def path(given: Given, folder: Path, url: str) -> Iterator[tuple[Ledger, dict[str, list[int]]]]:
    """The whole path on a dataset of ready ids: its ledger, and the process ids by name."""
    config = folder / "tokenmill.toml"
    names = {"folder": folder, "url": url, "repo": _REPO, "slots": given.slots, "dataset": _DATASET}
    config.write_text(_CONFIG.format(**names, vocab_size=_VOCAB_SIZE, max_new_tokens=_MAX_NEW_TOKENS))
    environment = {"TOKENMILL_CONFIG": str(config)}
    valkey = EmbeddedRedis(folder / "valkey", folder / "valkey.sock").start()
    try:
        with ExitStack() as stack:
            ledger = Ledger.connect(f"unix://{folder}/valkey.sock")
            stack.callback(ledger.close)
            command = "producer.cli.main"
            pids = {}
            if given.flower:
                arguments = ["flower", "--port", "0"]
                flower = stack.enter_context(started(command, arguments, folder / "flower.log", **environment))
                pids["flower"] = [flower.pid]
            for n in range(given.workers):
                arguments = ["worker", "--name", f"w{n}"]
                worker = stack.enter_context(started(command, arguments, folder / "worker.log", **environment))
                pids[f"worker {n}" if given.workers > 1 else "worker"] = [worker.pid]
            control = stack.enter_context(started(command, ["control"], folder / "control.log", **environment))
            with started(command, ["enqueue"], folder / "enqueue.log", **environment) as enqueue:
                enqueue.wait(60)
            wait_for("answers come", lambda: ledger.snapshot(_DATASET).done > 0)
            for name in ("keeper", "feeder"):
                pids[name] = tree(child_named(control.pid, name))
            pids["valkey"] = [valkey.pid or 0]
            yield ledger, pids
    finally:
        valkey.stop()


def whole_path(given: Given, folder: Path, url: str, simulator: int, *, at_once: bool) -> Figures:
    """Measure the whole path, from `warm_seconds` after the first answer on."""
    with path(given, folder, url) as (ledger, pids):
        pids["simulator"] = [simulator]
        time.sleep(given.warm_seconds)
        cores, done, since = Cores(pids), ledger.snapshot(_DATASET).done, time.monotonic()
        empty = []

        def look() -> float:
            empty.append(waiting_messages(ledger.redis, GENERATE_QUEUE) == 0)
            return calls_of_workers(ledger) if at_once else running_at(url)

        in_flight = mean(look, given.seconds) / (given.slots * given.workers)
        state, seconds = ledger.snapshot(_DATASET), time.monotonic() - since
        cpu, others = cores.since()
        rate = (state.done - done) / seconds
        if not rate or state.state != "open":
            raise SystemExit(f"{rate:.0f} answers/s, the dataset is {state.state}: give more --rows or fewer --seconds")
        processes = {name: (1000 * share / rate, rss_mb(pids[name])) for name, share in cpu.items()}
        processes["all"] = (sum(cpu for cpu, _ in processes.values()), sum(mb for _, mb in processes.values()))
        return Figures(rate, in_flight, others, sum(empty) / len(empty), processes)


def calls_of_workers(ledger: Ledger) -> int:
    """The calls in flight as the workers' heartbeats tell it."""
    return sum(facts["in_flight"] for _, facts in ledger.processes().values() if facts["kind"] == "worker")


def report(title: str, plain: Sequence[Figures], queue: Sequence[Figures]) -> None:
    """One table: every round a column."""
    print(f"\n{title}")
    columns = [("plain loop", figures) for figures in plain] + [("whole path", figures) for figures in queue]
    print(f"{'':24}" + "".join(f"{name:>14}" for name, _ in columns))
    print(f"{'answers/s':24}" + "".join(f"{figures.rate:14,.0f}" for _, figures in columns))
    for name, shares in (
        ("slots in flight", [figures.in_flight or None for _, figures in columns]),
        ("queue found empty", [figures.queue_empty for _, figures in columns]),
        ("other work, of cores", [figures.others for _, figures in columns]),
    ):
        print(f"{name:24}" + "".join(f"{'':>14}" if of is None else f"{100 * of:12.1f} %" for of in shares))
    for unit, place, digits in (("CPU ms an answer", 0, 3), ("RSS MB", 1, 0)):
        print(unit)
        for name in dict.fromkeys(name for _, figures in columns for name in figures.processes):
            cells = [figures.processes.get(name) for _, figures in columns]
            print(f"  {name:22}" + "".join(f"{cell[place]:14.{digits}f}" if cell else f"{'':14}" for cell in cells))


def measure(title: str, given: Given, rounds: int, timing: Sequence[str]) -> None:
    """One part: `rounds` times the plain loop and the whole path, on one server."""
    plain, queue = [], []
    with TemporaryDirectory(prefix="tokenmill-bench-") as name:
        folder = Path(name)
        Prompts(_PROMPT_TOKENS, _VOCAB_SIZE).write(folder / "source.jsonl", given.rows)
        with server(folder, *timing) as (url, simulator):
            for number in range(rounds):
                plain.append(plain_loop(given, folder, url, simulator))
                room = folder / str(number)
                room.mkdir()
                (room / "source.jsonl").symlink_to(folder / "source.jsonl")
                queue.append(whole_path(given, room, url, simulator, at_once="--speed" in timing))
                subprocess.run(["rm", "-r", str(room)], check=True)
    report(f"{title}; {len(os.sched_getaffinity(0))} cores", plain, queue)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="measured seconds of each run")
    parser.add_argument("--warm-seconds", type=float, default=12, help="seconds from the first answer to the measuring")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=120_000, help="rows of the source; 7.0 KB each")
    parser.add_argument("--slots", type=int, default=128, help="of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--part", choices=["at-once", "latency", "both"], default="both")
    parser.add_argument("--no-flower", action="store_true")
    asked = parser.parse_args()
    given = Given(asked.seconds, asked.warm_seconds, asked.rows, asked.slots, asked.workers, not asked.no_flower)
    what = f"{asked.workers} worker(s) of {given.slots} slots, {_PROMPT_TOKENS:,} ids in, {_ANSWER_TOKENS} out"
    if asked.part != "latency":
        measure(f"Answers at once: {what}", given, asked.rounds, ("--speed", "0"))
    if asked.part != "at-once":
        latency = ("--latency-mean", "1", "--latency-cv", "1")
        measure(f"Lognormal latency, mean 1 s: {what}", given, asked.rounds, latency)


if __name__ == "__main__":
    main()
