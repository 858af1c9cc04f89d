"""How near the governor comes to the best fixed limit: the law itself, at the simulator's own engine, in virtual time.

The server is the preset kimi-k2.5-8x (159,277 KV tokens). First a sweep: one worker with a fixed limit. Then 1, 4 and
16 workers with a governor each, which polls every 2 s (10 % jitter) and shares nothing with the others. Every call is
given up after 1,800 s. Measured over `--hours` from the twentieth minute on.

Columns: tokens/s as % of the best fixed limit; waiting as % of running; retractions an hour; calls that timed out;
fairness (Jain's index over the workers' tokens; 1: all alike). With --troubles what goes wrong is played, too.

    python -m tests.benchmarks.governor --jobs long --workers 1,4
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.virtual import Request, Source, Worker, World
from workers.governor import Governor, Load
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.presets import PRESETS

TIMEOUT_SECONDS = 1800.0
WARM_SECONDS = 1200.0
LIMITS = (24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 192, 224)
WANTED_SHARE = {1: 12.0, 4: 12.0, 16: 20.0}


@dataclass(frozen=True)
class Kind:
    """Prompts of one length, and lognormal answers clipped at max_new_tokens."""

    prompt_tokens: int
    mean_tokens: float
    max_new_tokens: int
    cv: float = 1.0

    def draw(self, draw: random.Random) -> Request:
        variance = math.log1p(self.cv * self.cv)
        tokens = draw.lognormvariate(math.log(self.mean_tokens) - variance / 2, math.sqrt(variance))
        return Request(self.prompt_tokens, min(max(round(tokens), 1), self.max_new_tokens), self.max_new_tokens)


SHORT, LONG = Kind(500, 600, 2_048), Kind(500, 3_793, 10_240)
Job = Callable[[float, random.Random], Kind]  # which kind comes at this moment
JOBS: Mapping[str, Job] = {
    "short": lambda _now, _draw: SHORT,
    # Its max_new_tokens are 10,240: the server reserves more for each, and runs fewer.
    "short-10k": lambda _now, _draw: Kind(500, 600, 10_240),
    "long": lambda _now, _draw: LONG,
    "long-prompts": lambda _now, _draw: Kind(4_000, 800, 4_096),
    "mixed": lambda _now, draw: SHORT if draw.random() < 0.5 else LONG,
    "alternating": lambda now, _draw: SHORT if now % 1200 < 600 else LONG,
}


def server(**changes: Any) -> SimulatorConfig:
    """Prompts share no prefix, so the cache is left out: the same figures in less time."""
    return SimulatorConfig(**(dict(PRESETS["kimi-k2.5-8x"]) | {"prefix_cache": False} | changes))


def source_of(job: Job, world: World, seed: int) -> Source:
    """Samples without end; the n-th is the same whatever the limits are, save where the job follows the time."""
    draw = random.Random(seed)
    return lambda: job(world.now, draw).draw(draw)


def governed(world: World, source: Source, workers: int, **options: Any) -> list[Worker]:
    """So many workers, each with a governor, not yet started."""
    bounds = {name: options.pop(name) for name in ("least", "most") if name in options}
    made = []
    for _ in range(workers):
        governor = Governor(
            capacity_tokens=world.config.max_total_tokens,
            max_new_tokens=options.get("max_new_tokens", LONG.max_new_tokens),
            phase=0.5 if workers == 1 else world.draw.random(),
            **bounds,
        )
        made.append(Worker(world, source, governor=governor, timeout_seconds=TIMEOUT_SECONDS, **options))
    return made


@dataclass(frozen=True)
class Figures:
    """What was measured over a span of time."""

    tokens_per_second: float
    waiting: float  # mean
    running: float
    retractions: float  # an hour
    timeouts: int
    jain: float

    @property
    def waiting_share(self) -> float:
        return 100 * self.waiting / self.running if self.running else math.inf


class Meter:
    """Looks at a world every 2 s."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._looks = self._waiting = self._running = 0
        world.every(2.0, self._look)
        self.start()

    def _look(self) -> None:
        self._looks += 1
        self._waiting += len(self._world.engine.waiting)
        self._running += len(self._world.engine.running)

    def start(self) -> None:
        """Measure from now on."""
        world = self._world
        self._since = world.now
        self._looks = self._waiting = self._running = 0
        self._tokens = {worker: worker.useful_tokens() for worker in world.workers}
        self._retractions = world.retractions
        self._timeouts = sum(worker.timeouts for worker in world.workers)

    def figures(self) -> Figures:
        world = self._world
        seconds = world.now - self._since
        made = [worker.useful_tokens() - self._tokens.get(worker, 0) for worker in world.workers if not worker.leaving]
        return Figures(
            sum(worker.useful_tokens() - self._tokens.get(worker, 0) for worker in world.workers) / seconds,
            self._waiting / max(self._looks, 1),
            self._running / max(self._looks, 1),
            (world.retractions - self._retractions) / seconds * 3600,
            sum(worker.timeouts for worker in world.workers) - self._timeouts,
            sum(made) ** 2 / (len(made) * sum(each * each for each in made)) if any(made) else 0.0,
        )


