"""When a dataset is stopped because of what its answers are like: one pure function of its last answers.

Answers come out of a job in another order than they began: the short ones first, and the long ones, which may be the
truncated ones, last of all. So neither their order nor what is in flight may count for anything: a share is taken over
the newest *starts* of which `window` have ended, each weighted by the product limit as if none were in flight any more
(workers/survival.py; the weights are those of Efron, Proc. 5th Berkeley Symp. 4, 1967, 831), and two stretches of
starts are compared by the log-rank test (Mantel, Cancer Chemother. Rep. 50, 1966, 163), which takes those in flight for
what they are: longer than their clock. docs/quality.md has it in words, with what was measured.

    n_i     those of the stretch whose clock is not below that of i
    w_i     1/n_i prod (1 - 1/n_j) over the ended j with a clock below that of i;    0 for those in flight
    share   sum of w over the flagged / sum of w,    n_eff = (sum w)^2 / sum w^2
    closed  if share - 3 sqrt(share (1 - share) / n_eff) > what is allowed
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.flags import BITS, FLAGS, OF_THE_END
from common.gate_settings import KEPT_ANSWERS, Action, GatesSettings

Floats = NDArray[np.float64]
# As packed by common/ledger/_recent.py; in no order.
RECENT = np.dtype(
    [
        ("settled", ">f8"),
        ("index", ">u4"),
        ("attempt", ">f8"),
        ("tokens", ">u4"),
        ("clock", ">f4"),
        ("flags", ">u4"),
    ]
)

_DEVIATIONS = 3.0
_SHOWN = 3
# Of the newest starts, so many that ended are compared with those before, of which at least so many more ended.
_NEW, _OLD = (30, 60, 120), 100
# Standard deviations at which a change is none by chance. It is looked for every second over some days.
_CHANGED = 6.0
# A change of the share that is cut off, in standard deviations as above, and by at least so much.
_MORE_CUT = 0.3
# Clocks of the old and the new are told alike if what a token is on them differs by no more.
_SAME_CLOCK = 1.25
# Else those in flight are left out, if they are few.
_FEW = 0.1


@dataclass(frozen=True, slots=True)
class Closed:
    """A gate that closes: how the dataset is to be stopped, and why, in one sentence."""

    gate: str  # a flag, or "change"
    action: Action
    why: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers in the order of their starts. `tokens` of those in flight, which have not `ended`, are their clock."""

    index: NDArray[np.int64]
    clock: Floats
    tokens: Floats
    flags: NDArray[np.int64]
    ended: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ended)

    def of(self, chosen: slice | NDArray[np.bool_]) -> "_Answers":
        return _Answers(
            self.index[chosen], self.clock[chosen], self.tokens[chosen], self.flags[chosen], self.ended[chosen]
        )

    def newest(self, ended: int) -> int:
        """The place from which on so many have ended."""
        places = np.flatnonzero(self.ended)
        return int(places[-ended]) if len(places) >= ended else 0


def judge(
    recent: NDArray[np.void], in_flight: NDArray[np.void], gates: GatesSettings, since_ms: int = 0
) -> Closed | None:
    """The gate of a dataset that closes now, or None.

    `recent` are its last answers, of dtype RECENT; `in_flight` of workers.budget.IN_FLIGHT; older ones than those that
    were claimed at `since_ms` (Redis's time) are not looked at. Takes 1 ms with 1,000 answers and 500 in flight.
    """
    answers = _in_order_of_starts(recent, in_flight, since_ms)
    if int(answers.ended.sum()) < gates.at_least:
        return None
    window = answers.of(slice(answers.newest(gates.window), None))
    # Of starts before the oldest answer was settled, the short answers have left the window before the long ones.
    first = float(recent["settled"].min()) if len(recent) >= KEPT_ANSWERS else 0.0
    whole = answers if first <= since_ms else _in_order_of_starts(recent, in_flight, first)
    return next(_flagged(window, gates), None) or _changed(whole, gates)


