"""What the budget rule is given: a dataset's answers in flight and its last outcomes, as the ledger has them."""

import numpy as np
from numpy.typing import NDArray

from common.ledger import DatasetState, Progress
from common.settings import Settings
from workers.budget import ENDED, IN_FLIGHT, Snapshot

# As packed by common/ledger/_outcomes.py.
_TOLD = np.dtype([("index", ">u4"), ("attempt", ">f8"), ("clock", ">f4"), ("tokens_per_second", ">f4")])
# A worker tells its clocks every second. One that died tells no more, and its answers have stopped.
_GUESSED_SECONDS = 4.0
# What the ledger counts of a dataset's answers is a better guess than half of the maximum, from so many on. It is what
# is left after a recovery, whose outcomes have no clock.
_ENOUGH_ANSWERS = 100


def told(progress: Progress) -> dict[int, tuple[int, float]]:
    """By index, the attempt and the clock (tokens) of each sample that a worker told of; the newest attempt counts."""
    found: dict[int, tuple[int, float]] = {}
    for told_ms, packed in progress.clocks.values():
        rows = np.frombuffer(packed, _TOLD)
        seconds = min(max(0.0, (progress.now_ms - told_ms) / 1000), _GUESSED_SECONDS)
        clocks = rows["clock"] + rows["tokens_per_second"] * seconds
        for index, attempt, clock in zip(
            rows["index"].tolist(), rows["attempt"].tolist(), clocks.tolist(), strict=True
        ):
            if attempt >= found.get(index, (0, 0.0))[0]:
                found[index] = (int(attempt), clock)
    return found


def in_flight(progress: Progress, lease_seconds: float) -> NDArray[np.void]:
    """IN_FLIGHT, one row a lease, in their order.

    One that no worker told of yet was claimed since the last heartbeat, and runs at the speed of the others. To count
    it as one that has not begun makes an answer that is fast against the heartbeat look shorter than it is.
    """
    clocks = told(progress)
    speed = _speed(progress)
    rows = []
    for index, until_ms in progress.leases.items():
        claimed_ms = min(progress.now_ms, until_ms - round(1000 * lease_seconds))
        seconds = min((progress.now_ms - claimed_ms) / 1000, _GUESSED_SECONDS)
        rows.append(clocks.get(index, (claimed_ms, speed * seconds)))
    return np.array(rows, IN_FLIGHT)


def _speed(progress: Progress) -> float:
    """Of the clocks that were told, in tokens per second."""
    speeds = [np.frombuffer(packed, _TOLD)["tokens_per_second"] for _, packed in progress.clocks.values()]
    known = np.concatenate(speeds) if speeds else np.zeros(0)
    return float(np.mean(known)) if len(known) else 0.0


def snapshot(state: DatasetState, progress: Progress, settings: Settings) -> Snapshot:
    """What the rule decides by, of a dataset with a cap."""
    assert state.cap_tokens is not None
    enough = state.done >= _ENOUGH_ANSWERS
    # Rounded: the prior that is made from it is kept for the next ticks.
    charged = state.completion_tokens - state.uncounted_completion_tokens
    mean = float(f"{charged / state.done:.3g}") if enough else state.spec.get("mean_tokens")
    waiting = [tokens for index, tokens in sorted(progress.prompts.items()) if index not in progress.leases]
    return Snapshot(
        cap_tokens=state.cap_tokens,
        spent_tokens=state.spent_tokens,
        max_new_tokens=state.spec.get("max_new_tokens") or settings.sampling.max_new_tokens,
        ended=np.frombuffer(progress.outcomes, ENDED),
        in_flight=in_flight(progress, settings.worker.lease_seconds),
        mean_tokens=mean,
        prompts_in_flight=sum(progress.prompts.get(index, 0) for index in progress.leases),
        next_prompts=waiting,
        lost_in_flight=[progress.lost.get(index, 0.0) for index in progress.leases] if progress.lost else (),
        # What was given back is sent before all else.
        next_lost=[clock for index, clock in sorted(progress.lost.items()) if index not in progress.leases],
    )
