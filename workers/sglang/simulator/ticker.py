"""The engine in real time, scaled by the speed."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import Engine, LatencyEngine, Load, Sequence
from workers.sglang.simulator.scheduler import StepEngine

POLL_SECONDS = 4.0  # how often the real server asks whether the caller of a plain request is still there
LOOK_SECONDS = 0.01  # how often streams are looked after while the engine has no steps


class Ticker:
    """An engine in scaled real time: one timer, set for the next moment at which the engine has something to do."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._speed = config.speed
        self._start = self._loop.time()
        self._unix_start = time.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._stopped = False
        self._watched: dict[Sequence, tuple[int, Callable[[], None]]] = {}
        self._look: asyncio.TimerHandle | None = None
        kind = StepEngine if config.latency_mean_seconds is None else LatencyEngine
        self._engine: Engine = kind(config, self._now)

    def submit(self, sequence: Sequence) -> None:
        self._engine.submit(sequence)
        self._set_timer()

    def watch(self, sequence: Sequence, on_tokens: Callable[[], None]) -> None:
        """Call `on_tokens` whenever a sequence has more tokens than before, until it ends.

        Steps that are shorter than what a timer can do, or that fell due while the loop was busy, make one call.
        """
        self._watched[sequence] = (0, on_tokens)
        self._tell_watchers()

    def tokens(self, sequence: Sequence) -> int:
        """How many tokens a sequence has by now, or had at its end."""
        return sequence.generated_tokens if sequence.end is not None else self._engine.generated(sequence)

    def abort(self, rid_prefix: str) -> None:
        self._engine.abort(rid_prefix)
        self._set_timer()

    def abort_at_next_poll(self, sequence: Sequence) -> None:
        """Abort a sequence whose caller has left when the real server would notice: it asks every 4 s."""
        since = self._now() - sequence.arrived_at
        self.abort_after(sequence, POLL_SECONDS - since % POLL_SECONDS)

    def abort_after(self, sequence: Sequence, seconds: float) -> None:
        """Abort a sequence so many simulated seconds from now, if it has not ended by then."""
        self._loop.call_later(seconds / self._speed, self._abort_left, sequence)

    def load(self) -> Load:
        load = self._engine.load()
        self._set_timer()
        return replace(load, tokens_per_second=load.tokens_per_second * self._speed)

    def hold(self, reason: str, *, retract: bool = False) -> None:
        self._engine.hold(reason, retract=retract)
        self._set_timer()

    def release(self, reason: str) -> None:
        self._engine.release(reason)
        self._set_timer()

    def slow_down(self, seconds: float) -> None:
        self._engine.extra_step_seconds = seconds

    def flush(self) -> bool:
        return self._engine.flush()

    def ends_in_this_step(self, rid_prefix: str) -> bool:
        """True if a sequence whose rid begins so is in its last step, if there are steps."""
        return isinstance(self._engine, StepEngine) and self._engine.ends_in_this_step(rid_prefix)

    def unix(self, simulated: float) -> float:
        """A moment of the simulated clock in Unix time."""
        return self._unix_start + simulated / self._speed

    def stop(self) -> None:
        """Stand still for ever."""
        self._stopped = True
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()

    def _now(self) -> float:
        return (self._loop.time() - self._start) * self._speed

    def _abort_left(self, sequence: Sequence) -> None:
        if sequence.end is None and not self._stopped:
            self.abort(sequence.rid)

    def _tell_watchers(self) -> None:
        for sequence, (known, on_tokens) in list(self._watched.items()):
            if sequence.end is not None:
                del self._watched[sequence]
            elif (tokens := self._engine.generated(sequence)) > known:
                self._watched[sequence] = (tokens, on_tokens)
                on_tokens()
        if self._watched and not isinstance(self._engine, StepEngine) and self._look is None and not self._stopped:
            self._look = self._loop.call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._tell_watchers()

    def _set_timer(self) -> None:
        if self._watched:
            self._tell_watchers()
        due = self._engine.due()
        if due == self._due or self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due is None else self._loop.call_at(self._start + due / self._speed, self._tick)

    def _tick(self) -> None:
        self._due = None
        self._engine.advance()
        self._set_timer()
