"""Fair shares in virtual time: token shares, and slots that wait although a dataset has samples.

    python -m tests.benchmarks.shares [--seeds 20]

A server of constant speed (17 tokens/s a slot +-10 %, prompts at 8,000 tokens/s), workers that take messages first in,
first out, and the keeper's tick once a second, up to 0.4 s late. Lengths are lognormal, clipped at 10,240. Shares are
of tokens decoded; an error is |share/weight - 1|.
"""

import argparse
import heapq
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workers.shares import Shares, Standing, to_send

_MAX_NEW_TOKENS = 10_240
# What a server's slot does at speed 1.
_TOKENS_PER_SECOND, _PROMPT_TOKENS_PER_SECOND = 17.0, 8000.0
# What waits in Redis for messages, of one dataset.
_FED = 5000
# A tick is late by so many seconds on average, and at most.
_LATE, _LATEST = 0.05, 0.4
# A starving worker rings the keeper: its messages come so much later, and ticks are at least so far apart.
_RING_SECONDS, _RINGS_APART = 0.02, 0.1


@dataclass(frozen=True)
class Load:
    """A dataset: answers of mean length `tokens`; with a cv of 0 all are of that length."""

    name: str
    weight: float
    tokens: float
    cv: float
    prompt_tokens: int = 500
    samples: int = 1_000_000_000
    per_message: int = 1


# Weights 1:1:2:4; the longest answers come with the longest prompts.
FOUR = (
    Load("A", 1, 1577, 1.2),
    Load("B", 1, 3793, 1.0, prompt_tokens=4000),
    Load("C", 2, 900, 1.5, prompt_tokens=1000),
    Load("D", 4, 2500, 1.2, prompt_tokens=200),
)


@dataclass(frozen=True)
class Setup:
    """The datasets, the workers and their server; `speed` 1 is 17 tokens/s a slot."""

    loads: Sequence[Load] = FOUR
    slots: int = 150
    workers: int = 1
    held: int = 2  # messages that a worker holds unclaimed
    speed: float = 1.0
    spread: float = 0.1
    rings: bool = False
    law: Callable[[], Shares] = Shares


@dataclass
class _Worker:
    free: int
    messages: deque[tuple[str, int]]
    backlog: deque[str]


@dataclass(frozen=True)
class _Running:
    name: str
    worker: _Worker
    decodes_at: float
    tokens: float
    speed: float


