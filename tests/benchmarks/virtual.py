"""Workers and the simulator's own engine in virtual time: an hour of a server takes a second or two.

Nothing here knows what is sent or why: a `Worker` takes `Request`s from a source that it is given, whenever a slot of
it is free, and keeps as many in flight as its limit allows, which a `Governor` or a number decides. What the jobs are,
and what is asserted, is up to whoever drives a `World`.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workers.governor import Governor, Load
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Sequence
from workers.sglang.simulator.scheduler import StepEngine

POLL_SECONDS = 2.0
JITTER = 0.1


@dataclass(slots=True, eq=False)
class Request:
    """One sample. `completion_tokens` is what its answer will have; `about` is the source's own."""

    prompt_tokens: int
    completion_tokens: int
    max_new_tokens: int
    about: Any = None


Source = Callable[[], Request | None]


@dataclass(slots=True, eq=False)
class Call:
    """One request in flight."""

    worker: "Worker"
    request: Request
    started: float
    sequence: Sequence


class World:
    """One server, its workers, and what happens when. Times are seconds since the start."""

    def __init__(self, config: SimulatorConfig, seed: int = 0) -> None:
        self.now = 0.0
        self.draw = random.Random(seed)
        self.config = config
        self.up = True
        self.workers: list[Worker] = []
        self.engine = self._new_engine()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ended: list[Call] = []
        self._retractions = 0  # of engines that are gone
        self._loads: deque[tuple[float, Load]] = deque()

    def _new_engine(self) -> StepEngine:
        return StepEngine(self.config, lambda: self.now)

    # Time

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something done at a moment to come."""
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def every(self, seconds: float, what: Callable[[], None], jitter: float = 0.0) -> None:
        """Have something done again and again, first after up to `seconds`."""

        def again() -> None:
            what()
            self.at(self.now + seconds * self.draw.uniform(1 - jitter, 1 + jitter), again)

        self.at(self.now + (seconds * self.draw.random() if jitter else seconds), again)

    def run(self, until: float) -> None:
        """Go on to this moment."""
        events = self._events
        while True:
            due = self.engine.due()
            then = min(until, events[0][0]) if events else until
            if due is not None and due <= then:
                self.now = due
                self.engine.advance()
            else:
                self.now = then
                if events and events[0][0] <= then:
                    heapq.heappop(events)[2]()
                elif then >= until:
                    return
            if self._ended:
                self._tell_ended()

    def _tell_ended(self) -> None:
        ended, self._ended = self._ended, []
        for call in ended:
            call.worker.ended(call)

    # The server

    def send(self, worker: "Worker", request: Request) -> Call:
        """Submit one request; its worker is told when it has ended."""
        number = next(self._numbers)
        call = Call(worker, request, self.now, None)  # type: ignore[arg-type]  # each knows the other

        def on_end(_sequence: Sequence) -> None:
            self._ended.append(call)

        call.sequence = Sequence(
            rid=f"{number:016d}",
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            completion_tokens=min(request.completion_tokens, request.max_new_tokens),
            on_end=on_end,
        )
        self.engine.submit(call.sequence)
        return call

    def load(self, age_seconds: float = 0.0) -> Load:
        """What the server shows, as it was some seconds ago; such figures must have been recorded."""
        if not age_seconds:
            told = self.engine.load()
            return Load(
                running=told.running,
                waiting=told.waiting,
                capacity_tokens=self.config.max_total_tokens,
                tokens_per_second=told.tokens_per_second,
                kv_usage=told.used_tokens / self.config.max_total_tokens,
            )
        while len(self._loads) > 1 and self._loads[1][0] <= self.now - age_seconds:
            self._loads.popleft()
        return self._loads[0][1] if self._loads else self.load()

    def record(self) -> None:
        """Keep figures every half second, for whoever reads old ones."""
        self.every(0.5, lambda: self._loads.append((self.now, self.load())))

    @property
    def retractions(self) -> int:
        return self._retractions + self.engine.retractions

    def go_down(self, seconds: float) -> None:
        """Die with all that is in flight, and be back after so many seconds."""
        self.up = False
        self._retractions += self.engine.retractions
        self.engine = self._new_engine()
        self._ended.clear()
        for worker in self.workers:
            worker.lost_all()
        self.at(self.now + seconds, self._come_back)

    def _come_back(self) -> None:
        self.up = True
        for worker in self.workers:
            worker.fill()


@dataclass(eq=False)
class Worker:
    """Keeps calls in flight: as many as `limit` says, or its governor where it has one.

    `figures` is what its polls read. What times out or is lost is sent again, with the answer that it would have had.
    """

    world: World
    source: Source
    limit: int = 1
    governor: Governor | None = None
    figures: Callable[[], Load | None] | None = None
    timeout_seconds: float | None = None
    on_answer: Callable[[Call], None] | None = None
    team: Callable[[], int] = lambda: 1  # how many send to this server
    in_flight: dict[Call, None] = field(default_factory=dict)  # by start
    again: deque[Request] = field(default_factory=deque)
    answers: int = 0
    answered_tokens: int = 0
    timeouts: int = 0
    lost: int = 0
    leaving: bool = False

    def start(self) -> "Worker":
        """Begin to send and to poll."""
        self.world.workers.append(self)
        self.fill()
        self.world.every(POLL_SECONDS, self._poll, JITTER)
        return self

    def leave(self) -> None:
        """Begin nothing new."""
        self.leaving = True

    def fill(self) -> None:
        """Send while a slot is free and there is something to send."""
        governor = self.governor
        limit = self.limit if governor is None else governor.limit
        while len(self.in_flight) < limit and self.world.up and not self.leaving:
            request = self.again.popleft() if self.again else self.source()
            if request is None:
                return
            self.in_flight[self.world.send(self, request)] = None
            if governor is not None:
                governor.started(len(self.in_flight))

    def ended(self, call: Call) -> None:
        """The server is done with one of the calls."""
        if call not in self.in_flight:
            return  # given up before
        del self.in_flight[call]
        if call.sequence.end is End.FINISHED:
            tokens = call.sequence.completion_tokens
            self.answers += 1
            self.answered_tokens += tokens
            if self.governor is not None:
                self.governor.answered(call.request.prompt_tokens, tokens)
            if self.on_answer is not None:
                self.on_answer(call)
        else:
            self.again.append(call.request)
        self.fill()

    def lost_all(self) -> None:
        """The server died."""
        self.lost += len(self.in_flight)
        self.again.extend(call.request for call in self.in_flight)
        self.in_flight.clear()
        if self.governor is not None:
            self.governor.refused()

    def useful_tokens(self) -> int:
        """All tokens of its answers, and those that are made of the answers in flight."""
        generated = self.world.engine.generated
        return self.answered_tokens + sum(generated(call.sequence) for call in self.in_flight)

    def _poll(self) -> None:
        if not self.world.up:
            if self.governor is not None:
                self.governor.refused()
            return
        self._give_up_late()
        if self.governor is not None:
            load = self.world.load() if self.figures is None else self.figures()
            self.governor.polled(load, len(self.in_flight), self.team())
            self.fill()

    def _give_up_late(self) -> None:
        for call in list(self._late()):
            if self.governor is not None:
                self.governor.timed_out(len(self.in_flight))
            del self.in_flight[call]
            self.again.append(call.request)
            self.timeouts += 1
            self.world.engine.abort(call.sequence.rid)
        self.fill()

    def _late(self) -> Iterator[Call]:
        if self.timeout_seconds is None:
            return
        for call in self.in_flight:
            if self.world.now - call.started <= self.timeout_seconds:
                return
            yield call
