"""A whole job in virtual time, with the functions that ship: what may start, of which dataset, and how many at a time.

As in the system: a keeper ticks once a second, reads each dataset's books, asks the budget rule for its room, and sends
messages by shares (workers/sending.py itself, on books in memory). Workers take the messages first in, first out, hold
a few unclaimed, claim for free slots, tell their limit and clocks once a second, and look at the server every 2 s. Not
played: feeds, which are always in time, and the milliseconds that Redis and the disk take.

The rule costs most of the time, so while a dataset has room for far more than all slots it is asked once in two
minutes, and claims are taken off between.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.ledger import DatasetState, InFlight, Progress, pack_in_flight
from common.sections import TokenizerSettings
from common.settings import Settings
from tests.benchmarks.virtual import JITTER, POLL_SECONDS, Call, Request, Worker, World
from workers import in_flight
from workers.budget import ENDED, FAST, NO_LIMIT, PRECISE, Rule, admit
from workers.governor import Governor, Load
from workers.pacing import Pace, messages_held
from workers.sending import Candidate, Sending
from workers.sglang.progress import DecodeClock
from workers.sglang.simulator.config import SimulatorConfig
from workers.shares import Shares

SETTINGS = Settings(tokenizer=TokenizerSettings(path=Path("none")))  # as they are by default
MAX_NEW_TOKENS = SETTINGS.sampling.max_new_tokens
_LEASE_MS = round(1000 * SETTINGS.worker.lease_seconds)
TIMEOUT_SECONDS = 1800.0
TICK_SECONDS = HEARTBEAT_SECONDS = 1.0
KEPT = 2048  # ended attempts that the rule is shown: four memories of it, older ones weigh under 2 %
_FAR = 3  # times all slots: a room so large is not asked for again at once
_TICKS = 120
_LOOK_SECONDS = 5.0
RULES: Mapping[str, Rule | None] = {"precise": PRECISE, "fast": FAST, "plain stop": None}


@dataclass(frozen=True)
class Kind:
    """What a dataset is: prompts and answers are lognormal, answers clipped at MAX_NEW_TOKENS."""

    name: str
    prompts: int
    prompt_tokens: int  # mean; coefficient of variation 0.5, clipped at 16,000
    mean_tokens: float  # before the clip
    cv: float
    cap_tokens: int = 10_000_000

    def samples(self, seed: int) -> list[tuple[int, int]]:
        """Prompt and answer of each sample, in the order of the source; the same for every rule and limit."""
        draw = random.Random(f"{self.name} {seed}")
        return [
            (
                max(1, min(16_000, round(_lognormal(draw, self.prompt_tokens, 0.5)))),
                max(1, min(MAX_NEW_TOKENS, round(_lognormal(draw, self.mean_tokens, self.cv)))),
            )
            for _ in range(self.prompts)
        ]


def _lognormal(draw: random.Random, mean: float, cv: float) -> float:
    variance = math.log1p(cv * cv)
    return draw.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


@dataclass(frozen=True)
class Plan:
    """How the job is run. `limit` is of all workers together; None: each has a governor."""

    workers: int = 1
    limit: int | None = None
    landing: str = "precise"
    law: type[Shares] = Shares  # who is next
    most_seconds: float = math.inf


@dataclass(eq=False)
class Sample:
    """One claimed sample."""

    dataset: "Dataset"
    index: int
    attempt: int
    member: "Member"
    started: float | None = None  # its worker's clock as its call began
    lost: float = 0.0  # how far a lost call of it was


class Dataset:
    """A dataset's books, as the ledger keeps them."""

    def __init__(self, kind: Kind, samples: Sequence[tuple[int, int]]) -> None:
        self.kind, self.samples = kind, samples
        self.state, self.room = "open", 0
        self.claims = self.sent = self.done = 0
        self.spent = self.prompt_tokens = 0
        self.leased: dict[int, Sample] = {}
        self.closed_at: float | None = None  # the first time that there was no room, or nothing left to start
        self.ended_at = 0.0  # of the last answer
        self._back: list[int] = []  # claims that were refused
        self._next = 0
        self._ended = np.zeros(KEPT, ENDED)
        self._ended_count = 0
        self._skipped = self._asked_claims = 0
        self._asked_room = 0

    @property
    def ended(self) -> bool:
        return self.state in {"capped", "exhausted"}

    @property
    def unsent(self) -> int:
        return len(self.samples) - self._next + len(self._back)

    def take(self, samples: int) -> list[int]:
        """The next that are in no message, marked as sent."""
        taken: list[int] = []
        while len(taken) < samples and self.unsent:
            if self._back:
                taken.append(heapq.heappop(self._back))
            else:
                taken.append(self._next)
                self._next += 1
        self.sent += len(taken)
        return taken

    def claim(self, index: int, member: "Member", now_ms: int) -> Sample | None:
        """Refused where there is no room: the sample is in no message then (claim.lua)."""
        self.sent -= 1
        if self.state != "open" or self.room <= 0:
            heapq.heappush(self._back, index)
            return None
        self.room -= 1
        self.claims += 1
        self.leased[index] = sample = Sample(self, index, now_ms, member)
        return sample

    def observe(self, attempt: int, clock: float, tokens: int) -> None:
        self._ended[self._ended_count % KEPT] = (attempt, clock, tokens)
        self._ended_count += 1

    def settle(self, sample: Sample, clock: float, now: float) -> None:
        prompt_tokens, tokens = self.samples[sample.index]
        del self.leased[sample.index]
        self.done += 1
        self.spent += tokens
        self.prompt_tokens += prompt_tokens
        self.ended_at = now
        self.observe(sample.attempt, clock, tokens)

    def move(self, room: int, now: float) -> None:
        """What admit.lua does."""
        if self.ended:
            return
        self.room = room
        if not self.unsent and not self.sent and not self.leased:
            self.state = "exhausted"
        elif room <= 0:
            self.state = "closing" if self.leased else "capped"
        else:
            self.state = "open"
        if self.closed_at is None and (room <= 0 or not self.unsent):
            self.closed_at = now

    def ask(self, rule: Rule | None, state: DatasetState, slots: int, told: Mapping[str, "Told"]) -> int:
        """The room under the cap, as the keeper finds it."""
        if rule is None:
            return NO_LIMIT if self.spent < self.kind.cap_tokens else 0
        left = self._asked_room - (self.claims - self._asked_claims)
        if self._skipped < _TICKS and left > _FAR * max(slots, 16):
            self._skipped += 1
            return left
        snapshot = in_flight.snapshot(state, self._progress(state.now_ms, told), SETTINGS)
        self._skipped, self._asked_claims = 0, self.claims
        self._asked_room = admit(snapshot, rule).room
        return self._asked_room

    def _progress(self, now_ms: int, told: Mapping[str, "Told"]) -> Progress:
        clocks: dict[str, list[InFlight]] = {name: [] for name in told}
        for sample in self.leased.values():
            if sample.started is not None and sample.member.name in told:
                heard = told[sample.member.name]
                if sample.attempt <= heard.now_ms:
                    clock = max(0.0, heard.clock - sample.started)
                    row = InFlight(sample.index, sample.attempt, clock, heard.tokens_per_second)
                    clocks[sample.member.name].append(row)
        packed = {name: (float(told[name].now_ms), pack_in_flight(rows)) for name, rows in clocks.items()}
        leases = {index: sample.attempt + _LEASE_MS for index, sample in self.leased.items()}
        outcomes = self._ended[: min(self._ended_count, KEPT)].tobytes()
        lost = {index: sample.lost for index, sample in self.leased.items() if sample.lost}
        return Progress(now_ms, leases, packed, outcomes, lost=lost)

    def snapshot(self, now_ms: int) -> DatasetState:
        fed, queued = len(self.samples), self.unsent + self.sent
        known: dict[str, Any] = {
            "cap_tokens": self.kind.cap_tokens, "room": self.room, "starts": self.claims, "fed": fed, "done": self.done,
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.spent, "queued": queued, "sent": self.sent,
            "in_flight": len(self.leased),
        }  # fmt: skip
        return DatasetState(
            name=self.kind.name, now_ms=now_ms, spec={}, state=self.state, reason="", count="completion", weight=1.0,
            cursor="", ended=True, window=0, fed_bytes=0, tokens_per_second=0.0, rejected=0, cached_tokens=0,
            squared_tokens=0, max_tokens=0, expired=0, **known,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's last heartbeat: its limit, its clock, and how fast that goes."""

    now_ms: int
    limit: int
    clock: float
    tokens_per_second: float


class Member:
    """One worker: its unclaimed messages, its claimed samples without a slot, and its clock."""

    def __init__(self, job: "Job", name: str, limit: int | None) -> None:
        self.name, self._job = name, job
        world = job.world
        self.clock = DecodeClock(world.now)
        self._messages: deque[tuple[Dataset, list[int]]] = deque()
        self._claimed: deque[Sample] = deque()
        self.worker = Worker(world, self._next, limit or 1, timeout_seconds=TIMEOUT_SECONDS, on_answer=self._answer)
        if limit is None:
            phase = 0.5 if job.plan.workers == 1 else world.draw.random()
            pool = world.config.max_total_tokens
            self.worker.governor = Governor(
                capacity_tokens=pool, max_new_tokens=MAX_NEW_TOKENS, most=SETTINGS.worker.concurrency, phase=phase
            )
            self.worker.figures = self._look
        else:
            world.every(POLL_SECONDS, self._advance, JITTER)
        world.every(HEARTBEAT_SECONDS, self._tell, JITTER)
        self._tell()

    @property
    def limit(self) -> int:
        return self.worker.limit if self.worker.governor is None else self.worker.governor.limit

    def _look(self) -> Load:
        world = self._job.world
        told = world.engine.load()
        capacity = world.config.max_total_tokens
        load = Load(told.running, told.waiting, capacity, told.decoded_tokens, told.tokens_per_second)
        self.clock.advance(world.now, load)
        return load

    def _advance(self) -> None:
        self._look()

    def _tell(self) -> None:
        now = self._job.world.now
        clock = self.clock.at(now)
        told = Told(round(now * 1000), self.limit, clock, self.clock.tokens_per_second)
        self._job.told[self.name] = told

    def prefetch(self) -> None:
        queue = self._job.queue
        while queue and len(self._messages) < messages_held(self.limit):
            self._messages.append(queue.popleft())

    def _next(self) -> Request | None:
        while not self._claimed:
            self.prefetch()
            if not self._messages:
                return None
            dataset, indices = self._messages.popleft()
            now_ms = round(self._job.world.now * 1000)
            claims = [dataset.claim(index, self, now_ms) for index in indices]
            self._claimed.extend(sample for sample in claims if sample is not None)
        sample = self._claimed.popleft()
        prompt_tokens, tokens = sample.dataset.samples[sample.index]
        return Request(prompt_tokens, tokens, MAX_NEW_TOKENS, sample)

    def _answer(self, call: Call) -> None:
        now, sample = self._job.world.now, call.request.about
        self.clock.answered(call.sequence.completion_tokens, now - call.started)
        sample.dataset.settle(sample, self.clock.at(now) - sample.started, now)


class _World(World):
    """Knows at which clock a call began; a sample that is sent again was lost at its clock."""

    def send(self, worker: Worker, request: Request) -> Call:
        sample: Sample = request.about
        clock = sample.member.clock.at(self.now)
        if sample.started is not None:
            sample.dataset.observe(sample.attempt, clock - sample.started, -1)
            sample.lost = max(sample.lost, clock - sample.started)
        sample.started = clock
        return super().send(worker, request)


@dataclass(frozen=True, slots=True)
class Look:
    """The job at one moment."""

    now: float
    running: int
    waiting: int
    decoded_tokens: int
    slots: int
    in_flight: tuple[int, ...]  # by dataset
    tokens: tuple[int, ...]  # settled


class _Books:
    """What Sending asks of the ledger and of the broker."""

    def __init__(self, job: "Job") -> None:
        self._job = job

    def unsent(self, name: str, samples: int) -> list[int]:
        return self._job.datasets[name].take(samples)

    def resend(self, _name: str, _before_ms: int, indices: list[int]) -> list[int]:
        return indices

    def suspects(self, *_: object) -> list[int]:
        return []  # no worker dies here, and no message is lost

    due = suspects

    def generate(self, messages: list[tuple[str, list[int]]]) -> None:
        self._job.queue.extend((self._job.datasets[name], indices) for name, indices in messages)


@dataclass(eq=False)
class Job:
    """All datasets at one server."""

    config: SimulatorConfig
    kinds: Sequence[Kind]
    seed: int
    plan: Plan
    queue: deque[tuple[Dataset, list[int]]] = field(default_factory=deque)
    told: dict[str, Told] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = _World(self.config, self.seed)
        self.datasets = {kind.name: Dataset(kind, kind.samples(self.seed)) for kind in self.kinds}

    def run(self) -> "Job":
        """Until every dataset has ended, or `most_seconds`."""
        plan, books = self.plan, _Books(self)
        self._sending = Sending(books, books)  # type: ignore[arg-type]  # as much of the ledger as it needs
        self._sending._shares = plan.law()
        self._paces = {name: Pace.of(one.snapshot(0)) for name, one in self.datasets.items()}
        parts = [None if plan.limit is None else (plan.limit + n) // plan.workers for n in range(plan.workers)]
        self.members = [Member(self, f"worker-{n}", part) for n, part in enumerate(parts)]
        self.world.every(TICK_SECONDS, self._tick, JITTER)
        for member in self.members:
            member.worker.start()
        self.world.every(_LOOK_SECONDS, self._look)
        while not self.ended and self.world.now < plan.most_seconds:
            self.world.run(self.world.now + 60)
        return self

    @property
    def ended(self) -> bool:
        return all(one.ended for one in self.datasets.values())

    def _tick(self) -> None:
        now = self.world.now
        now_ms, slots = round(now * 1000), sum(told.limit for told in self.told.values())
        candidates: dict[str, Candidate] = {}
        for name, one in self.datasets.items():
            state, pace = one.snapshot(now_ms), self._paces[name]
            pace.measure(state)
            room = (
                0
                if one.state in {"capped", "exhausted"}
                else one.ask(RULES[self.plan.landing], state, slots, self.told)
            )
            one.move(room, now)
            candidates[name] = Candidate(state, room if one.state == "open" else 0, pace)
        self._sending.send(candidates, now_ms, slots, len(self.members))
        for member in self.world.draw.sample(self.members, len(self.members)):
            member.prefetch()
            member.worker.fill()

    def _look(self) -> None:
        load, sets = self.world.engine.load(), self.datasets.values()
        flying, tokens = tuple(len(one.leased) for one in sets), tuple(one.spent for one in sets)
        slots = sum(member.limit for member in self.members)
        self.looks.append(Look(self.world.now, load.running, load.waiting, load.decoded_tokens, slots, flying, tokens))
