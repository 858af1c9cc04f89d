"""The simulated server's engine: a queue, a bounded set of running requests, a finite KV pool, and time.

Pure: it opens no socket and reads no clock but the one it is given, so a test can drive it in virtual time. Whoever
owns an engine calls `advance` when `due` has come. Times are simulated seconds on the given clock. The scheduler that
runs in steps as the real one does is in scheduler.py; here is what it shares with the simple one.
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.prefix_cache import Node


class QueueFullError(Exception):
    """The queue holds `max_queued_requests` already."""


class End(Enum):
    """How a sequence left the engine."""

    FINISHED = "finished"
    ABORTED = "aborted while running"
    ABORTED_WAITING = "aborted while waiting"
    QUEUE_FULL = "retracted into a full queue"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine.

    `completion_tokens` is what it will generate if it is left alone. `on_end` is called once, from inside the engine:
    it must not call the engine. From then on `end`, `generated_tokens` and `ended_at` are set. Without `input_ids` no
    other prompt is found to share a prefix with it.
    """

    rid: str
    prompt_tokens: int
    max_new_tokens: int
    completion_tokens: int
    on_end: Callable[["Sequence"], None]
    latency_seconds: float = 0.0
    input_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    arrived_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0
    generated_tokens: int = 0  # while it decodes: those that it had before
    cached_tokens: int | None = None  # of its prompt, as it was first admitted
    num_retractions: int = 0
    end: End | None = None
    # Kept by the scheduler.
    prefix: Node | None = None  # what it stands on in the prefix cache, locked
    own_tokens: int = 0  # KV slots that it alone holds; while it decodes: those that it had before
    missing_tokens: int = 0  # to prefill
    decodes_since: int | None = None  # the decode steps done when it began to decode
    last_step: int | None = None  # the decode step that gives its last token


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing at one moment; `tokens_per_second` is by the simulated clock."""

    running: int
    waiting: int
    used_tokens: int
    waiting_tokens: int
    tokens_per_second: float
    retracted: int = 0  # of those that wait
    cached_tokens: int = 0  # evictable
    cache_hit_rate: float = 0.0
    new_token_ratio: float = 0.0
    decode_steps: int = 0  # since the start
    decoded_tokens: int = 0  # in them: all but the first of each answer


class Engine(ABC):
    """Queue and abort; the subclasses say who is admitted, and what time does to those who run."""

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.extra_step_seconds = 0.0  # what /slow_down adds
        self._held: set[str] = set()
        self._max_total_tokens = config.max_total_tokens
        self._max_running_requests = config.effective_max_running_requests
        self._max_queued_requests = config.max_queued_requests

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence that fits an empty pool. Raises `QueueFullError`."""
        self.advance()
        if self._queue_is_full():
            raise QueueFullError
        sequence.arrived_at = self.clock()
        self.waiting.append(sequence)
        self._go_on(sequence.arrived_at)

    def abort(self, rid_prefix: str) -> None:
        """Abort every sequence whose rid begins so, as the real server does; unknown ones are no error."""
        self.advance()
        now = self.clock()
        gone = [sequence for sequence in self.waiting if sequence.rid.startswith(rid_prefix)]
        if gone:
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.rid.startswith(rid_prefix))
        for sequence in gone:
            self._end(sequence, End.ABORTED_WAITING, now)
        for sequence in [one for one in self.running if one.rid.startswith(rid_prefix)]:
            self._abort_running(sequence, now)
        self._go_on(now)

    def hold(self, reason: str, *, retract: bool = False) -> None:
        """Freeze all that runs until `release`; with `retract` it goes back into the queue, ids kept."""
        self.advance()
        self._held.add(reason)
        self._hold(self.clock(), retract=retract)

    def release(self, reason: str) -> None:
        """Take back a `hold`; others may be left."""
        self.advance()
        if reason in self._held:
            self._held.remove(reason)
            if not self._held:
                self._release(self.clock())

    @abstractmethod
    def due(self) -> float | None:
        """When `advance` has something to do; None while nothing runs."""

    @abstractmethod
    def advance(self) -> None:
        """Do all that is due by now."""

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def generated(self, sequence: Sequence) -> int:
        """How many tokens a sequence that has not ended has by now."""

    @abstractmethod
    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while anything runs or waits."""

    @abstractmethod
    def _go_on(self, now: float) -> None:
        """Admit from the queue, if this is a moment at which that happens."""

    @abstractmethod
    def _abort_running(self, sequence: Sequence, now: float) -> None: ...

    @abstractmethod
    def _hold(self, now: float, *, retract: bool) -> None: ...

    @abstractmethod
    def _release(self, now: float) -> None: ...

    def _queue_is_full(self) -> bool:
        return self._max_queued_requests is not None and len(self.waiting) >= self._max_queued_requests

    def _end(self, sequence: Sequence, end: End, now: float) -> None:
        sequence.end = end
        sequence.ended_at = now
        sequence.on_end(sequence)

    def _waiting_tokens(self) -> int:
        return sum(sequence.prompt_tokens for sequence in self.waiting)


class LatencyEngine(Engine):
    """Each sequence takes its own `latency_seconds` from its admission on, whatever its length and its neighbours.

    It reserves KV tokens for all that a request may generate, so that the pool never runs over: prompt +
    max_new_tokens + 1 must be less than what is neither used nor reserved, or it waits, and all behind it.
    """

    def __init__(self, config: SimulatorConfig, clock: Callable[[], float]) -> None:
        super().__init__(config, clock)
        self.reserved_tokens = 0
        self._held_at: float | None = None
        self._ends: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()  # decides between equal times, first come first

    def due(self) -> float | None:
        return self._ends[0][0] if self._ends and self._held_at is None else None

    def advance(self) -> None:
        now = self.clock()
        while self._held_at is None and self._ends and self._ends[0][0] <= now:
            at, _, sequence = heapq.heappop(self._ends)
            if sequence.end is None:
                sequence.generated_tokens = sequence.completion_tokens
                self._leave(sequence, End.FINISHED, at)
                self._go_on(at)

    def load(self) -> Load:
        self.advance()
        now = self.clock()
        used = sum(sequence.prompt_tokens + self._generated(sequence, now) for sequence in self.running)
        rate = sum(sequence.completion_tokens / sequence.latency_seconds for sequence in self.running)
        return Load(len(self.running), len(self.waiting), used, self._waiting_tokens(), rate)

    def generated(self, sequence: Sequence) -> int:
        return 0 if sequence.admitted_at is None else self._generated(sequence, self.clock())

    def flush(self) -> bool:
        return not self.running and not self.waiting

    def _go_on(self, now: float) -> None:
        if self._held_at is not None:
            return
        while self.waiting and len(self.running) < self._max_running_requests:
            sequence = self.waiting[0]
            needed = sequence.prompt_tokens + sequence.max_new_tokens
            if self.reserved_tokens + needed + 1 >= self._max_total_tokens:
                break
            self.waiting.popleft()
            sequence.admitted_at = sequence.first_token_at = now
            sequence.cached_tokens = 0
            self.running[sequence] = None
            self.reserved_tokens += needed
            heapq.heappush(self._ends, (now + sequence.latency_seconds, next(self._numbers), sequence))

    def _abort_running(self, sequence: Sequence, now: float) -> None:
        sequence.generated_tokens = self._generated(sequence, now)
        self._leave(sequence, End.ABORTED, now)

    def _hold(self, now: float, *, retract: bool) -> None:  # noqa: ARG002  # without a pool there is nothing to retract
        if self._held_at is None:
            self._held_at = now

    def _release(self, now: float) -> None:
        assert self._held_at is not None
        late = now - self._held_at
        self._held_at = None
        self._ends = [(at + late, number, sequence) for at, number, sequence in self._ends]
        for sequence in self.running:
            assert sequence.admitted_at is not None
            sequence.admitted_at += late  # the latency counts from here
        self._go_on(now)

    def _leave(self, sequence: Sequence, end: End, now: float) -> None:
        del self.running[sequence]
        self.reserved_tokens -= sequence.prompt_tokens + sequence.max_new_tokens
        self._end(sequence, end, now)

    def _generated(self, sequence: Sequence, now: float) -> int:
        assert sequence.admitted_at is not None
        since = min(now, now if self._held_at is None else self._held_at) - sequence.admitted_at
        return min(int(sequence.completion_tokens * since / sequence.latency_seconds), sequence.completion_tokens)