def measure(world: World, hours: float) -> Figures:
    """Run a world whose workers have been started, and measure after the warm time."""
    meter = Meter(world)
    world.run(WARM_SECONDS)
    meter.start()
    world.run(WARM_SECONDS + 3600 * hours)
    return meter.figures()


def fixed(job: Job, limit: int, hours: float, seed: int, config: SimulatorConfig | None = None) -> Figures:
    world = World(config or server(), seed)
    Worker(world, source_of(job, world, seed), limit=limit, timeout_seconds=TIMEOUT_SECONDS).start()
    return measure(world, hours)


def with_governors(
    job: Job, workers: int, hours: float, seed: int, config: SimulatorConfig | None = None, **options: Any
) -> Figures:
    world = World(config or server(), seed)
    for worker in governed(world, source_of(job, world, seed), workers, **options):
        worker.start()
    return measure(world, hours)


def best_of(sweep: Mapping[int, Figures]) -> int:
    """The smallest limit within 0.1 % of the best."""
    most = max(figures.tokens_per_second for figures in sweep.values())
    return min(limit for limit, figures in sweep.items() if figures.tokens_per_second >= 0.999 * most)


def swept(job: Job, hours: float, seed: int, config: SimulatorConfig | None = None) -> dict[int, Figures]:
    return {limit: fixed(job, limit, hours, seed, config) for limit in LIMITS}


def print_sweep(sweep: Mapping[int, Figures]) -> None:
    most = max(figures.tokens_per_second for figures in sweep.values())
    rows: dict[str, Callable[[Figures], str]] = {
        "% of best": lambda one: f"{100 * one.tokens_per_second / most:.1f}",
        "waiting %": lambda one: f"{one.waiting_share:.0f}",
        "retractions/h": lambda one: f"{one.retractions:.0f}",
        "timeouts": lambda one: str(one.timeouts),
    }
    print(f"  {'fixed limit':14}" + "".join(f"{limit:7}" for limit in sweep))
    for name, cell in rows.items():
        print(f"  {name:14}" + "".join(f"{cell(one):>7}" for one in sweep.values()))


def row(name: str, figures: Figures, best: Figures, *, wanted_share: float | None = None) -> bool:
    """Print one row; whether it meets the targets."""
    percent = 100 * figures.tokens_per_second / best.tokens_per_second
    missed = []
    if wanted_share is not None:
        checks = {
            "throughput": percent >= 97,
            "waiting": figures.waiting_share < wanted_share,
            "timeouts": figures.timeouts == 0,
            "fairness": figures.jain >= 0.95,
            "retractions": figures.retractions <= best.retractions,
        }
        missed = [check for check, met in checks.items() if not met]
    print(
        f"  {name:36}{percent:6.1f} %{figures.waiting_share:8.1f} %{figures.retractions:8.0f}"
        f"{figures.timeouts:6}{figures.jain:8.3f}" + (f"  MISSED: {', '.join(missed)}" if missed else ""),
        flush=True,
    )
    return not missed