def _in_order_of_starts(recent: NDArray[np.void], in_flight: NDArray[np.void], since_ms: float) -> _Answers:
    new, flying = recent[recent["attempt"] >= since_ms], in_flight[in_flight["attempt"] >= since_ms]
    attempt = np.concatenate((new["attempt"], flying["attempt"])).astype(np.float64)
    order = np.argsort(attempt, kind="stable")
    none = np.zeros(len(flying))
    return _Answers(
        np.concatenate((new["index"], none)).astype(np.int64)[order],
        np.concatenate((new["clock"], flying["clock"])).astype(np.float64)[order],
        np.concatenate((new["tokens"], flying["clock"])).astype(np.float64)[order],
        np.concatenate((new["flags"], none)).astype(np.int64)[order],
        np.concatenate((np.ones(len(new), bool), np.zeros(len(flying), bool)))[order],
    )


def _weights(answers: _Answers) -> Floats:
    """Of each answer among those that ended, as if none were in flight any more; 0 for those in flight."""
    # At one clock those that end come first.
    order = np.lexsort((~answers.ended, answers.clock))
    ended, at_risk = answers.ended[order], np.arange(len(order), 0, -1, dtype=np.float64)
    alive = np.cumprod(np.where(ended, 1 - 1 / at_risk, 1.0))
    weights = np.empty(len(order))
    weights[order] = np.where(ended, np.concatenate(([1.0], alive[:-1])) / at_risk, 0.0)
    return weights


def _share(weights: Floats, flagged: NDArray[np.bool_]) -> tuple[float, float]:
    """The share that is flagged, and of how many answers that is worth."""
    total, squares = float(weights.sum()), float(weights @ weights)
    return (min(1.0, float(weights @ flagged) / total), total * total / squares) if squares > 0 else (0.0, 0.0)


def _flagged(window: _Answers, gates: GatesSettings) -> Iterator[Closed]:
    """The gates of single flags that close, the flag with the greatest excess first."""
    weights = _weights(window)
    cut = (window.flags & BITS["truncated"]) != 0
    found: list[tuple[float, Closed]] = []
    for flag in FLAGS:
        gate, allowed = gates.gate(flag), gates.share(flag)
        action = gate.action or gates.action
        flagged = (window.flags & BITS[flag]) != 0
        if flag in OF_THE_END:
            flagged &= ~cut
        if allowed >= 1 or action == "none" or not flagged.any():
            continue
        share, worth = _share(weights, flagged)
        if share - _DEVIATIONS * math.sqrt(share * (1 - share) / worth) > allowed:
            samples = _last(window, flagged)
            why = f"{_of_all(window, flagged)} are flagged {flag}, and {allowed:.0%} may be"
            found.append((share - allowed, Closed(flag, action, _sentence(why, samples), samples)))
    yield from (closed for _, closed in sorted(found, key=lambda one: -one[0]))


def _of_all(window: _Answers, flagged: NDArray[np.bool_]) -> str:
    return f"{int(flagged.sum())} of the last {int(window.ended.sum())} answers"