class Simulation:
    """One run; `until` moves it on. `started` and the waiting slot-seconds grow, for differences."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.loads = {load.name: load for load in setup.loads}
        self.now = 0.0
        self.slots = setup.slots
        self.waiting_seconds = 0.0  # of free slots, while a dataset that is open had samples
        self.slot_seconds = 0.0
        self.started = dict.fromkeys(self.loads, 0)
        self.in_flight = dict.fromkeys(self.loads, 0)
        self.sent = dict.fromkeys(self.loads, 0)
        self.ended = dict.fromkeys(self.loads, 0)
        self.tokens_ended = dict.fromkeys(self.loads, 0.0)
        self.left = {name: load.samples for name, load in self.loads.items()}
        self.closed: set[str] = set()
        self.out: list[int] = []  # samples in messages after each tick
        self._random = random.Random(seed)
        self._shares = setup.law()
        self._queue: deque[tuple[str, int]] = deque()
        self._workers = [_Worker(0, deque(), deque()) for _ in range(setup.workers)]
        self._running: dict[int, _Running] = {}
        self._events: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # time; 0 tick, 1 ring, 2 end; number
        self._number = 0
        self._ticked_at = 0.0
        self._rung = False
        self._free = 0
        self.grow(setup.slots)

    def grow(self, slots: int) -> None:
        """Add slots, as evenly as it goes."""
        for n in range(slots):
            self._workers[n % len(self._workers)].free += 1
        self._free += slots
        self.slots = self._free + len(self._running)
        self._take()

    def until(self, seconds: float) -> None:
        """Move on to that time."""
        while self._events[0][0] <= seconds:
            at, kind, number = heapq.heappop(self._events)
            self._pass(at)
            if kind == 2:
                self._end(number)
            else:
                self._tick(number, ring=kind == 1)
        self._pass(seconds)

    def _pass(self, at: float) -> None:
        if self._free and self.has_room():
            self.waiting_seconds += self._free * (at - self.now)
        self.slot_seconds += self.slots * (at - self.now)
        self.now = at

    def has_room(self) -> bool:
        """Whether a dataset is open that has samples which have not started."""
        return any(self.left[name] + self.sent[name] > 0 for name in self.loads if name not in self.closed)

    def _standings(self) -> dict[str, Standing]:
        return {
            name: Standing(
                weight=load.weight,
                in_flight=self.in_flight[name],
                sent=0 if name in self.closed else self.sent[name],
                available=min(_FED, self.left[name]),
                ended=self.ended[name],
                open=name not in self.closed and self.left[name] > 0,
                per_message=load.per_message,
            )
            for name, load in self.loads.items()
        }

    def _tick(self, number: int, *, ring: bool) -> None:
        if ring:
            self._rung = False
        else:
            late = min(_LATEST, self._random.expovariate(1 / _LATE))
            heapq.heappush(self._events, (number + 1 + late, 0, number + 1))
        standings = self._standings()
        self._shares.advance(self.now - self._ticked_at, standings)
        self._ticked_at = self.now
        out = sum(one.sent for one in standings.values())
        elsewhere = (len(self._workers) - 1) * self.setup.held * max(load.per_message for load in self.loads.values())
        samples = to_send(self._free, self._shares.starts_per_second, out, elsewhere)
        for name, count in self._shares.choose(samples, standings):
            self._queue.append((name, count))
            self.sent[name] += count
            self.left[name] -= count
        self.out.append(sum(self.sent.values()))
        self._take()

    def _take(self) -> None:
        """All workers, in any order: whoever asks first is given the next message."""
        for worker in self._random.sample(self._workers, len(self._workers)):
            self._fill(worker)

    def _fill(self, worker: _Worker) -> None:
        while True:
            while self._queue and len(worker.messages) < self.setup.held:
                worker.messages.append(self._queue.popleft())
            while worker.backlog and worker.free:
                self._start(worker, worker.backlog.popleft())
            if not (worker.free and worker.messages):
                break
            name, count = worker.messages.popleft()
            self.sent[name] -= count
            if name in self.closed:
                self.left[name] += count  # the ledger gives nothing out
            else:
                self.in_flight[name] += count
                worker.backlog.extend([name] * count)
        if self.setup.rings and worker.free and not self._rung and self.has_room():
            self._rung = True
            at = max(self.now + _RING_SECONDS, self._ticked_at + _RINGS_APART)
            heapq.heappush(self._events, (at, 1, 0))

    def _start(self, worker: _Worker, name: str) -> None:
        load = self.loads[name]
        tokens = load.tokens
        if load.cv:
            variance = math.log(1 + load.cv**2)
            tokens = self._random.lognormvariate(math.log(tokens) - variance / 2, math.sqrt(variance))
        tokens = max(1.0, min(_MAX_NEW_TOKENS, tokens))
        spread = self.setup.spread
        speed = _TOKENS_PER_SECOND * self.setup.speed * self._random.uniform(1 - spread, 1 + spread)
        decodes_at = self.now + load.prompt_tokens / (_PROMPT_TOKENS_PER_SECOND * self.setup.speed)
        self._number += 1
        self._running[self._number] = _Running(name, worker, decodes_at, tokens, speed)
        heapq.heappush(self._events, (decodes_at + tokens / speed, 2, self._number))
        self.started[name] += 1
        worker.free -= 1
        self._free -= 1

    def _end(self, number: int) -> None:
        one = self._running.pop(number)
        self.in_flight[one.name] -= 1
        self.ended[one.name] += 1
        self.tokens_ended[one.name] += one.tokens
        one.worker.free += 1
        self._free += 1
        self._fill(one.worker)

    def tokens(self) -> dict[str, float]:
        """Tokens decoded so far, also those of answers that still run."""
        decoded = dict(self.tokens_ended)
        for one in self._running.values():
            decoded[one.name] += min(one.tokens, max(0.0, (self.now - one.decodes_at) * one.speed))
        return decoded

    def errors(self) -> list[float]:
        """|share/weight - 1| of each dataset, in percent."""
        decoded = self.tokens()
        weights, total = sum(load.weight for load in self.loads.values()), sum(decoded.values())
        return [abs(decoded[load.name] / total * weights / load.weight - 1) * 100 for load in self.loads.values()]

    def waiting_percent(self) -> float:
        """Slot-seconds that waited although a dataset had samples, of all."""
        return 100 * self.waiting_seconds / self.slot_seconds


class OutAsInFlight(Shares):
    """The shipped rule, but samples in messages count like those in flight."""

    def _still_held(self, name: str, out: int) -> tuple[float, float]:
        del name, out
        return 1.0, 1.0


class WithoutCredit(Shares):
    """The shipped rule without its credit."""

    def choose(self, samples: int, standings: Mapping[str, Standing]) -> list[tuple[str, int]]:
        self._credit = {}
        return super().choose(samples, standings)


class ByCount(OutAsInFlight, WithoutCredit):
    """Samples by weight, whatever they take."""

    def choose(self, samples: int, standings: Mapping[str, Standing]) -> list[tuple[str, int]]:
        counted = {name: replace(one, in_flight=one.in_flight + one.ended) for name, one in standings.items()}
        return super().choose(samples, counted)


# What the research page found where slots choose for themselves, without messages or ticks: mean/worst in percent.
_LAWS: dict[str, tuple[Callable[[], Shares], str, str]] = {
    "samples by weight": (ByCount, "40/89", "42/80"),
    "no credit": (WithoutCredit, "1.0/3.7", "1.1/2.1"),
    "credit, messages count as in flight": (OutAsInFlight, "", ""),
    "shipped": (Shares, "0.5/2.4", "0.2/0.8"),
}
_FAST = tuple(replace(load, per_message=16) for load in FOUR)
_SETUPS: dict[str, Setup] = {
    "150 slots": Setup(),
    "150 slots, 16 workers": Setup(workers=16),
    "10 slots, weights 1:1:2:40": Setup(slots=10, loads=(*FOUR[:3], replace(FOUR[3], weight=40))),
    "2.25 starts/s": Setup(speed=1.42),
    "25 starts/s": Setup(speed=16),
    "25 starts/s, 1,600 slots, 8 workers": Setup(slots=1600, speed=1.5, workers=8, held=6),
    "2,000 starts/s, 128 slots": Setup(slots=128, speed=1500),
    "2,000 starts/s, 4 workers, 16 a message": Setup(slots=512, speed=385, workers=4, held=4, loads=_FAST),
}
# Half of the weight is paused at 200 s and resumed at 300 s; half as many slots again come at 400 s.
_ALIKE = (Load("A", 1, 2048, 0), Load("B", 1, 2048, 0))
_TROUBLES: dict[str, Setup] = {
    "150 slots": Setup(),
    "25 starts/s": Setup(speed=16),
    "2,000 starts/s": Setup(slots=128, speed=1500),
    "150 slots, all answers end together": Setup(loads=_ALIKE, spread=0.0),
}


def _mean_worst(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}/{max(values):.2f}"


def _laws(seeds: int) -> None:
    print("Errors of token shares in %, mean/worst; 150 slots, weights 1:1:2:4      (page: without messages and ticks)")
    for name, (law, page_600, page_3000) in _LAWS.items():
        found: dict[int, list[float]] = {600: [], 3000: []}
        for seed in range(seeds):
            run = Simulation(Setup(law=law), seed)
            for seconds, errors in found.items():
                run.until(seconds)
                errors.extend(run.errors())
        shown = "".join(f"{at:6,} s {_mean_worst(errors):13}" for at, errors in found.items())
        print(f"  {name:37}{shown} page {page_600:10}{page_3000}")


def _setups(seeds: int) -> None:
    print(
        "\nThe shipped rule: errors in %, mean/worst; slots that wait, in the first 30 s and later; samples in messages"
    )
    for name, setup in _SETUPS.items():
        fast = setup.speed > 100
        times = (60, 300) if fast else (600, 3000) if setup.slots > 10 else (3000, 10_000)
        found: dict[int, list[float]] = {seconds: [] for seconds in times}
        first, later, out, rates = [], [], [], []
        for seed in range(min(2, seeds) if fast else seeds):
            run = Simulation(setup, seed)
            run.until(30)
            first.append(run.waiting_seconds)
            waiting, slot_seconds = run.waiting_seconds, run.slot_seconds
            for seconds, errors in found.items():
                run.until(seconds)
                errors.extend(run.errors())
            later.append(100 * (run.waiting_seconds - waiting) / (run.slot_seconds - slot_seconds))
            out += run.out[30:]
            rates.append(sum(run.ended.values()) / run.now)
        shown = "".join(f"{at:7,} s {_mean_worst(errors):11}" for at, errors in found.items())
        rate, outs = statistics.fmean(rates), statistics.fmean(out)
        print(
            f"  {name:40}{shown} start {max(first):5.1f} slot-s, then {statistics.fmean(later):.5f} %"
            f"   {outs:6,.0f} = {outs / rate:4.1f} s of {rate:7,.1f}/s"
        )


def _troubles(seeds: int) -> None:
    print("\nSlots that wait, in % of slot-seconds, in 10 s from an event, and in all 500 s")
    print(f"{'half the weight':>87}{'it is':>9}{'50 %':>9}")
    print(f"{'is paused':>87}{'resumed':>9}{'slots':>9}{'all':>9}")
    for name, setup in _TROUBLES.items():
        for rings in (False, True):
            found: dict[str, list[float]] = {"paused": [], "resumed": [], "slots": [], "all": []}
            for seed in range(min(2, seeds) if setup.speed > 100 else seeds):
                run = Simulation(replace(setup, rings=rings), seed)
                last = setup.loads[-1].name
                for at, event in ((200.0, "paused"), (300.0, "resumed"), (400.0, "slots")):
                    run.until(at + 0.37)
                    run.closed = {last} if event == "paused" else set()
                    if event == "slots":
                        run.grow(setup.slots // 2)
                    waiting, slot_seconds = run.waiting_seconds, run.slot_seconds
                    run.until(at + 10.37)
                    found[event].append(100 * (run.waiting_seconds - waiting) / (run.slot_seconds - slot_seconds))
                run.until(500)
                found["all"].append(run.waiting_percent())
            label = f"{name}, a starving worker rings" if rings else name
            print(f"  {label:76}" + "".join(f"{statistics.fmean(values):9.4f}" for values in found.values()))


def _choosing() -> None:
    standings = {f"D{n}": Standing(n + 1, 10 * n, 5 * n, 5000, 1000 * n, open=True, per_message=32) for n in range(8)}
    shares = Shares()
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        shares.choose(5000, standings)
        best = min(best, time.perf_counter() - began)
    print(f"\nchoose: {best * 1000:.1f} ms for 5,000 samples of 8 datasets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="runs of each kind (2 at 2,000 starts/s)")
    seeds = parser.parse_args().seeds
    _laws(seeds)
    _setups(seeds)
    _troubles(seeds)
    _choosing()


if __name__ == "__main__":
    main()
