"""How long answers get, learned from those that ended and those in flight, and what the latter will charge.

Every attempt has a clock, an estimate in tokens of how far its decoding is. Attempts that ended with a verdict are
events at the clock they ended at; attempts in flight, and lost ones, are censored at their clock. Both must be told by
the same clock: exact lengths beside estimated clocks let fast requests end "beyond" every running one, and the estimate
of the long answers collapses (seen: 16 % over a cap of 1 M tokens, against 0.2 %).

The estimator is the product limit (Kaplan & Meier, JASA 53, 1958, 457) on a histogram, where half of a bucket's
censored count as at risk (Cutler & Ederer, J. Chronic Dis. 8, 1958, 699), with a prior of some pseudo-answers (Susarla
& Van Ryzin, JASA 71, 1976, 897; Hjort, Ann. Statist. 18, 1990, 1259). Its own error is Greenwood's (The natural
duration of cancer, 1926), carried to the mean by the delta method.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Bucket 0 is [0, M/640), then 79 of equal width in log up to 4 M, then what lies beyond: 16 and 40,960 tokens for
# M = 10,240. The last edge leaves room for a clock that runs four times too fast.
_EDGES = 80
_FIRST, _LAST = 1 / 640, 4.0
BUCKETS = _EDGES + 1
_STEP = math.log(_LAST / _FIRST) / (_EDGES - 1)
# Below this share of survivors nothing is known of those that are left.
_NONE_LEFT = 1e-9


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed before the first answer: a lognormal length, clipped at M. Arrays by bucket.

    ended: share that ends in the bucket; alive: share that reaches it; tokens and squares: of those that end there, the
    sums of tokens and squared tokens per answer of the whole.
    """

    ended: Floats
    alive: Floats
    tokens: Floats
    squares: Floats


@functools.lru_cache(maxsize=64)
def prior(mean_tokens: float, cv: float, max_new_tokens: int) -> Prior:
    """The lognormal of this mean and coefficient of variation (before the clip at `max_new_tokens`), by bucket."""
    sigma2 = math.log1p(cv * cv)
    sigma, m = math.sqrt(sigma2), math.log(mean_tokens) - sigma2 / 2
    edges = [0.0, *(max_new_tokens * _FIRST * math.exp(_STEP * i) for i in range(_EDGES)), math.inf]

    def below(power: int) -> Floats:
        """E[X^power; X <= edge] with X clipped: what lies at or above M sits at M."""
        scale = math.exp(power * m + power * power * sigma2 / 2)
        values = []
        for edge in edges:
            x = min(edge, max_new_tokens)
            z = (math.log(x) - m - power * sigma2) / sigma if x > 0 else -math.inf
            values.append(scale * _normal(z))
            if edge > max_new_tokens:
                values[-1] += max_new_tokens**power * _normal((m - math.log(max_new_tokens)) / sigma)
        return np.array(values)

    reached = below(0)
    return Prior(np.diff(reached), 1 - reached[:-1], np.diff(below(1)), np.diff(below(2)))


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Left:
    """What answers with these clocks are expected to charge in the end. Arrays by attempt, in the order given.

    tokens, variance: of the final charge; influence: 1/S(clock), by how much an error of the estimate weighs on it.
    """

    bucket: NDArray[np.intp]
    tokens: Floats
    variance: Floats
    influence: Floats