def _last(window: _Answers, chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(window.index[chosen & window.ended][-_SHOWN:].tolist())


def _sentence(why: str, samples: Sequence[int]) -> str:
    return f"{why}; look at samples {', '.join(map(str, samples))}"


# A change


def _changed(answers: _Answers, gates: GatesSettings) -> Closed | None:
    """Whether the newest answers are of another length, or end otherwise, than those before them."""
    action = gates.change.action or gates.action
    if action == "none":
        return None
    total = int(answers.ended.sum())
    for wanted in _NEW:
        if total < wanted + _OLD:
            break
        at = answers.newest(wanted)
        old, new = answers.of(slice(at)), answers.of(slice(at, None))
        why = _difference(old, new, gates.change.factor)
        if why:
            samples = _last(new, new.ended)
            return Closed("change", action, _sentence(why, samples), samples)
    return None


def _difference(old: _Answers, new: _Answers, factor: float) -> str:
    """In what the new answers differ from the old ones; empty if they do not, or if that cannot be told."""
    if not _clocks_agree(old, new):
        if (~new.ended).sum() > _FEW * len(new):
            return ""
        old, new = (_Answers(one.index, one.tokens, one.tokens, one.flags, one.ended) for one in (old, new))
        old, new = old.of(old.ended), new.of(new.ended)
    deviations, rate = _log_rank(old, new)
    before, after = _mean(old), _mean(new)
    if abs(deviations) > _CHANGED and (rate > factor or rate < 1 / factor):
        longer = f"{after:,.0f} tokens" if rate > 1 else f"{after:,.0f} tokens, and those in flight are longer yet,"
        return (
            f"the last {int(new.ended.sum())} answers have a mean of {longer} after {before:,.0f}: another model may "
            "be served, or other rows have come"
        )
    if _is_cut_otherwise(old, new):
        shares = [float(((one.flags & BITS["truncated"]) != 0).sum() / one.ended.sum()) for one in (old, new)]
        return (
            f"of the last {int(new.ended.sum())} answers {shares[1]:.0%} were truncated after {shares[0]:.0%}: "
            "another model may be served, or other rows have come"
        )
    return ""


def _clocks_agree(old: _Answers, new: _Answers) -> bool:
    """Whether the clocks of both were told alike: those of a server that tells nothing are guessed at first."""
    per_token = []
    for one in (old, new):
        told = one.ended & (one.clock > 1)
        if told.sum() < 0.9 * one.ended.sum():
            return False
        per_token.append(float(np.median(one.clock[told] / np.maximum(one.tokens[told], 1))))
    return max(per_token) <= _SAME_CLOCK * min(per_token)


def _log_rank(old: _Answers, new: _Answers) -> tuple[float, float]:
    """By how many standard deviations more of the new answers stop than expected, and how much sooner they do.

    An answer that was cut off had not stopped.
    """
    stopped_old, stopped_new = _stops(old), _stops(new)
    # At each clock at which some stop: how many do, how many are at risk, and how many of these are new.
    times, stops = np.unique(np.concatenate((stopped_old, stopped_new)), return_counts=True)
    new_at_risk = len(new) - np.searchsorted(np.sort(new.clock), times)
    at_risk = new_at_risk + len(old) - np.searchsorted(np.sort(old.clock), times)
    share = new_at_risk / at_risk
    expected = float((stops * share).sum())
    unsure = stops * share * (1 - share) * (at_risk - stops) / np.maximum(at_risk - 1, 1)
    variance = float(unsure.sum())
    seen, all_stopped = len(stopped_new), int(stops.sum())
    if variance <= 0 or all_stopped <= expected:
        return 0.0, 1.0
    rate = (seen / max(expected, 1e-9)) / max((all_stopped - seen) / (all_stopped - expected), 1e-9)
    return (seen - expected) / math.sqrt(variance), rate


def _stops(answers: _Answers) -> Floats:
    """The clocks of those that stopped by themselves."""
    stopped: Floats = answers.clock[answers.ended & ((answers.flags & BITS["truncated"]) == 0)]
    return stopped


def _mean(answers: _Answers) -> float:
    weights = _weights(answers)
    return float(weights @ answers.tokens) / max(float(weights.sum()), 1e-9)


def _is_cut_otherwise(old: _Answers, new: _Answers) -> bool:
    """Whether the share that is cut off differs, whatever becomes of those in flight."""
    (low_before, high_before, worth_before), (low, high, worth) = _cut(old), _cut(new)
    if low > high_before:
        less, more = high_before, low
    elif high < low_before:
        less, more = high, low_before
    else:
        return False
    pooled = (less + more) / 2
    spread = math.sqrt(pooled * (1 - pooled) * (1 / worth_before + 1 / worth))
    return more - less > max(_MORE_CUT, _CHANGED * spread)


def _cut(answers: _Answers) -> tuple[float, float, float]:
    """The least and the greatest share that is cut off, and of how many answers that is worth."""
    weights = _weights(answers)
    total = float(weights.sum())
    share, worth = _share(weights, (answers.flags & BITS["truncated"]) != 0)
    return share * total, share * total + max(0.0, 1 - total), max(1.0, worth)
