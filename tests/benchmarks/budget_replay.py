"""A job in virtual time: slots, datasets of lognormal answers, and an admission rule that is asked what may start.

From event to event: an answer ends, and the slot goes to the open dataset with the smallest fair key whose rule has
room. What a rule says matters only while a slot is free, so it is asked at each end of an answer, and once a simulated
second while slots stand idle; only at each twentieth chance as long as its last answer was three times all slots.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from workers.budget import ENDED, FAST, IN_FLIGHT, NO_LIMIT, PRECISE, Rule, Snapshot, admit
from workers.survival import Floats

KEPT = 2048  # ended attempts that a snapshot holds: four memories of the rule, older ones weigh under 2 %
_CREDIT_SECONDS, _MOST_CREDIT = 60.0, 300.0  # of the fair key; slot-seconds


@dataclass(frozen=True)
class Job:
    """What is replayed. Lengths are lognormal with these means and coefficients of variation, clipped at the maximum.

    speed_spread: a request decodes at tokens_per_second * uniform(1 - spread, 1 + spread); clocks are seconds since the
    start times `clock_tokens_per_second`. rising: lengths grow from (1 - rising) to (1 + rising) times theirs until the
    cap. restart_seconds: all in flight are lost then, and started again; kept_lost: their clocks stay as censored
    observations; same_length: a sample started again is as long as before (else drawn anew); known_lost: the rule is
    told how far its lost attempt was.
    """

    means: tuple[float, ...]
    cvs: tuple[float, ...]
    cap_tokens: int
    slots: int = 150
    max_new_tokens: int = 10_240
    tokens_per_second: float = 17.0
    speed_spread: float = 0.1
    clock_tokens_per_second: float = 17.0
    rising: float = 0.0
    restart_seconds: float | None = None
    kept_lost: bool = True
    same_length: bool = False
    known_lost: bool = True
    exact_lengths: bool = False  # events at their exact lengths instead of their clocks: the trap of two clocks


RoomOf = Callable[["Dataset", float], int]


class Dataset:
    """One dataset's books in the replay; `snapshot` is what the keeper would see."""

    def __init__(self, job: Job, number: int, rng: np.random.Generator) -> None:
        self.job, self.rng = job, rng
        self._sigma = math.sqrt(math.log1p(job.cvs[number] ** 2))
        self._mu = math.log(job.means[number]) - self._sigma**2 / 2
        self._expected = job.cap_tokens / job.means[number]
        self.started, self.ended, self.spent = 0, 0, 0
        self.flying: dict[int, tuple[float, float, float]] = {}  # by slot: start, length, furthest lost clock
        self.again: list[tuple[float, float]] = []  # length and furthest clock of lost samples
        self._ring = np.zeros(KEPT, ENDED)
        self.credit = 0.0
        self.room, self.skip, self.open = 0, 0, True

    def start(self, slot: int, now: float) -> float:
        """The time at which the answer ends."""
        length, lost = self.again.pop() if self.again else (0.0, 0.0)
        if not (lost and self.job.same_length):
            share = min(2.0, self.started / self._expected)
            scale = 1 + self.job.rising * (share - 1)
            length = max(1, min(self.job.max_new_tokens, round(scale * self.rng.lognormal(self._mu, self._sigma))))
            self.started += 1
        speed = self.job.tokens_per_second * (1 + self.job.speed_spread * self.rng.uniform(-1, 1))
        self.flying[slot] = (now, length, lost)
        return now + length / speed

    def end(self, slot: int, now: float) -> None:
        start, length, _ = self.flying.pop(slot)
        self.spent += round(length)
        self._keep(start, length if self.job.exact_lengths else self._clock(start, now), length)

    def lose(self, now: float) -> None:
        for start, length, lost in self.flying.values():
            if self.job.kept_lost:
                self._keep(start, self._clock(start, now), -1.0)
            self.again.append((length, max(lost, self._clock(start, now))))
        self.flying.clear()

    def _clock(self, start: float, now: float) -> float:
        return (now - start) * self.job.clock_tokens_per_second

    def _keep(self, start: float, clock: float, tokens: float) -> None:
        self._ring[self.ended % KEPT] = (start * 1000, clock, tokens)
        self.ended += 1

    def lengths(self) -> Floats:
        tokens = self._ring["tokens"][: min(self.ended, KEPT)]
        return tokens[tokens >= 0].astype(np.float64)

    def snapshot(self, now: float) -> Snapshot:
        in_flight = np.zeros(len(self.flying), IN_FLIGHT)
        starts = np.array([start for start, _, _ in self.flying.values()])
        in_flight["attempt"] = starts * 1000
        in_flight["clock"] = (now - starts) * self.job.clock_tokens_per_second
        ended = self._ring[: min(self.ended, KEPT)]
        known = Snapshot(self.job.cap_tokens, self.spent, self.job.max_new_tokens, ended, in_flight)
        if not self.job.known_lost:
            return known
        lost, again = [lost for _, _, lost in self.flying.values()], [lost for _, lost in reversed(self.again)]
        return replace(known, lost_in_flight=lost, next_lost=again)


