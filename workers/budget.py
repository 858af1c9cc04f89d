"""How many samples more a dataset may start: the admission rule, one pure function of a snapshot.

Answers in flight cannot be cut off and only settled ones are charged, so what goes over the cap is decided here. The
rule reserves for each answer in flight what it is expected to charge given how far it is, and on top a margin for the
error of that sum, which shrinks by itself as answers end. docs/budget.md tells it in words, with the measured figures.

With T spent, n in flight, o = n + k - 1 others, the estimate of workers/survival.py (mu, s2: mean and variance of an
answer; E_i, V_i, 1/S_i: of those in flight; v_b: its own error by bucket), W_b = sum of 1/S_i of those in flight in
buckets up to b, and P the known prompts if they count:

    load(k)   = T + P + sum E_i + k mu + P_next(k)
    margin(k) = z sqrt( (o / (o + h))^2 (sum V_i + (k - 1) s2) + sum_b v_b (W_b + k)^2 ),    0 if o = 0
    room      = the largest k with load(k) + margin(k) <= cap + slack (mu + mean prompt)

The last sample cannot be hedged, so it has no margin. The spread of the answers is annealed by o / (o + h), the error
of the estimate is not: else cold starts burst. Older starts count less, by (1 - 1/memory)^(starts since), settled and
in flight alike and by the order of their starts: forgetting by the order of the ends while those in flight all count
would favour long answers (left truncation; Lynden-Bell, MNRAS 155, 1971, 95).
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.survival import Floats, Left, Lengths, estimate, prior

# Stands for "as many as there are"; far above any source, and exact in a Lua number.
NO_LIMIT = 1_000_000_000

# An attempt is known by the time of its claim in ms, a clock is in tokens of estimated progress: `clock` of an ended
# one is its clock when it ended, never its exact length. tokens are the completion tokens that were charged; 0: an
# answer that is not charged (rejected); negative: the attempt was lost, and is censored at its clock.
ENDED = np.dtype([("attempt", ">f8"), ("clock", ">f4"), ("tokens", ">f4")])
IN_FLIGHT = np.dtype([("attempt", ">f8"), ("clock", ">f4")])

# With thousands in flight a memory of 500 starts holds only answers that have just begun, and what is expected of those
# in flight is mostly the prior: with 2,000 in flight 13 % too much, and under 1 % with a memory of four times as many
# starts as there are in flight.
_MEMORY_PER_FLIGHT = 4
# The spread of the prior. Its mean is half the maximum unless configured: a guess too low is the dangerous side (a
# quarter of a maximum of 2,048 was seen to burst caps of 100,000 tokens by 20 %, half of it by 0.4 %).
_PRIOR_CV = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One dataset now. Prompt tokens are given only where they count against the cap.

    spent_tokens: as `count` says. ended: of dtype ENDED in any order, the newest some thousand. in_flight: of dtype
    IN_FLIGHT; a sample that is claimed and not yet started has clock 0. mean_tokens: the configured guess of an
    answer's length. prompts_in_flight: their prompt tokens together. next_prompts: prompt tokens of the samples that
    come next, in order; beyond them their mean is assumed. lost_in_flight and next_lost: the furthest clock of lost
    attempts at the same samples, 0 if there are none, for each of in_flight and for the samples that come next. What
    is in flight at any moment is mostly long, and a prompt with a long answer gets a long one again: taken for new
    samples, 150 that were lost near the end of a cap of 10 M cost 1.7 % of it, against 0.03 %.
    """

    cap_tokens: int
    spent_tokens: int
    max_new_tokens: int
    ended: np.ndarray
    in_flight: np.ndarray
    mean_tokens: float | None = None
    prompts_in_flight: int = 0
    next_prompts: Sequence[int] = ()
    lost_in_flight: Sequence[float] = ()
    next_lost: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """The choices of the rule.

    z: standard deviations of margin. h: the others in flight at which the margin for the spread is half of that.
    tolerance: as a share of the cap, an expected shortfall that is left as it is. slack: of an answer, by which the
    expectation may pass the cap; 1/2 lands nearest. kappa: pseudo-answers of the prior. memory: starts in which the
    weight of an attempt falls to 1/e, or four times as many as are in flight if that is more.
    """

    z: float
    h: float
    tolerance: float
    slack: float = 0.5
    kappa: float = 4.0
    memory: float = 500.0


