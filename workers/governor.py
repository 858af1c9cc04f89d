"""How many calls a worker keeps in flight at one server: enough that a few always wait there, and never many.

Too few in flight cost throughput in proportion. Too many cost none by themselves, until the stay in the queue reaches a
timeout: then work is thrown away and done again, and nothing is left of the throughput. So the queue is what is steered
by, not throughput (flat above the best), KV use or retractions (10 to 25 % lost); docs/governor.md has the figures.

Each pair of worker and server has a governor of its own, and they share nothing: each takes that part of a correction
that it has of the requests at the server, so 1 worker and 16 react alike, and each adds the same small constant, which
makes their shares equal in time. It is an integral controller that does not wind up: it grows only while its limit is
what holds calls back, and it cuts from the calls that are truly in flight. The longer answers are, the
slower it goes: a limit that follows the queue faster than answers end lets too many in whenever many fit for a moment,
and as these grow the server retracts some. It is pure: no clock, no network.
"""

import math
from dataclasses import dataclass

# Wanted in the queue: this share of those that run, within bounds.
WANTED_SHARE = 0.08
FEWEST_WANTED, MOST_WANTED = 2.0, 16.0
# A small start: 16 workers that began with 15 each took 20 minutes to drain the queue.
FIRST_LIMIT = 3.0
# What of a correction is made at one poll: less by QUICK_TOKENS over the mean of an answer. With half of it whatever
# the length, answers of 3,800 tokens were retracted 38 to 44 times an hour; fixed limits that fill the server had 27.
GAIN = 0.5
QUICK_TOKENS = 200
# Equal for all, whatever their share: without it a newcomer kept 2 of 140 for ever. As slow as the gain, but never more
# than the second: 16 workers with more of it let the queue grow.
EQUALIZER, MOST_EQUALIZER = 0.35, 0.1
# The start ends when something waits at so many polls in a row. At one it may just have come: a start that ended by
# that with 5 in flight was at 138 after two minutes, where another was at 272 after one.
POLLS_TO_FILL = 2
# Figures that show fewer requests than a worker itself has in flight, so often in a row, are of another queue.
WRONG_FIGURES = 5
# So many polls without figures are an accident; from then on the limit is held.
MISSING_FIGURES = 3
STALE_SECONDS = 10.0  # older figures are those of a server that stands still
BLIND_LIMIT = 32.0  # of all workers together, while nothing is known
# What answers say of the KV that a request holds: from so many on, each a little less than the next.
FEWEST_ANSWERS = 30
FADING = 0.998


@dataclass(frozen=True, slots=True)
class Load:
    """What a server says of itself, summed over its data-parallel ranks; None for what it does not say."""

    running: int
    waiting: int
    capacity_tokens: int | None = None  # of the KV pool
    generated_tokens: float | None = None  # a counter that grows while requests decode
    tokens_per_second: float | None = None
    kv_usage: float | None = None  # 0 to 1
    age_seconds: float = 0.0  # by the server's own clock


