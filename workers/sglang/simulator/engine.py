"""The simulated server's engine: a queue, a bounded set of running requests, a finite KV pool, and time.

Pure: it opens no socket and reads no clock but the one it is given, so a test can drive it in virtual time. Whoever
owns an engine calls `advance` when `due` has come. Times are simulated seconds on the given clock.

Admission is first come, first served, and reserves KV tokens for all that a request may generate: prompt +
max_new_tokens + 1 must be less than what is neither used nor reserved, or this request and all behind it wait (the
rule of `PrefillAdder` in SGLang 0.5.23's schedule_policy.py, with a new-token ratio of 1). So the pool never runs
over. The real server under-reserves long answers, and retracts some when the pool is full; this one does not yet.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from workers.sglang.simulator.config import SimulatorConfig


class QueueFullError(Exception):
    """The queue holds `max_queued_requests` already."""


class End(Enum):
    """How a sequence left the engine."""

    FINISHED = "finished"
    ABORTED = "aborted while running"
    ABORTED_WAITING = "aborted while waiting"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine.

    `max_new_tokens` is what is reserved for it, `completion_tokens` what it will generate if it is left alone.
    `on_end` is called once, from inside the engine: it must not call the engine. From then on `end`,
    `generated_tokens` and `ended_at` are set.
    """

    rid: str
    prompt_tokens: int
    max_new_tokens: int
    completion_tokens: int
    on_end: Callable[["Sequence"], None]
    latency_seconds: float = 0.0
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    first_step: int = 0  # the number of decode steps done when the prefill gave the first token
    ended_at: float = 0.0
    generated_tokens: int = 0
    end: End | None = None

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing at one moment; `tokens_per_second` is by the simulated clock."""

    running: int
    waiting: int
    used_tokens: int
    waiting_tokens: int
    tokens_per_second: float


class Engine(ABC):
    """Queue, admission and abort; the subclasses say what time does to running sequences."""

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self.reserved_tokens = 0
        self._max_total_tokens = config.max_total_tokens
        self._max_running_requests = config.max_running_requests
        self._max_queued_requests = config.max_queued_requests

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence whose `rid` no other has and that fits an empty pool. Raises `QueueFullError`."""
        self.advance()
        if self._max_queued_requests is not None and len(self.waiting) >= self._max_queued_requests:
            raise QueueFullError
        sequence.arrived_at = self.clock()
        self.waiting.append(sequence)
        self._admit_if_free(sequence.arrived_at)

    def abort(self, rid_prefix: str) -> None:
        """Abort every sequence whose rid begins so, as the real server does; unknown ones are no error."""
        self.advance()
        now = self.clock()
        gone = [sequence for sequence in self.waiting if sequence.rid.startswith(rid_prefix)]
        if gone:
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.rid.startswith(rid_prefix))
        for sequence in gone:
            self._end(sequence, End.ABORTED_WAITING, now)
        for sequence in [one for one in self.running.values() if one.rid.startswith(rid_prefix)]:
            self._abort_running(sequence, now)
        self._admit_if_free(now)

    @abstractmethod
    def due(self) -> float | None:
        """When `advance` has something to do; None while nothing runs."""

    @abstractmethod
    def advance(self) -> None:
        """Do all that is due by now."""

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def _admit_if_free(self, now: float) -> None:
        """Admit from the queue, if this is a moment at which that happens."""

    @abstractmethod
    def _abort_running(self, sequence: Sequence, now: float) -> None: ...

    def _admit(self, now: float, max_prompt_tokens: float = float("inf")) -> list[Sequence]:
        """Move from queue to running what fits, in order, and not more than one above `max_prompt_tokens`."""
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_running_requests:
            sequence = self.waiting[0]
            max_prompt_tokens -= sequence.prompt_tokens
            if self.reserved_tokens + sequence.reserved_tokens + 1 >= self._max_total_tokens:
                break
            if admitted and max_prompt_tokens < 0:
                break
            self.waiting.popleft()
            sequence.admitted_at = now
            self.running[sequence.rid] = sequence
            self.reserved_tokens += sequence.reserved_tokens
            admitted.append(sequence)
        return admitted

    def _leave(self, sequence: Sequence, end: End, now: float) -> None:
        """Take a running sequence out; its `generated_tokens` are set."""
        del self.running[sequence.rid]
        self.reserved_tokens -= sequence.reserved_tokens
        self._end(sequence, end, now)

    def _end(self, sequence: Sequence, end: End, now: float) -> None:
        sequence.end = end
        sequence.ended_at = now
        sequence.on_end(sequence)

    def _waiting_tokens(self) -> int:
        return sum(sequence.prompt_tokens for sequence in self.waiting)


