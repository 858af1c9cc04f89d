"""A whole job of eight datasets, from the first call to the last answer, beside the least time that the server needs.

The server is the preset kimi-k2.5-8x in virtual time; what decides is what ships (job_parts.py). The eight datasets
have the numbers of prompts of a real project and 10 M tokens of cap each. Their lengths are a guess: lognormal answers
clipped at 10,240, means of 900 to 3,800 before the clip, cv 1 to 1.5; prompts of 500 tokens, of one 1,500 and of one
4,000. Two have too few tokens in all their prompts and end exhausted.

Bounds, in seconds: the tokens that are wanted (the cap, or all that there are), over the server's best rate.
  each alone   the sum over the datasets, each at the best of some fixed limits with its own samples
  mixed        all of them at the rate of the mixed job under the best of some fixed limits, while all datasets run
The smaller one is the bound. The second is no true one here: the slowest dataset has fewer tokens than its fair part,
so the job as a whole goes faster than its mix does while all run. Every call is given up after 1,800 s.

    nice python -m tests.benchmarks.job [--scale 0.1] [--only governed] [--processes 1]
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.governor import server
from tests.benchmarks.job_parts import MAX_NEW_TOKENS, TIMEOUT_SECONDS, Dataset, Job, Kind, Look, Plan
from tests.benchmarks.virtual import Request, Worker, World
from workers.shares import Shares, Standing

KINDS = (
    Kind("B1_glaive", 10_000, 500, 900, 1.5),
    Kind("B2_opencode", 14_714, 500, 2500, 1.2),
    Kind("B3_magicoder", 10_000, 500, 1577, 1.2),
    Kind("B4_thoughts", 10_000, 500, 3800, 1.0),
    Kind("B5_openthoughts", 10_000, 500, 3400, 1.0),
    Kind("B6_ultrachat", 15_000, 500, 1200, 1.2),
    Kind("B7_sharegpt", 10_000, 1500, 1400, 1.5),
    Kind("B8_swe_agent", 3_600, 4000, 2500, 1.2),
)
WARM_SECONDS = 1200.0
SWEEP = (24, 32, 40, 48, 56, 64, 80, 112)
SWEEP_SECONDS = 6 * 3600.0
FILLING = (1.1, 1.4, 2.0)  # limits of one dataset alone: times the requests that fill the pool


class InOrder(Shares):
    """All of the first dataset, then all of the next: what a plain queue of messages does."""

    def choose(self, samples: int, standings: Mapping[str, Standing]) -> list[tuple[str, int]]:
        messages = []
        for name, one in standings.items():
            if one.open and (count := min(samples, one.available)) > 0:
                messages += [(name, 1)] * count
                samples -= count
        return messages


PLANS = {
    "governed, 1 worker": Plan(),
    "governed, 4 workers": Plan(workers=4),
    "governed, landing fast": Plan(landing="fast"),
    "governed, plain stop": Plan(landing="plain stop"),
    "governed, one after the other": Plan(law=InOrder),
    "the same, plain stop": Plan(law=InOrder, landing="plain stop"),
    "fixed, best": Plan(limit=0),
    "fixed 24": Plan(limit=24),
    "fixed 112": Plan(limit=112),
    "fixed 300": Plan(limit=300),
    "fixed 300, after the other, plain": Plan(limit=300, law=InOrder, landing="plain stop"),
}


def wanted_tokens(kinds: Sequence[Kind], seed: int) -> int:
    """What must be made: the cap, or all that the prompts give."""
    return sum(min(kind.cap_tokens, sum(tokens for _, tokens in kind.samples(seed))) for kind in kinds)


# The bounds


def alone(kind: Kind, seed: int) -> tuple[int, float, dict[int, float]]:
    """Tokens wanted of a dataset, its best rate alone in tokens/s, and the rate by fixed limit."""
    samples, cap = [], 0
    for prompt_tokens, tokens in kind.samples(seed):
        if cap >= kind.cap_tokens:
            break
        samples.append((prompt_tokens, tokens))
        cap += tokens
    steps = sum(prompt_tokens * tokens + tokens * tokens / 2 for prompt_tokens, tokens in samples)
    full = server().max_total_tokens * cap / steps
    rates = {round(full * share): _rate_alone(samples, round(full * share), seed) for share in FILLING}
    return min(cap, kind.cap_tokens), max(rates.values()), rates


def _rate_alone(samples: Sequence[tuple[int, int]], limit: int, seed: int) -> float:
    """From the twentieth minute to the start of the last sample."""
    left = iter(samples)
    ends: list[tuple[float, int]] = []
    world = World(server(), seed)

    def source() -> Request | None:
        following = next(left, None)
        if following is None:
            if not ends:
                ends.append((world.now, worker.useful_tokens()))
            return None
        return Request(*following, MAX_NEW_TOKENS)

    worker = Worker(world, source, limit, timeout_seconds=TIMEOUT_SECONDS)
    worker.start()
    world.run(WARM_SECONDS)
    before = worker.useful_tokens()
    while not ends:
        world.run(world.now + 60)
    at, tokens = ends[0]
    return (tokens - before) / (at - WARM_SECONDS)


@dataclass(frozen=True)
class Ran:
    """What came of a job."""

    name: str
    plan: Plan
    seconds: float
    rate: float  # tokens/s, from the twentieth minute until slots are left empty for good
    rows: tuple[
        tuple[str, str, int, int, int, float], ...
    ]  # name, state, cap, tokens, samples, time of the last answer
    shares: tuple[tuple[float, ...], ...]  # of the tokens settled, in % of a fair one; at 1/4, 1/2, 3/4 of the time
    held: tuple[float, ...]  # of the slots, in % of a fair part, while all datasets run
    running: float
    waiting: float
    retractions: float  # an hour
    timeouts: int
    closed: float  # when the first dataset had no room, or no samples
    ramp: float  # seconds lost at the start; below 0: more was made than later, as the pool was empty
    empty: float  # seconds from the last moment at which the slots were full
    ebb: float  # seconds lost in these
    cpu_seconds: float


def ran(name: str, kinds: Sequence[Kind], plan: Plan, seed: int) -> Ran:
    began = time.process_time()
    job = Job(server(), kinds, seed, plan).run()
    sets = list(job.datasets.values())
    end = max(one.ended_at for one in sets) if job.ended else job.world.now
    closed = min((one.closed_at for one in sets if one.closed_at is not None), default=end)
    full = [look for look in job.looks if sum(look.in_flight) >= 0.95 * look.slots]
    steady = [look for look in job.looks if min(WARM_SECONDS, end / 4) <= look.now <= full[-1].now]
    rate = _rate(steady)
    last_hour = [look for look in steady if look.now >= full[-1].now - min(3600, end / 4)]
    empty = end - full[-1].now
    made = job.looks[-1].decoded_tokens - full[-1].decoded_tokens
    running = statistics.fmean(look.running for look in steady)
    return Ran(
        name=name,
        plan=plan,
        seconds=end,
        rate=rate,
        rows=tuple(_row(one) for one in sets),
        shares=tuple(_token_shares(_at(job.looks, end * part / 4)) for part in (1, 2, 3)),
        held=_held_shares([look for look in job.looks if look.now <= max(closed, job.looks[0].now)]),
        running=running,
        waiting=statistics.fmean(look.waiting for look in steady),
        retractions=job.world.retractions / end * 3600,
        timeouts=sum(member.worker.timeouts for member in job.members),
        closed=closed,
        ramp=steady[0].now - steady[0].decoded_tokens / rate,
        empty=empty,
        ebb=empty - made / _rate(last_hour),
        cpu_seconds=time.process_time() - began,
    )


def _rate(looks: Sequence[Look]) -> float:
    return (looks[-1].decoded_tokens - looks[0].decoded_tokens) / (looks[-1].now - looks[0].now)


def _row(one: Dataset) -> tuple[str, str, int, int, int, float]:
    return one.kind.name, one.state, one.kind.cap_tokens, one.spent, one.done, one.ended_at


def _at(looks: Sequence[Look], when: float) -> Look:
    return min(looks, key=lambda look: abs(look.now - when))


def _token_shares(look: Look) -> tuple[float, ...]:
    return tuple(100 * tokens * len(look.tokens) / max(1, sum(look.tokens)) for tokens in look.tokens)


def _held_shares(looks: Sequence[Look]) -> tuple[float, ...]:
    held = [sum(counts) for counts in zip(*(look.in_flight for look in looks), strict=True)]
    return tuple(100 * one * len(held) / max(1, sum(held)) for one in held)


# Printing


def table(one: Ran) -> None:
    """The datasets of one run."""
    print(f"\n{one.name}: {one.seconds / 3600:.2f} h")
    print(
        f"  {'':16}{'tokens':>12}{'miss':>9}{'answers':>9}  {'ends':9}{'at h':>7}"
        "   of a fair part, %: slots; tokens at 1/4, 1/2, 3/4"
    )
    for number, (name, state, cap, tokens, samples, at) in enumerate(one.rows):
        shares = " ".join(f"{shares[number]:6.1f}" for shares in one.shares)
        print(
            f"  {name:16}{tokens:12,}{100 * (tokens / cap - 1):+8.2f} %{samples:9,}  {state:9}{at / 3600:7.2f}"
            f"   {one.held[number]:6.1f}; {shares}"
        )
    ends = [at for *_, at in one.rows]
    print(
        f"  first end to last {max(ends) - min(ends):,.0f} s; the first closes at {one.closed / 3600:.2f} h; "
        f"lost: {one.ramp:.0f} s at the start, {one.ebb:.0f} of the last {one.empty:,.0f} s, in which slots are empty",
        flush=True,
    )


def line(one: Ran, bound: float) -> None:
    """A run in one line."""
    misses = [100 * (tokens / cap - 1) for _, state, cap, tokens, *_ in one.rows if state != "exhausted"]
    spread = f"{min(misses):+.2f} to {max(misses):+.2f}" if misses else "none capped"
    tail = max(at for *_, at in one.rows) - min(at for *_, at in one.rows)
    print(
        f"  {one.name:36}{one.seconds / 3600:7.2f}{100 * (one.seconds / bound - 1):+8.2f}{one.rate:7.0f}"
        f"{one.running:6.0f}{100 * one.waiting / one.running:7.1f}{one.retractions:7.0f}{one.timeouts:7}"
        f"   {spread:18}{tail:7,.0f}{one.ramp:6.0f}{one.empty:7.0f}{one.ebb:6.0f}"
    )


HEAD = (
    f"  {'':36}{'hours':>7}{'over, %':>8}{'tok/s':>7}{'runs':>6}{'waits%':>7}{'retr/h':>7}{'late':>7}"
    f"   {'miss of caps, %':18}{'tail s':>7}{'ramp':>6}{'empty':>7}{'ebb':>6}"
)


Task = tuple[str, Sequence[Kind], Plan, int]


def _run(task: Task) -> Ran:
    return ran(*task)


def _alone(task: tuple[Kind, int]) -> tuple[int, float, dict[int, float]]:
    return alone(*task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of caps and of prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only runs whose name holds this; the bounds are always made")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    scale, seed = arguments.scale, arguments.seed
    kinds = [
        replace(kind, prompts=round(kind.prompts * scale), cap_tokens=round(kind.cap_tokens * scale)) for kind in KINDS
    ]
    with multiprocessing.Pool(arguments.processes) as pool:
        print(f"{'alone':18}{'wanted':>12}{'tok/s':>7}   tokens/s at fixed limits")
        seconds = 0.0
        # Of a dataset scaled down too little is left in the middle: rates are of the whole.
        for kind, (_, rate, rates) in zip(kinds, pool.imap(_alone, [(kind, seed) for kind in KINDS]), strict=True):
            wanted = wanted_tokens([kind], seed)
            seconds += wanted / rate
            cells = "  ".join(f"{limit}: {each:.0f}" for limit, each in rates.items())
            print(f"{kind.name:18}{wanted:12,}{rate:7.0f}   {cells}", flush=True)
        wanted = wanted_tokens(kinds, seed)
        sweep = [Plan(limit=limit, most_seconds=SWEEP_SECONDS) for limit in SWEEP]
        tasks: list[Task] = [(f"{plan.limit}", KINDS, plan, seed) for plan in sweep]
        print("\nmixed, tokens/s at fixed limits over six hours")
        swept = {one.plan.limit or 0: one for one in pool.imap(_run, tasks)}
        for limit, one in swept.items():
            print(f"  {limit:4}: {one.rate:5.0f}   {one.running:4.0f} run, {one.waiting:4.0f} wait")
        most = max(one.rate for one in swept.values())
        best = min(limit for limit, one in swept.items() if one.rate >= 0.999 * most)
        plans = {name: replace(plan, limit=best) if plan.limit == 0 else plan for name, plan in PLANS.items()}
        chosen = [(name, kinds, plan, seed) for name, plan in plans.items() if arguments.only in name]
        bounds = {"each alone": seconds, "mixed": wanted / most}
        bound = min(bounds.values())
        print(f"\n{wanted:,} tokens wanted; bounds: " + ", ".join(f"{n} {s / 3600:.3f} h" for n, s in bounds.items()))
        runs = []
        for one in pool.imap(_run, chosen):
            runs.append(one)
            table(one)
        print("\n" + HEAD)
        for one in runs:
            line(one, bound)
        print(f"\n{sum(one.cpu_seconds for one in [*runs, *swept.values()]):.0f} s of CPU")


if __name__ == "__main__":
    main()