def head(name: str) -> None:
    print(f"  {name:36}{'of best':>8}{'waiting':>10}{'retr./h':>8}{'late':>6}{'Jain':>8}")


def compare(name: str, workers: Sequence[int], hours: float, seed: int) -> bool:
    """One job: the sweep, then the governors beside it."""
    print(f"\n{name}")
    sweep = swept(JOBS[name], hours, seed)
    print_sweep(sweep)
    limit = best_of(sweep)
    head("")
    row(f"fixed, {limit} in flight", sweep[limit], sweep[limit])
    met = True
    for count in workers:
        figures = with_governors(JOBS[name], count, hours, seed)
        met &= row(f"governed, {count} worker(s)", figures, sweep[limit], wanted_share=WANTED_SHARE.get(count, 20.0))
    return met


# What goes wrong


def changed_servers(hours: float, seed: int) -> None:
    """Other pools and bounds than the law was chosen on, beside the best fixed limit for each."""
    cases: list[tuple[str, Kind, SimulatorConfig, Sequence[int]]] = [
        ("pool 600k, long", LONG, server(max_total_tokens=600_000), (96, 128, 160, 192, 224, 256)),
        ("pool 600k, short", SHORT, server(max_total_tokens=600_000), (192, 320, 448, 576)),
        ("pool 40k, long", LONG, server(max_total_tokens=40_000), (8, 10, 12, 16, 20)),
        ("max_running_requests 32, short", SHORT, server(max_running_requests=32), (32, 36, 40)),
    ]
    for name, kind, config, limits in cases:
        sweep = {limit: fixed(lambda *_, kind=kind: kind, limit, hours, seed, config) for limit in limits}
        best = best_of(sweep)
        row(f"{name}: fixed, {best}", sweep[best], sweep[best])
        for workers in (1, 16):
            figures = with_governors(lambda *_, kind=kind: kind, workers, hours, seed, config)
            row(f"{name}: {workers} worker(s)", figures, sweep[best])


def wrong_figures(hours: float, seed: int) -> None:
    """Figures that are missing from the start, wrong, or old."""
    for name, kind in (("short", SHORT), ("long", LONG)):
        best = fixed(lambda *_, kind=kind: kind, 160, hours, seed)
        for workers in (1, 16):
            for what, wrong in (
                ("waiting always 0", lambda load: replace(load, waiting=0)),
                ("all figures 0", lambda load: replace(load, waiting=0, running=0)),
                ("never figures", lambda _load: None),
                ("figures 5 s old", None),
            ):
                world = World(server(), seed)
                world.record()
                read = _read(world, wrong)
                source = source_of(lambda *_, kind=kind: kind, world, seed)
                for worker in governed(world, source, workers, figures=read, team=lambda workers=workers: workers):
                    worker.start()
                row(f"{what}, {name}: {workers} worker(s)", measure(world, hours), best)


def _read(world: World, wrong: Callable[[Load], Load | None] | None) -> Callable[[], Load | None]:
    return (lambda: world.load(5.0)) if wrong is None else (lambda: wrong(world.load()))