class StepEngine(Engine):
    """Time passes in steps, as on the real server: a prefill of what was admitted, else one decode of all.

    A prefill gives the first token of each of its sequences, and a decode one more to each that runs; requests are
    admitted and aborted between steps. A step costs the same however many run: a sequence is filed under the step
    that will be its last, and what it has generated follows from the number of steps done.
    """

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self.used_tokens = 0
        self._config = config
        self._step_ends_at: float | None = None
        self._steps = 0  # decode steps done
        self._last_steps: dict[int, list[Sequence]] = {}
        self._prefilling: list[Sequence] = []
        self._aborting: list[Sequence] = []

    def due(self) -> float | None:
        return self._step_ends_at

    def advance(self) -> None:
        now = self.clock()
        while self._step_ends_at is not None and self._step_ends_at <= now:
            at = self._step_ends_at
            if self._prefilling:
                self._end_prefill(at)
            else:
                self._end_decode(at)
            for sequence in self._aborting:
                if sequence.end is None:
                    self._stop(sequence, End.ABORTED, at)
            self._aborting = []
            self._begin_step(at)

    def load(self) -> Load:
        self.advance()
        rate = len(self.running) / self._decode_seconds() if self.running else 0.0
        return Load(len(self.running), len(self.waiting), self.used_tokens, self._waiting_tokens(), rate)

    def _admit_if_free(self, now: float) -> None:
        if self._step_ends_at is None:
            self._begin_step(now)

    def _abort_running(self, sequence: Sequence, now: float) -> None:  # noqa: ARG002  # happens when the step ends
        self._aborting.append(sequence)

    def _begin_step(self, now: float) -> None:
        self._prefilling = self._admit(now, self._config.max_prefill_tokens)
        if self._prefilling:
            prompt_tokens = sum(sequence.prompt_tokens for sequence in self._prefilling)
            self.used_tokens += prompt_tokens
            self._step_ends_at = now + self._prefill_seconds(prompt_tokens)
        elif self.running:
            self._step_ends_at = now + self._decode_seconds()
        else:
            self._step_ends_at = None

    def _end_prefill(self, now: float) -> None:
        for sequence in self._prefilling:
            sequence.first_token_at = now
            sequence.first_step = self._steps
            if sequence.completion_tokens <= 1:
                self.used_tokens += sequence.completion_tokens
                self._stop(sequence, End.FINISHED, now)
            else:
                self.used_tokens += 1
                last_step = self._steps + sequence.completion_tokens - 1
                self._last_steps.setdefault(last_step, []).append(sequence)
        self._prefilling = []

    def _end_decode(self, now: float) -> None:
        self._steps += 1
        self.used_tokens += len(self.running)
        for sequence in self._last_steps.pop(self._steps, ()):
            if sequence.end is None:
                self._stop(sequence, End.FINISHED, now)

    def _stop(self, sequence: Sequence, end: End, now: float) -> None:
        done = 1 + self._steps - sequence.first_step
        sequence.generated_tokens = min(done, sequence.completion_tokens)
        self.used_tokens -= sequence.prompt_tokens + sequence.generated_tokens
        self._leave(sequence, end, now)

    def _prefill_seconds(self, prompt_tokens: int) -> float:
        if self._config.tokens_per_second is not None:
            return 0.0
        return self._config.prefill_base_seconds + prompt_tokens / self._config.prefill_tokens_per_second

    def _decode_seconds(self) -> float:
        config = self._config
        if config.tokens_per_second is not None:
            return 1 / config.tokens_per_second
        running = config.step_request_seconds * len(self.running)
        return config.step_base_seconds + running + config.step_token_seconds * self.used_tokens


class LatencyEngine(Engine):
    """Each sequence takes its own `latency_seconds` from its admission on, whatever its length and its neighbours."""

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self._ends: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()  # decides between equal times, first come first

    def due(self) -> float | None:
        return self._ends[0][0] if self._ends else None

    def advance(self) -> None:
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            at, _, sequence = heapq.heappop(self._ends)
            if sequence.end is None:
                sequence.generated_tokens = sequence.completion_tokens
                self._leave(sequence, End.FINISHED, at)
                self._admit_if_free(at)

    def load(self) -> Load:
        self.advance()
        now = self.clock()
        running = self.running.values()
        used = sum(sequence.prompt_tokens + self._generated(sequence, now) for sequence in running)
        rate = sum(sequence.completion_tokens / sequence.latency_seconds for sequence in running)
        return Load(len(running), len(self.waiting), used, self._waiting_tokens(), rate)

    def _admit_if_free(self, now: float) -> None:
        for sequence in self._admit(now):
            sequence.first_token_at = now
            heapq.heappush(self._ends, (now + sequence.latency_seconds, next(self._numbers), sequence))

    def _abort_running(self, sequence: Sequence, now: float) -> None:
        sequence.generated_tokens = self._generated(sequence, now)
        self._leave(sequence, End.ABORTED, now)

    def _generated(self, sequence: Sequence, now: float) -> int:
        assert sequence.admitted_at is not None
        share = (now - sequence.admitted_at) / sequence.latency_seconds
        return min(int(sequence.completion_tokens * share), sequence.completion_tokens)