def plain_stop(dataset: Dataset, now: float) -> int:
    return NO_LIMIT if dataset.spent < dataset.job.cap_tokens else 0


def mean_reserve(dataset: Dataset, now: float) -> int:
    """Each answer in flight will be as long as the mean of those that ended, and four of half the maximum."""
    mean = (2 * dataset.job.max_new_tokens + dataset.spent) / (4 + dataset.ended)
    return max(0, int((dataset.job.cap_tokens - dataset.spent) / mean - len(dataset.flying) + 0.5))


def settled_only(dataset: Dataset, now: float) -> int:
    """Each in flight will be as long as those that ended and were longer than its clock: E[L | L > age * speed]."""
    lengths = np.sort(np.append(dataset.lengths(), [dataset.job.max_new_tokens / 2] * 4))
    clock = dataset.snapshot(now).in_flight["clock"].astype(np.float64)
    longer = np.searchsorted(lengths, clock, side="right")
    sums = np.append(np.cumsum(lengths[::-1])[::-1], 0.0)
    count = len(lengths) - longer
    expected = np.where(count > 0, sums[longer] / np.maximum(count, 1), dataset.job.max_new_tokens)
    mean = float(lengths.mean())
    return max(0, int((dataset.job.cap_tokens - dataset.spent - expected.sum()) / mean + 0.5))


def shipped(rule: Rule) -> RoomOf:
    return lambda dataset, now: admit(dataset.snapshot(now), rule).room


RULES: dict[str, RoomOf] = {
    "plain stop": plain_stop,
    "mean reserve": mean_reserve,
    "settled only": settled_only,
    "precise": shipped(PRECISE),
    "fast": shipped(FAST),
}


@dataclass
class Outcome:
    """What came of one replay: miss of each dataset as a share of its cap, and seconds until the last answer."""

    misses: list[float]
    seconds: float


@dataclass
class Replay:
    """One run of a job under a rule."""

    job: Job
    room_of: RoomOf
    seed: int
    now: float = 0.0
    _free: list[int] = field(default_factory=list)
    _ends: list[tuple[float, int, int]] = field(default_factory=list)  # time, dataset, slot

    def run(self) -> Outcome:
        job = self.job
        datasets = [
            Dataset(job, number, np.random.default_rng([self.seed, number])) for number in range(len(job.means))
        ]
        self._free = list(range(job.slots))
        restart = job.restart_seconds
        last_end = 0.0
        self._fill(datasets)
        while self._ends:
            at = self._ends[0][0]
            if self._free:
                at = min(at, math.floor(self.now) + 1.0)  # the keeper's next tick
            if restart is not None and restart <= at:
                at, restart = restart, None
                self._pass(datasets, at)
                for dataset in datasets:
                    dataset.lose(at)
                self._ends.clear()
                self._free = list(range(job.slots))
            self._pass(datasets, at)
            while self._ends and self._ends[0][0] <= at:
                last_end, number, slot = heapq.heappop(self._ends)
                datasets[number].end(slot, at)
                self._free.append(slot)
            self._fill(datasets)
        misses = [dataset.spent / job.cap_tokens - 1 for dataset in datasets]
        return Outcome(misses, last_end)

    def _pass(self, datasets: list[Dataset], at: float) -> None:
        """Credit for the slots that a dataset held too few of since the last event; none while it is closed."""
        seconds, self.now = at - self.now, at
        fair = self.job.slots / max(1, sum(dataset.open for dataset in datasets))
        for dataset in datasets:
            credit = dataset.credit + seconds * (fair - len(dataset.flying))
            dataset.credit = max(-_MOST_CREDIT, min(_MOST_CREDIT, credit)) if dataset.open else 0.0

    def _fill(self, datasets: list[Dataset]) -> None:
        asked: set[int] = set()
        for number, dataset in enumerate(datasets):
            if not dataset.open:  # it may have become open by the last end of an answer
                self._ask(dataset)
                asked.add(number)
        while self._free:
            choice = [
                (len(dataset.flying) + 0.5 - dataset.credit / _CREDIT_SECONDS, number)
                for number, dataset in enumerate(datasets)
                if dataset.open
            ]
            if not choice:
                return
            _, number = min(choice)
            dataset = datasets[number]
            if number not in asked:
                self._ask(dataset)
                asked.add(number)
            elif dataset.room < 1:
                dataset.open = False
            if dataset.open:
                slot = self._free.pop()
                heapq.heappush(self._ends, (dataset.start(slot, self.now), number, slot))
                dataset.room -= 1

    def _ask(self, dataset: Dataset) -> None:
        if dataset.room > 3 * self.job.slots and dataset.skip < 20:
            dataset.skip += 1
        else:
            dataset.skip = 0
            dataset.room = self.room_of(dataset, self.now)
        dataset.open = dataset.room >= 1