# Lands on the cap; for a dataset that shares the server with others, whose samples fill the slots meanwhile.
PRECISE = Rule(z=3.0, h=16.0, tolerance=0.0)
# Ends sooner, up to 0.5 % below the cap; for the last dataset, where slots that it leaves stand idle.
FAST = Rule(z=2.0, h=32.0, tolerance=0.005)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rule says of a snapshot.

    room: how many may start now. expected_tokens: what will be spent when all in flight have ended and none starts.
    margin_tokens: what is held back for the error of that, with the room filled (or one started, if there is none).
    mean_tokens: of an answer that starts now. limit_tokens: what the expectation may reach.
    """

    room: int
    expected_tokens: float
    margin_tokens: float
    mean_tokens: float
    limit_tokens: float

    @property
    def over(self) -> bool:
        """What is in flight is expected to pass the limit by itself; only then are samples taken back (hysteresis)."""
        return self.expected_tokens > self.limit_tokens


def admit(snapshot: Snapshot, rule: Rule = PRECISE) -> Verdict:
    """How many samples the dataset may start now.

    Measured on one core: 0.2 ms with 150 in flight and 500 ended, 1.1 ms with 2,000 and 8,192.
    """
    lengths = _learn(snapshot, rule)
    clock = snapshot.in_flight["clock"].astype(np.float64)
    left = lengths.left(np.maximum(clock, snapshot.lost_in_flight) if len(snapshot.lost_in_flight) else clock)
    needed = _Needed(snapshot, rule, lengths, left)
    limit = snapshot.cap_tokens + rule.slack * (lengths.mean_tokens + needed.mean_prompt)
    spent, in_flight = snapshot.spent_tokens, len(snapshot.in_flight)
    if spent >= snapshot.cap_tokens or snapshot.cap_tokens - needed.now < rule.tolerance * snapshot.cap_tokens:
        room = 0
    else:
        most = min(NO_LIMIT, max(0, int((limit - needed.now) / max(lengths.mean_tokens, 1e-6))) + 1)
        room = bisect.bisect_right(range(1, most + 1), limit, key=lambda k: needed.load(k) + needed.margin(k))
        if spent == 0 and in_flight == 0:
            room = max(1, room)
    return Verdict(room, needed.now, needed.margin(max(1, room)), lengths.mean_tokens, limit)


class _Needed:
    """load(k) and margin(k) of the module's formulas; both only grow with k."""

    def __init__(self, snapshot: Snapshot, rule: Rule, lengths: Lengths, left: Left) -> None:
        self._rule, self._mean, self._variance = rule, lengths.mean_tokens, lengths.variance
        self._in_flight = len(left.tokens)
        self._spread = float(left.variance.sum())
        self._prompts = _sums(np.asarray(snapshot.next_prompts, dtype=np.float64))
        self.mean_prompt = float(self._prompts[-1]) / max(1, len(snapshot.next_prompts))
        # What samples that were lost before will charge more than a new one.
        self._longer = _sums(lengths.left(np.asarray(snapshot.next_lost, dtype=np.float64)).tokens - self._mean)
        self.now = snapshot.spent_tokens + snapshot.prompts_in_flight + float(left.tokens.sum())
        # C(k) = sum_b v_b (W_b + k)^2 as a polynomial in k.
        influence = np.cumsum(np.bincount(left.bucket, left.influence, minlength=len(lengths.error)))
        self._c0 = float(lengths.error @ influence**2)
        self._c1 = float(lengths.error @ influence)
        self._c2 = float(lengths.error.sum())

    def load(self, k: int) -> float:
        known, lost = min(k, len(self._prompts) - 1), min(k, len(self._longer) - 1)
        prompts = float(self._prompts[known]) + (k - known) * self.mean_prompt
        return self.now + k * self._mean + float(self._longer[lost]) + prompts

    def margin(self, k: int) -> float:
        others = self._in_flight + k - 1
        if others == 0:
            return 0.0
        annealed = (others / (others + self._rule.h)) ** 2 * (self._spread + (k - 1) * self._variance)
        return self._rule.z * math.sqrt(annealed + self._c0 + 2 * k * self._c1 + k * k * self._c2)


def _sums(values: Floats) -> Floats:
    """Of the first k, for k from 0."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _learn(snapshot: Snapshot, rule: Rule) -> Lengths:
    """The lengths of this dataset's answers, the newest starts weighing most."""
    ended, in_flight = snapshot.ended, snapshot.in_flight
    attempt = np.concatenate((ended["attempt"], in_flight["attempt"])).astype(np.float64)
    clock = np.concatenate((ended["clock"], in_flight["clock"])).astype(np.float64)
    tokens = np.concatenate((ended["tokens"].astype(np.float64), np.full(len(in_flight), -1.0)))
    most = snapshot.max_new_tokens
    memory = max(rule.memory, _MEMORY_PER_FLIGHT * len(in_flight))
    guess = min(float(most), snapshot.mean_tokens or most / 2)
    known = prior(guess, _PRIOR_CV, most)
    weights = _weights(attempt, memory, len(ended) if len(ended) >= memory else len(attempt))
    return estimate(clock, tokens, weights, known, rule.kappa, most)


def _weights(attempt: Floats, memory: float, newest: int) -> Floats:
    """(1 - 1/memory)^(starts since), for the newest starts. Samples that were claimed together started together.

    The ledger keeps so many ended attempts, so of about as many starts all are known. Of older ones the long answers
    are still in flight, while the short ones have been dropped: with 2,000 in flight and 8,192 kept, the mean of short
    answers (900 tokens) was taken to be 33 % longer than it was.
    """
    order = np.argsort(attempt, kind="stable")
    starts = attempt[order]
    last = np.append(starts[1:] > starts[:-1], True)  # of those that started together
    together = np.cumsum(last) - last
    since = len(attempt) - 1 - np.flatnonzero(last)[together]
    weights = np.empty(len(attempt))
    weights[order] = np.where(since < newest, np.exp(since * math.log1p(-1 / memory)), 0.0)
    return weights