class Governor:
    """The law. `limit` is at least `least`, at most `most`; a call may be sent while fewer are in flight."""

    def __init__(
        self, *, capacity_tokens: int | None, max_new_tokens: int, least: int = 1, most: int | None = None, phase: float
    ) -> None:
        """`capacity_tokens` is of the whole server, over its ranks, if it is known already.

        `phase`, 0 to below 1, is drawn by the caller: it keeps workers from crossing an integer together.
        """
        self._capacity = capacity_tokens
        self._max_new_tokens = max_new_tokens
        self.set_bounds(least, most)
        self._phase = phase
        self._answers = 0
        self._prompt_tokens = self._completion_tokens = 0.0  # means
        self._tokens = self._token_steps = 0.0  # fading sums: of the answers' tokens, and of KV tokens x decode steps
        self._slow = True  # the start: nothing has been seen to wait yet
        self._seen = False
        self._missing = self._wrong = self._queued = 0
        # Since the last poll: the most in flight, and the answers.
        self._high = self._ended = 0
        self._wanted = self._first()
        self.why = "starting small"

    def set_bounds(self, least: int, most: int | None) -> None:
        """Change the bounds, from now on."""
        if least < 1 or (most is not None and most < least):
            raise ValueError(f"a limit of at least {least} and at most {most} calls makes no sense")
        self._least, self._most = least, most

    @property
    def limit(self) -> int:
        """How many calls this worker may have in flight at this server."""
        limit = max(self._least, math.floor(self._wanted + self._phase))
        return limit if self._most is None else min(limit, self._most)

    # What calls tell

    def started(self, in_flight: int) -> None:
        """A call was sent, and so many are in flight with it.

        The limit binds where calls reach it between two polls, even if some have ended at the very moment of the poll.
        """
        self._high = max(self._high, in_flight)

    def answered(self, prompt_tokens: int, completion_tokens: int) -> None:
        """A good answer came."""
        self._answers += 1
        self._ended += 1
        self._prompt_tokens += (prompt_tokens - self._prompt_tokens) / min(self._answers, 500)
        self._completion_tokens += (completion_tokens - self._completion_tokens) / min(self._answers, 100)
        self._tokens = FADING * self._tokens + completion_tokens
        steps = prompt_tokens * completion_tokens + completion_tokens * completion_tokens / 2
        self._token_steps = FADING * self._token_steps + steps

    def timed_out(self, in_flight: int) -> None:
        """A call was given up for the time that it took."""
        self._wanted = max(1.0, 0.9 * min(self._wanted, in_flight))
        self.why = "cut: a call took too long"

    def refused(self) -> None:
        """Nobody takes connections there: what comes back has an empty queue, and begins small."""
        self._wanted = self._first()
        self._slow = True
        self._missing = self._wrong = self._high = self._queued = 0
        self.why = "starting small: the server is down"

    # What the server tells

    def polled(self, load: Load | None, in_flight: int, workers: int = 1) -> None:
        """The figures of every 2 seconds (None: the server gave none), and how many calls are in flight there now.

        `workers` counts all that send to this server; it matters only while there are no figures.
        """
        high, self._high = max(self._high, in_flight), 0
        ended, self._ended = self._ended, 0
        if load is None:
            self._go_blind(in_flight, workers, "the server tells nothing")
        elif not load.running + load.waiting and ended >= 2 * high > 0:
            self._hurry(high)
        elif self._is_wrong(load, in_flight):
            self._go_blind(in_flight, workers, "the server's figures miss our calls")
        elif load.age_seconds > STALE_SECONDS:
            self.why = f"held: the server's figures are {load.age_seconds:.0f} s old"
        else:
            self._missing = 0
            self._seen = self._seen or load.running > 0
            self._capacity = load.capacity_tokens or self._capacity
            self._steer(load, high)
            self._cap()

    def _is_wrong(self, load: Load, in_flight: int) -> bool:
        shown = load.running + load.waiting
        is_wrong = in_flight > 1.25 * shown + 2 or (in_flight and not shown)
        self._wrong = self._wrong + 1 if is_wrong else 0
        return self._wrong >= WRONG_FIGURES

    def _hurry(self, in_flight: int) -> None:
        """Calls last less than a second: they end before the server's figures can show them, and no queue is long."""
        self._missing = self._wrong = 0
        if in_flight >= self.limit:
            self._wanted = max(1.5 * self._wanted, self._wanted + 0.5)
        self.why = "growing: calls end before the server's figures show them"
        self._cap()

    def _steer(self, load: Load, in_flight: int) -> None:
        running, waiting = load.running, load.waiting
        share = in_flight / max(running + waiting, in_flight, 1)
        wanted = min(max(WANTED_SHARE * running, FEWEST_WANTED), MOST_WANTED)
        missing = wanted - waiting
        pace = QUICK_TOKENS / max(self._completion_tokens, QUICK_TOKENS)
        seen = f"{waiting} waiting, {wanted:.0f} wanted"
        self._queued = self._queued + 1 if waiting and running else 0
        if self._queued >= POLLS_TO_FILL:
            self._slow = False
        if missing <= 0:
            self._wanted = max(1.0, min(self._wanted, in_flight + 0.99) + GAIN * pace * missing * share)
            self.why = f"shrinking: {seen}" if missing else f"steady: {seen}"
        elif in_flight < self.limit:
            self.why = f"enough: {in_flight} in flight, nothing is held back"
        elif self._slow:
            if running and not waiting:
                self._wanted = max(1.5 * self._wanted, self._wanted + 0.5)
            self.why = f"starting: {running} running, {waiting or 'none'} waiting"
        else:
            step = GAIN * pace * missing * share + min(EQUALIZER * pace, MOST_EQUALIZER)
            self._wanted = min(self._wanted + step, in_flight + 1 + wanted)
            self.why = f"growing: {seen}"

    def _cap(self) -> None:
        """What no number of waiting requests, which may be wrong, can make the limit exceed."""
        cap = math.inf
        kv = self._full_pool()
        if kv is not None:
            cap = 2 * kv + 16
        elif self._capacity is not None:
            cap = max(1.0, self._capacity / (self._prompt_tokens + self._max_new_tokens / 8))
        if self._most is not None and self._most < cap:
            cap = float(self._most)
        if self._wanted >= cap:
            self._wanted = cap
            self.why = (
                f"at the maximum of {self._most}" if cap == self._most else "at the cap: more would not fit the KV pool"
            )

    def _go_blind(self, in_flight: int, workers: int, reason: str) -> None:
        """Hold a limit that was found by good figures; else go by the pool and the lengths of answers, or guess."""
        self._missing += 1
        if self._missing < MISSING_FIGURES:
            return
        if self._seen and self._missing == MISSING_FIGURES:
            self._wanted = max(self._wanted, in_flight)  # it may have been cut below what runs, to drain a queue
        kv = self._full_pool()
        if self._seen and not self._slow:
            if kv is not None:
                self._wanted = min(self._wanted, max(1.0, 1.25 * kv / workers))
            self.why = f"held: {reason}"
        elif kv is None:
            aim = max(1.0, BLIND_LIMIT / workers)
            self._wanted = max(self._wanted, aim) if self._seen else aim
            self.why = f"a guess: {reason}"
        else:
            aim = max(1.0, kv / workers)
            step = max(1.0, 0.05 * self._wanted)
            self._wanted += min(max(aim - self._wanted, -step), step)
            self.why = f"by the KV pool and the lengths of answers: {reason}"
        if self._most is not None:
            self._wanted = min(self._wanted, float(self._most))

    # What is known of the pool

    def _first(self) -> float:
        if self._capacity is None:
            return FIRST_LIMIT
        return min(max(self._capacity / (self._prompt_tokens + self._max_new_tokens), 1.0), FIRST_LIMIT)

    def _full_pool(self) -> float | None:
        """How many requests fill the pool, by what each holds of it on average over the steps that it decodes."""
        if self._answers < FEWEST_ANSWERS or self._capacity is None or self._token_steps <= 0:
            return None
        return 0.95 * self._capacity * self._tokens / self._token_steps
