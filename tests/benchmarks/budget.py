"""How near to its cap a dataset ends, by rule: replays in virtual time with the very function that the keeper calls.

    python -m tests.benchmarks.budget [--seeds 20] [--cases] [--picture docs/budget.svg]

Four datasets share 150 slots, or each has them alone. miss: tokens over (+) or under (-) the cap, in % of it, over all
datasets and seeds; time: until the last answer, beside the plain stop with the same seed.
"""

import argparse
import itertools
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.benchmarks.budget_picture import draw
from tests.benchmarks.budget_replay import RULES, Job, Replay

SHARING = Job(means=(1577, 3793, 900, 2500), cvs=(1.2, 1.0, 1.5, 1.2), cap_tokens=10_000_000)
CAPS = {"10 M": 10_000_000, "1 M": 1_000_000, "100 k": 100_000}


@dataclass(frozen=True)
class Task:
    """One replay: what row of the table it belongs to, and what to do."""

    scene: str
    cap: str
    rule: str
    job: Job
    seed: int


@dataclass(frozen=True)
class Row:
    """Misses in % of the cap; time as a ratio to the plain stop's."""

    scene: str
    cap: str
    rule: str
    mean: float
    distance: float
    p95: float
    over: float
    under: float
    time: float

    def text(self) -> str:
        misses = f"{self.mean:+8.3f} {self.distance:7.3f} {self.p95:+8.3f} {self.over:+8.3f} {self.under:+8.3f}"
        return f"{self.scene:34} {self.cap:>6}  {self.rule:13} {misses}   x{self.time:.3f}"


HEAD = f"{'':34} {'cap':>6}  {'rule':13} {'mean':>8} {'|miss|':>7} {'p95':>8} {'over':>8} {'under':>8}   time"


def alone(job: Job) -> list[Job]:
    """Each dataset of a job as a job of its own."""
    return [replace(job, means=(mean,), cvs=(cv,)) for mean, cv in zip(job.means, job.cvs, strict=True)]


def table(seeds: int) -> Iterator[Task]:
    scenes = {"four sharing": [SHARING], "alone": alone(SHARING)}
    for (scene, jobs), (cap, tokens), rule in itertools.product(scenes.items(), CAPS.items(), RULES):
        for job, seed in itertools.product(jobs, range(seeds)):
            yield Task(scene, cap, rule, replace(job, cap_tokens=tokens), seed)


def cases(seeds: int) -> Iterator[Task]:
    """What goes wrong in real runs, each with the rules that ship and the plain stop for the time."""
    one = replace(SHARING, means=(3793,), cvs=(1.0,))
    small, large = replace(one, cap_tokens=CAPS["1 M"]), replace(one, cap_tokens=CAPS["10 M"])
    restart = replace(small, restart_seconds=300.0)
    late = replace(one, means=(2500,), cvs=(1.2,), cap_tokens=CAPS["10 M"], restart_seconds=3900.0)
    scenes = {
        "harder and harder (x0.5 to x1.5)": ([replace(job, rising=0.5) for job in alone(SHARING)], "10 M"),
        "easier and easier (x1.5 to x0.5)": ([replace(job, rising=-0.5) for job in alone(SHARING)], "10 M"),
        "speed +-50 %": ([replace(large, speed_spread=0.5)], "10 M"),
        "speed +-50 %, small cap": ([replace(small, speed_spread=0.5)], "1 M"),
        "clock three times too fast": ([replace(small, clock_tokens_per_second=51.0)], "1 M"),
        "clock three times too slow": ([replace(small, clock_tokens_per_second=17 / 3)], "1 M"),
        "no restart": ([small], "1 M"),
        "restart at 300 s": ([restart], "1 M"),
        "restart, lost attempts dropped": ([replace(restart, kept_lost=False, known_lost=False)], "1 M"),
        "late restart, new lengths": ([late], "10 M"),
        "late restart, same lengths": ([replace(late, same_length=True)], "10 M"),
        "late, same, lost clocks unknown": ([replace(late, same_length=True, known_lost=False)], "10 M"),
        "500 slots": ([replace(small, slots=500)], "1 M"),
        "500 slots, exact lengths": ([replace(small, slots=500, exact_lengths=True)], "1 M"),
        "cap of 5,000": (alone(replace(SHARING, cap_tokens=5000)), "5 k"),
    }
    for (scene, (jobs, cap)), rule in itertools.product(scenes.items(), ("plain stop", "precise", "fast")):
        for job, seed in itertools.product(jobs, range(seeds)):
            yield Task(scene, cap, rule, job, seed)


def played(task: Task) -> tuple[Task, list[float], float]:
    outcome = Replay(task.job, RULES[task.rule], task.seed).run()
    return task, outcome.misses, outcome.seconds


def rows(results: Iterable[tuple[Task, list[float], float]]) -> list[Row]:
    misses: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    seconds: dict[tuple[str, str, str], dict[tuple[Job, int], float]] = defaultdict(dict)
    for task, missed, took in results:
        misses[task.scene, task.cap, task.rule] += missed
        seconds[task.scene, task.cap, task.rule][task.job, task.seed] = took
    found = []
    for (scene, cap, rule), values in misses.items():
        percent = 100 * np.array(values)
        plain = seconds[scene, cap, "plain stop"]
        ratios = [took / plain[which] for which, took in seconds[scene, cap, rule].items()]
        p95, over, under = np.quantile(percent, 0.95), percent.max(), percent.min()
        distance = float(np.abs(percent).mean())
        figures = (float(percent.mean()), distance, float(p95), float(over), float(under), float(np.mean(ratios)))
        found.append(Row(scene, cap, rule, *figures))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--cases", action="store_true", help="drift, restarts, wrong clocks and the like instead")
    parser.add_argument("--picture", type=Path, help="draw the table as an SVG into this file")
    arguments = parser.parse_args()
    began = time.monotonic()
    tasks = list((cases if arguments.cases else table)(arguments.seeds))
    with multiprocessing.Pool(arguments.processes) as pool:
        found = rows(pool.map(played, tasks, chunksize=4))
    print(HEAD, *(row.text() for row in found), sep="\n")
    if arguments.picture:
        arguments.picture.write_text(draw(found), "utf-8")
    print(f"\n{arguments.seeds} seeds, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