@dataclass(frozen=True, slots=True)
class Lengths:
    """The estimate, by bucket.

    error: variance of the share that ends in the bucket, carried to the mean of all. With one more at the end: alive,
    the share that reaches the bucket; tokens and squares, what those that end in it or later charge, per answer of all.
    """

    max_new_tokens: int
    alive: Floats
    tokens: Floats
    squares: Floats
    error: Floats

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens[0])

    @property
    def variance(self) -> float:
        return max(0.0, float(self.squares[0]) - self.mean_tokens**2)

    def left(self, clock: Floats) -> Left:
        """The expectation for each attempt in flight, given that it has not ended by its clock (in tokens).

        Within a bucket the events are spread evenly. Where no answer has lasted so long, the longest is expected.
        """
        bucket = bucket_of(clock, self.max_new_tokens)
        first = self.max_new_tokens * _FIRST
        lower = np.where(bucket == 0, 0.0, first * np.exp(_STEP * (bucket - 1.0)))
        behind: Floats = np.clip((clock - lower) / (first * np.exp(_STEP * bucket) - lower), 0.0, 1.0)
        behind[bucket == BUCKETS - 1] = 0.0  # the last has no end

        def reached(suffix: Floats) -> Floats:
            after: Floats = suffix[bucket + 1]
            return after + (1 - behind) * (suffix[bucket] - after)

        alive = reached(self.alive)
        known = alive > _NONE_LEFT
        influence = np.where(known, 1 / np.where(known, alive, 1.0), 0.0)
        tokens = np.where(known, reached(self.tokens) * influence, float(self.max_new_tokens))
        variance = np.where(known, np.maximum(0.0, reached(self.squares) * influence - tokens**2), 0.0)
        return Left(bucket, tokens, variance, influence)


def bucket_of(clock: Floats, max_new_tokens: int) -> NDArray[np.intp]:
    """The bucket of each clock."""
    with np.errstate(divide="ignore"):
        place = np.log(np.maximum(clock, 0.0) / (max_new_tokens * _FIRST)) / _STEP
    bucket: NDArray[np.intp] = np.clip(np.floor(place) + 1, 0, BUCKETS - 1).astype(np.intp)
    return bucket


def estimate(clock: Floats, tokens: Floats, weight: Floats, known: Prior, kappa: float, max_new_tokens: int) -> Lengths:
    """The lengths of answers from attempts of the three arrays' length, each with its weight.

    tokens < 0 marks a censored attempt: in flight, or lost at its clock. With d and m the weights of events and
    censored ones in a bucket, and f0, S0 of the prior:

        r_b = sum_{j>=b} (d_j + m_j) - m_b / 2 + kappa S0_b,   q_b = (d_b + kappa f0_b) / r_b,   S_{b+1} = S_b (1 - q_b)

    The last bucket ends all that reach it, at `max_new_tokens` unless events there say otherwise: without that what is
    left of S would count as answers of no tokens.
    """
    bucket = bucket_of(clock, max_new_tokens)
    event = tokens >= 0
    weighted = np.where(event, weight, 0.0)
    # A censored attempt that has not begun to decode has shown nothing: it is at risk nowhere.
    censored = np.where(event | (clock <= 0), 0.0, weight)

    def by_bucket(weights: Floats) -> Floats:
        return np.bincount(bucket, weights, minlength=BUCKETS).astype(np.float64)

    d, m = by_bucket(weighted), by_bucket(censored)
    ends = d + kappa * known.ended
    at_risk = np.maximum(_from_here_on(d + m)[:-1] - m / 2 + kappa * known.alive, ends)
    q = np.divide(ends, at_risk, out=np.zeros(BUCKETS), where=at_risk > 0)
    q[-1] = 1.0
    alive = np.concatenate(([1.0], np.cumprod(1 - q)))
    f = alive[:-1] * q

    def mean_by_bucket(sums: Floats, otherwise: float) -> Floats:
        means: Floats = np.divide(sums, ends, out=np.zeros(BUCKETS), where=ends > 0)
        if ends[-1] <= 0:
            means[-1] = otherwise
        return means

    y = mean_by_bucket(by_bucket(weighted * tokens) + kappa * known.tokens, max_new_tokens)
    y2 = mean_by_bucket(by_bucket(weighted * tokens**2) + kappa * known.squares, max_new_tokens**2)
    after, squares = _from_here_on(f * y), _from_here_on(f * y2)
    # Of q: q (1 - q) / r. Of the mean by q: -S_b (E_{b+1} - y_b), which is (A_{b+1} - y_b S_{b+1}) / (1 - q_b).
    spread = np.divide(q, (1 - q) * at_risk, out=np.zeros(BUCKETS), where=(q < 1) & (at_risk > 0))
    return Lengths(max_new_tokens, alive, after, squares, spread * (after[1:] - y * alive[1:]) ** 2)


def _from_here_on(values: Floats) -> Floats:
    """Suffix sums, with the 0 that follows the last."""
    sums: Floats = np.append(np.cumsum(values[::-1])[::-1], 0.0)
    return sums
