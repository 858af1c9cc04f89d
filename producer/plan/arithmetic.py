"""What a job takes: samples, tokens, hours, bytes. Pure: nothing is read here, no clock is asked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a dataset, or taken for granted. Tokens and bytes are means of one sample.

    left: samples that can still be answered. charged_tokens: of `completion_tokens`, those that count against the cap
    (answers with some flags do not, if the configuration says so). spent_tokens: what counts already.
    """

    name: str
    left: int
    prompt_tokens: float
    completion_tokens: float
    charged_tokens: float
    record_bytes: float
    cap_tokens: int | None = None
    count: Literal["completion", "total"] = "completion"
    spent_tokens: int = 0
    weight: float = 1.0


class Planned(msgspec.Struct, frozen=True):
    """What a dataset takes from now on. Tokens are of all samples; None: no rate is known, or no cap is there.

    ends: what it stops at. spent_tokens: what will count against the cap then, with what counts already.
    hours: if it had the servers alone. done_hours: when it is done while the others have their shares.
    uncapped_samples, uncapped_tokens: completions of all that is left of the source. saved_hours: by the cap.
    """

    name: str
    ends: Literal["cap", "source"]
    samples: int
    prompt_tokens: int
    completion_tokens: int
    spent_tokens: int
    uncapped_samples: int
    uncapped_tokens: int
    disk_bytes: int
    hours: float | None = None
    done_hours: float | None = None
    saved_hours: float | None = None


class Totals(msgspec.Struct, frozen=True):
    """All datasets together."""

    samples: int
    prompt_tokens: int
    completion_tokens: int
    uncapped_tokens: int
    disk_bytes: int
    hours: float | None
    saved_hours: float | None


class Limit(msgspec.Struct, frozen=True):
    """How many requests run at once on all servers, and what holds them to that; None: the servers do not say.

    kv: as many as the KV pools hold, each of `mean_tokens` (prompt and whole answer). running: the running limits.
    asked: [worker] concurrency of all workers.
    """

    by: Literal["kv", "running", "concurrency", "unknown"]
    mean_tokens: float
    kv: int | None
    running: int | None
    asked: int


def plan(datasets: Sequence[Known], tokens_per_second: float | None) -> tuple[list[Planned], Totals]:
    """What `datasets` take, at so many completion tokens a second on all servers together (None: not known).

    A dataset ends with the first sample that reaches its cap, or with its source. The servers' rate does not depend on
    who uses it, so the whole job takes all tokens / rate, whatever the weights are.
    """
    planned = [_planned(one, tokens_per_second) for one in datasets]
    if tokens_per_second:
        tokens = {one.name: float(one.completion_tokens) for one in planned}
        ends = ends_seconds(tokens, {one.name: one.weight for one in datasets}, tokens_per_second)
        planned = [msgspec.structs.replace(one, done_hours=ends[one.name] / 3600) for one in planned]
    saved = [one.saved_hours for one in planned if one.saved_hours is not None]
    completion_tokens = sum(one.completion_tokens for one in planned)
    return planned, Totals(
        samples=sum(one.samples for one in planned),
        prompt_tokens=sum(one.prompt_tokens for one in planned),
        completion_tokens=completion_tokens,
        uncapped_tokens=sum(one.uncapped_tokens for one in planned),
        disk_bytes=sum(one.disk_bytes for one in planned),
        hours=_hours(completion_tokens, tokens_per_second),
        saved_hours=sum(saved) if saved else None,
    )


def _planned(known: Known, tokens_per_second: float | None) -> Planned:
    charged = known.charged_tokens + (known.prompt_tokens if known.count == "total" else 0.0)
    needed = known.left
    if known.cap_tokens is not None and charged > 0:
        needed = math.ceil(max(0, known.cap_tokens - known.spent_tokens) / charged)
    samples = min(needed, known.left)
    tokens, uncapped = round(samples * known.completion_tokens), round(known.left * known.completion_tokens)
    return Planned(
        name=known.name,
        ends="cap" if known.cap_tokens is not None and charged > 0 and needed <= known.left else "source",
        samples=samples,
        prompt_tokens=round(samples * known.prompt_tokens),
        completion_tokens=tokens,
        spent_tokens=known.spent_tokens + round(samples * charged),
        uncapped_samples=known.left,
        uncapped_tokens=uncapped,
        disk_bytes=round(samples * known.record_bytes),
        hours=_hours(tokens, tokens_per_second),
        saved_hours=_hours(uncapped - tokens, tokens_per_second) if known.cap_tokens is not None else None,
    )


def _hours(tokens: float, tokens_per_second: float | None) -> float | None:
    return tokens / tokens_per_second / 3600 if tokens_per_second else None


def ends_seconds(
    tokens: Mapping[str, float], weights: Mapping[str, float], tokens_per_second: float
) -> dict[str, float]:
    """When each dataset has made its `tokens`, while those that are not done share the rate by weight.

    Slots are shared by weight (workers/shares.py), a slot decodes at the same speed whose ever it is, and one that is
    done leaves its slots to the others. So they end in the order of x = tokens/weight, and while x grows by dx time
    grows by dx * (weights of those that still run) / rate. One that has a weight and no `tokens` runs on beside them.
    The credit of the shares, and the last answers of a dataset, which leave slots empty if it is alone, are left out.
    """
    order = sorted((count / weights[name], name) for name, count in tokens.items())
    running = sum(weights.values())
    found: dict[str, float] = {}
    seconds = before = 0.0
    for end, name in order:
        seconds += (end - before) * running / tokens_per_second
        found[name] = seconds
        before, running = end, running - weights[name]
    return found


def limit(
    datasets: Sequence[Known], planned: Sequence[Planned], kv_tokens: int | None, running: int | None, asked: int
) -> Limit:
    """What holds the requests in flight, given what all servers hold together: KV tokens, and requests that run.

    The mean is over those in flight: a dataset counts by the tokens that it decodes, for as long are its slots held.
    A request holds its whole answer only at its end, so a pool takes some more than `kv`; it is full then.
    """
    weight = sum(one.completion_tokens for one in planned)
    lengths = [known.prompt_tokens + known.completion_tokens for known in datasets]
    mean = sum(one.completion_tokens * each for one, each in zip(planned, lengths, strict=True)) / max(1, weight)
    kv = None if kv_tokens is None or mean <= 0 else int(kv_tokens / mean)
    bounds: list[tuple[int, Literal["kv", "running", "concurrency"]]] = [(asked, "concurrency")]
    if running is not None:
        bounds.append((running, "running"))
    if kv is not None:
        bounds.append((kv, "kv"))
    # What is not known may be less than what was asked for.
    by = min(bounds)[1] if len(bounds) == 3 else "unknown"
    return Limit(by, mean, kv, running, asked)
