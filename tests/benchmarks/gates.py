"""How often the gates close on a clean run, and within how many answers they close on a fault, in virtual time.

    nice python -m tests.benchmarks.gates [--seeds 20] [--answers 4000]

Three models: short answers that spread little, reasoning of a middle size, and long reasoning of which a sixth is cut
off. Every job begins empty, fills its slots, and is drained at its end, so that the first answers are the short ones
and the last the long ones. Clocks of those in flight are off by 10 %, and by 30 % for the first answers.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from common.flags import BITS
from common.gate_settings import KEPT_ANSWERS, GatesSettings
from workers.budget import IN_FLIGHT
from workers.gates import RECENT, Closed, judge
from workers.sglang.simulator.answers import Lognormal

EVERY = 5  # answers between two looks; the keeper looks once a second


@dataclass(frozen=True)
class Model:
    """A model as a gate sees it: lengths, and how often its answers have flags by themselves."""

    mean_tokens: float
    cv: float
    max_new_tokens: int
    slots: int
    flags: dict[str, float]


MODELS = {
    "short": Model(300, 0.5, 4096, 48, {"duplicate_answer": 0.05, "tool_call_not_json": 0.05, "copied_prompt": 0.05}),
    "middle": Model(1500, 1.0, 10_240, 150, {"repetition": 0.02, "think_only": 0.01, "control_tokens": 0.02}),
    "long": Model(6000, 1.2, 10_240, 400, {"no_think_end": 0.03, "repetition": 0.03, "unbalanced_tool_calls": 0.08}),
}


def another(factor: float) -> Callable[[Model], Model]:
    return lambda model: replace(model, mean_tokens=model.mean_tokens * factor)


def flagged(flag: str, share: float = 1.0) -> Callable[[Model], Model]:
    return lambda model: replace(model, flags={**model.flags, flag: share})


FAULTS: dict[str, Callable[[Model], Model]] = {
    "no thinking": flagged("no_think"),
    "reasoning missing": flagged("no_think_end"),
    "half of it loops": flagged("repetition", 0.5),
    "cut at 128": lambda model: replace(model, max_new_tokens=128),
    "2.5 times as long": another(2.5),
    "2.5 times as short": another(0.4),
}


def answers(draw: random.Random, model: Model) -> tuple[int, int]:
    """The tokens and flags of an answer."""
    tokens = max(1, round(Lognormal(model.mean_tokens, model.cv).at(min(max(draw.random(), 1e-12), 1 - 1e-12))))
    bits = sum(BITS[flag] for flag, share in model.flags.items() if draw.random() < share)
    if tokens >= model.max_new_tokens:
        return model.max_new_tokens, bits | BITS["truncated"]
    return tokens, bits


def job(seed: int, before: Model, after: Model, change_at: int, total: int) -> Iterator[tuple[int, Closed | None]]:
    """At every look the answers so far of the other model, whose first start is `change_at`, and a gate that closes."""
    draw, gates = random.Random(seed), GatesSettings()
    flying: list[tuple[float, int, float, int, int, float]] = []  # end, index, start, tokens, flags, clock's error
    ring: list[tuple[float, int, float, int, float, int]] = []
    now, started, done, others = 0.0, 0, 0, 0
    while done < total:
        while started < total and len(flying) < before.slots:
            tokens, bits = answers(draw, after if started >= change_at else before)
            error = draw.gauss(1, 0.3 if started < before.slots else 0.1)
            heapq.heappush(flying, (now + tokens, started, now, tokens, bits, max(0.3, error)))
            now += 1e-3
            started += 1
        now, index, start, tokens, bits, error = heapq.heappop(flying)
        ring = [*ring[1 - KEPT_ANSWERS :], (now, index, start, tokens, tokens * error, bits)]
        done += 1
        others += index >= change_at
        if done % EVERY == 0:
            recent = np.array(ring, RECENT)
            in_flight = np.array([(one[2], max(0.0, now - one[2]) * one[5]) for one in flying], IN_FLIGHT)
            yield others, judge(recent, in_flight, gates)


def first(seed: int, before: Model, after: Model, change_at: int, total: int) -> tuple[int, Closed] | None:
    """The first gate that closes, and after how many answers of the other model."""
    return next(((others, closed) for others, closed in job(seed, before, after, change_at, total) if closed), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--answers", type=int, default=4000, help="of each clean run")
    parser.add_argument("--clean", action="store_true", help="only the clean runs")
    asked = parser.parse_args()
    seeds = range(asked.seeds)
    for name, model in MODELS.items():
        alarms = [one for seed in seeds if (one := first(seed, model, model, 0, asked.answers))]
        print(f"{name:8} clean: {len(alarms)} alarms in {asked.seeds} runs of {asked.answers:,} answers", *alarms[:3])
        for fault, change in {}.items() if asked.clean else FAULTS.items():
            # Other lengths are no fault of a job that begins with them.
            for begins, total in ((1200, 2400),) if "times" in fault else ((0, 1000), (1200, 2400)):
                found = [first(seed, model, change(model), begins, total) for seed in seeds]
                caught = [one for one in found if one]
                gates = ", ".join(sorted({closed.gate for _, closed in caught}))
                after = [one for one, _ in caught]
                when = f"{statistics.median(after):5.0f} (worst {max(after)})" if after else "never"
                print(f"{name:8} {fault:20} from {begins:5}: {len(caught)}/{asked.seeds} within {when} by {gates}")


if __name__ == "__main__":
    main()
