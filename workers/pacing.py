"""How fast each dataset goes, and what follows: what may wait in Redis, what a message carries, what a worker holds."""

from dataclasses import dataclass

from common.ledger import DatasetState

# What may wait in Redis: two rounds of the slots and some seconds of the measured rate, within these bounds.
_MIN_WINDOW, _MAX_WINDOW = 64, 5_000
_WINDOW_SECONDS = 4.0
# Prompts are long or short; this much of them may wait, of each dataset (5,000 prompts of 4,000 ids would be 50 MB).
_WINDOW_BYTES = 24_000_000
_RATE_WEIGHT = 0.3  # of the newest second, in the running rates
# A message holds what a worker with all its slots full answers in so many seconds: 1 sample where answers take
# minutes, 32 where 128 slots answer 640 a second. An answer costs a worker 1.6 ms of CPU with 1 sample a message, 0.40
# with 16 and 0.32 with 32.
_MESSAGE_SECONDS = 0.05
_MAX_PER_MESSAGE = 32
# Messages that a worker holds unclaimed: one for so many slots, within bounds. Others may start what it has no slot
# for, so it holds few. Two are too few for fast servers: 32 samples last 13 ms at 2,500 answers/s, and on busy cores or
# with a distant Redis the way from one message to the next takes longer.
_SLOTS_A_MESSAGE = 32
_FEWEST_HELD, _MOST_HELD = 2, 8


@dataclass(slots=True)
class Pace:
    """Running rates of a dataset, per second, and the running mean of its samples in flight."""

    at_ms: int
    done: int
    tokens: int
    answers_per_second: float = 0.0
    tokens_per_second: float = 0.0
    in_flight: float = 0.0

    @classmethod
    def of(cls, state: DatasetState) -> "Pace":
        """The pace of a dataset that is seen for the first time."""
        return cls(state.now_ms, state.done, state.completion_tokens)

    def measure(self, state: DatasetState) -> None:
        """Go on to what is seen now."""
        seconds = (state.now_ms - self.at_ms) / 1000
        if seconds > 0:  # it is less where Redis's clock was set back
            self._go_on(state, seconds)
        if seconds:
            self.at_ms, self.done, self.tokens = state.now_ms, state.done, state.completion_tokens

    def _go_on(self, state: DatasetState, seconds: float) -> None:
        self.answers_per_second = _towards(self.answers_per_second, (state.done - self.done) / seconds)
        self.tokens_per_second = _towards(self.tokens_per_second, (state.completion_tokens - self.tokens) / seconds)
        self.in_flight += _RATE_WEIGHT * (state.in_flight - self.in_flight)

    def window(self, slots: int, state: DatasetState, given: int | None) -> int:
        """How many samples may wait in Redis; `given` is what the configuration says."""
        wanted = 2 * slots + round(self.answers_per_second * _WINDOW_SECONDS)
        window = given or max(_MIN_WINDOW, min(_MAX_WINDOW, wanted))
        fits = _WINDOW_BYTES * state.fed // state.fed_bytes if state.fed_bytes else window
        return max(1, min(window, fits))

    def per_message(self, slots: int, workers: int) -> int:
        """One sample a message where answers take minutes, up to a quarter of a worker's slots where milliseconds.

        By the rate that full slots would have, from what an answer takes now (Little's law: in flight / rate). The
        rate itself would not do: small messages make a fast server look slow, and slow rates make small messages.
        """
        if not workers:
            return 1
        slots_full = self.answers_per_second * slots / max(1.0, min(self.in_flight, slots))
        by_rate = round(slots_full / workers * _MESSAGE_SECONDS)
        return max(1, min(_MAX_PER_MESSAGE, slots // workers // 4, by_rate))


def messages_held(slots: int) -> int:
    """How many unclaimed messages a worker of so many slots holds."""
    return max(_FEWEST_HELD, min(_MOST_HELD, slots // _SLOTS_A_MESSAGE))


def _towards(rate: float, seen: float) -> float:
    """A rate never falls below 0: a ledger that was built anew counts from another number."""
    return rate + _RATE_WEIGHT * (max(0.0, seen) - rate)
