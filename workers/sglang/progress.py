"""How far the answers in flight are, without reading them: a clock that counts tokens instead of seconds.

What a call has decoded is about the difference of the clock between now and the call's start. It stops while the server
stands still and runs as fast as the server does. The budget rule needs one clock for settled answers and for those in
flight: with exact lengths for the one and seconds for the other, fast answers seem to outlive all that run.
"""

from typing import NamedTuple

from workers.governor import STALE_SECONDS, Load

# What one request decodes while nothing is known: a large model with long answers on 8 GPUs.
NOMINAL_TOKENS_PER_SECOND = 17.0
_FEWEST_ANSWERS = 10
_FADING = 0.98
# Between two looks at the server the clock goes on at the last speed, but not for longer: the next look may not come.
_MOST_GUESSED_SECONDS = 4.0


class DecodeClock:
    """The integral of the decode speed of one running request at one server, in tokens.

    From the server's counter of decoded tokens over its running requests; else from its rate over its running
    requests; else the seconds times the speed of our own answers, waiting included, or a nominal one. Between counters
    it runs at the rate and is put right at the next one. It never runs backwards: where it was ahead it stands until
    the truth has caught up. Times are seconds on any one clock that does not jump.
    """

    def __init__(self, now: float, nominal_tokens_per_second: float = NOMINAL_TOKENS_PER_SECOND) -> None:
        self._nominal = nominal_tokens_per_second
        self._answers = 0
        self._answer_tokens = self._answer_seconds = 0.0  # fading sums
        self._at = now
        self._measured = 0.0  # the integral at `_at`; may be behind what was told
        self._told = 0.0
        self._speed = 0.0
        self._counter: _Counter | None = None

    @property
    def tokens(self) -> float:
        """The clock as it was told last; it never falls."""
        return self._told

    @property
    def tokens_per_second(self) -> float:
        """How fast the clock runs now."""
        return self._speed

    def at(self, now: float) -> float:
        """The clock at this moment, after the last look at the server."""
        ahead = self._speed * min(max(now - self._at, 0.0), _MOST_GUESSED_SECONDS)
        self._told = max(self._told, self._measured + ahead)
        return self._told

    def answered(self, completion_tokens: int, seconds: float) -> None:
        """An answer came, so many seconds after its call began: the speed, where the server does not tell it."""
        self._answers += 1
        self._answer_tokens = _FADING * self._answer_tokens + completion_tokens
        self._answer_seconds = _FADING * self._answer_seconds + seconds

    def advance(self, now: float, load: Load | None) -> None:
        """Go on to `now`, at which the server showed `load`; None: it told nothing."""
        seconds = max(now - self._at, 0.0)
        speed = self._speed_of(load)
        self._at = now
        self._measured += seconds * speed
        self._speed = speed
        if load is not None and load.generated_tokens is not None:
            self._count(load.generated_tokens, load.running)
        self._told = max(self._told, self._measured)

    def _speed_of(self, load: Load | None) -> float:
        """Of one running request, in tokens/s, without a counter."""
        if load is None or (load.tokens_per_second is None and load.generated_tokens is None):
            known = self._answers >= _FEWEST_ANSWERS and self._answer_tokens > 0 and self._answer_seconds > 0
            return self._answer_tokens / self._answer_seconds if known else self._nominal
        if load.age_seconds > STALE_SECONDS or not load.running:
            return 0.0
        return self._speed if load.tokens_per_second is None else load.tokens_per_second / load.running

    def _count(self, value: float, running: int) -> None:
        """Put the clock right by the counter; one that fell is that of another life of the server, and begins anew."""
        last = self._counter
        if last is not None and value >= last.value:
            tokens = (value - last.value) / max((running + last.running) / 2, 1.0)
            self._measured = last.measured + tokens
            if self._at > last.at:
                self._speed = tokens / (self._at - last.at)
        self._counter = _Counter(value, running, self._at, self._measured)


class _Counter(NamedTuple):
    """The server's counter as it was last read, and the integral at that moment."""

    value: float
    running: int
    at: float
    measured: float