def blind_hours(seed: int) -> None:
    """No figures from the first to the third hour, in the middle of which the answers turn from short to long."""
    turn = 5400.0
    job: Job = lambda now, _draw: SHORT if now < turn else LONG  # noqa: E731
    for workers in (1, 4, 16):
        world = World(server(), seed)
        read = _blind(world)
        source = source_of(job, world, seed)
        for worker in governed(world, source, workers, figures=read, team=lambda workers=workers: workers):
            worker.start()
        meter = Meter(world)
        best: dict[Kind, Figures] = {}
        for end, name, kind in ((turn, "short", SHORT), (7200.0, "turning", LONG), (10800.0, "long", LONG)):
            meter.start()
            world.run(end)
            if kind not in best:
                best[kind] = fixed(lambda *_, kind=kind: kind, 160, 2, seed)
            row(f"blind, {name}: {workers} worker(s)", meter.figures(), best[kind])


def _blind(world: World) -> Callable[[], Load | None]:
    return lambda: None if 3600 <= world.now < 10800 else world.load()


def comings_and_goings(seed: int) -> None:
    """A restart, a newcomer, workers that leave, a neighbour: what comes of it in the time after."""
    best = fixed(JOBS["long"], 160, 4, seed)
    for workers in (1, 16):
        world, team = _team(workers, seed)
        world.run(3600)
        world.go_down(60)
        world.run(3660)
        meter = Meter(world)
        world.run(4260)
        after = meter.figures()
        # A fixed limit, too, begins with an empty server: its first ten minutes are the measure.
        first = World(server(), seed)
        Worker(first, source_of(JOBS["long"], first, seed + 1), limit=160, timeout_seconds=TIMEOUT_SECONDS).start()
        begun = Meter(first)
        first.run(600)
        lost = sum(worker.lost for worker in team)
        row(f"restart ({lost} lost): {workers} worker(s), 10 min", after, begun.figures())
    world, _ = _team(16, seed)
    world.run(3600)
    for worker in world.workers[:8]:
        worker.leave()
    for minutes in (10, 20):
        meter = Meter(world)
        world.run(world.now + 600)
        row(f"8 of 16 leave: to minute {minutes}", meter.figures(), best)
    for name in ("long", "short"):
        world, _ = _team(3, seed, JOBS[name])
        world.run(3600)
        newcomer = governed(world, world.workers[0].source, 1)[0].start()
        newcomer_share(world, newcomer, name)
    for least in (1, 20):
        world, team = _team(1, seed, least=least)
        Worker(world, team[0].source, limit=100).start()
        meter = Meter(world)
        world.run(7200)
        part = 100 * team[0].useful_tokens() / sum(worker.useful_tokens() for worker in world.workers)
        row(f"neighbour of 100, least={least}: {part:.0f} % ours", meter.figures(), best)


def _team(workers: int, seed: int, job: Job = JOBS["long"], **options: Any) -> tuple[World, list[Worker]]:
    world = World(server(), seed)
    return world, [worker.start() for worker in governed(world, source_of(job, world, seed), workers, **options)]


def newcomer_share(world: World, newcomer: Worker, name: str) -> None:
    """Print the newcomer's part of the calls in flight, in percent of a fair one, over 90 minutes."""
    shares = []
    for minutes in (5, 10, 20, 40, 90):
        world.run(3600 + 60 * minutes)
        fair = sum(len(worker.in_flight) for worker in world.workers) / len(world.workers)
        shares.append(f"{100 * len(newcomer.in_flight) / fair:.0f} % ({minutes} min)")
    print(f"  a fourth joins, {name}: of a fair share " + ", ".join(shares), flush=True)


def troubles(hours: float, seed: int) -> None:
    print("\nTroubles")
    head("")
    comings_and_goings(seed)
    blind_hours(seed)
    wrong_figures(hours, seed)
    changed_servers(hours, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--troubles", action="store_true", help="play what goes wrong, after the jobs")
    parser.add_argument("--only-troubles", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    names = [] if asked.only_troubles else asked.jobs.split(",")
    workers = [int(count) for count in asked.workers.split(",")]
    met = [compare(name, workers, asked.hours, asked.seed) for name in names]
    if asked.troubles or asked.only_troubles:
        troubles(asked.hours, asked.seed)
    print(f"\n{'every target met' if all(met) else 'some targets missed'}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
