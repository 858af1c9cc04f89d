"""The engine in real time, scaled by the speed."""

import asyncio
import time
from dataclasses import replace

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import Engine, LatencyEngine, Load, Sequence
from workers.sglang.simulator.scheduler import StepEngine

POLL_SECONDS = 4.0  # how often the real server asks whether the caller of a plain request is still there


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
        kind = StepEngine if config.latency_mean_seconds is None else LatencyEngine
        self._engine: Engine = kind(config, self._now)

    def submit(self, sequence: Sequence) -> None:
        self._engine.submit(sequence)
        self._set_timer()

    def abort(self, rid_prefix: str) -> None:
        self._engine.abort(rid_prefix)
        self._set_timer()

    def abort_at_next_poll(self, sequence: Sequence) -> None:
        """Abort a sequence whose caller has left when the real server would notice: it asks every 4 s."""
        since = self._now() - sequence.arrived_at
        wait = POLL_SECONDS - since % POLL_SECONDS
        self._loop.call_later(wait / self._speed, self._abort_left, sequence)

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
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> float:
        return (self._loop.time() - self._start) * self._speed

    def _abort_left(self, sequence: Sequence) -> None:
        if sequence.end is None and not self._stopped:
            self.abort(sequence.rid)

    def _set_timer(self) -> None:
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
