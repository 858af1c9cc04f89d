"""What a run is doing: one read model for `status`, `top`, `run`, `demo`, the metrics and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from common.gate_settings import gate_in
from common.ledger import OPEN_STATES, SILENT_MS, DatasetState, Ledger
from common.processes import is_gone
from producer.at_work import nobody, works
from producer.datasets.rows import REASONS
from producer.monitor.columns import is_over
from producer.monitor.figures import duration
from producer.plan.arithmetic import ends_seconds

SILENT_SECONDS = SILENT_MS / 1000
# The last ones that a snapshot holds; <output>/events.jsonl has all.
_EVENTS = 20
# The states of a server (workers/sglang/servers.py), the best first.
SERVER_STATES = ("up", "draining", "half_open", "checking", "down", "unfit")
_AWAY = {"half_open": "on trial, after it was down", "down": "down", "unfit": "unfit for this run"}


def snapshot(ledger: Ledger, *, events: int = _EVENTS, at_end: bool = False) -> dict[str, Any]:
    """Datasets, workers, servers and totals, in the form that `status --json` promises (DESIGN section 9).

    And, beyond that, when this was (`at`, UTC), what is wrong (`troubles`), and the last `events` that happened.
    Whoever has just ended all processes says so by `at_end`, and is not told that nobody works.
    Raises redis.RedisError.
    """
    seen = ledger.overview(events)
    workers, servers, troubles = _processes(seen.processes, seen.now_ms)
    states = seen.datasets
    if not works(seen.processes, seen.now_ms):  # the rates are those of the last tick of a keeper, whenever that was
        states = [replace(state, tokens_per_second=0.0) for state in states]
    missing = None if at_end or seen.expected else nobody(seen.processes, seen.now_ms)
    if missing and any(state.state in OPEN_STATES for state in states):
        troubles.insert(0, missing)
    etas = etas_seconds(states)
    datasets = [_dataset(state, etas[state.name]) for state in states]
    totals = _totals(datasets, workers) | {"failed_attempts": seen.failed_attempts}
    away = _server_troubles(servers, seen.now_ms / 1000, at_work=_at_work(workers))
    totals["retries"] = sum(seen.failed_attempts.values()) + totals["expired_leases"]
    return {
        "at": datetime.fromtimestamp(seen.now_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datasets": datasets,
        "workers": workers,
        "servers": servers,
        "totals": totals | {"eta_seconds": end_of_all_seconds(states)},
        "troubles": [*troubles, *_over_caps(datasets), *away],
        "events": [msgspec.to_builtins(event) for event in seen.events],
    }


def _dataset(state: DatasetState, eta_seconds: int | None) -> dict[str, Any]:
    return {
        "name": state.name,
        "state": state.state,
        "reason": state.reason,
        "gate": gate_in(state.reason) if state.state in {"halted", "paused"} else None,
        "cap_tokens": state.cap_tokens,
        "count": state.count,
        "weight": state.weight,
        "spent_tokens": state.spent_tokens,
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "cached_tokens": state.cached_tokens,
        "done": state.done,
        "failed": sum(n for reason, n in state.rejects.items() if reason not in REASONS),
        "rejected": state.rejected,
        "rejects": dict(state.rejects),
        "stopped": dict(state.stopped),
        "queued": state.queued,
        "in_flight": state.in_flight,
        "mean_tokens": round(state.completion_tokens / state.done, 1) if state.done else 0.0,
        "p50_tokens": state.percentile(0.5),
        "p95_tokens": state.percentile(0.95),
        "max_tokens": state.max_tokens,
        "truncated": state.flags.get("truncated", 0),
        "no_think_end": state.flags.get("no_think_end", 0),
        "flags": dict(state.flags),
        "uncounted_tokens": state.uncounted_tokens,
        "attempts": state.starts,
        "expired_leases": state.expired,
        "tokens_per_second": state.tokens_per_second if state.state in OPEN_STATES else 0.0,
        "eta_seconds": eta_seconds,
    }


def etas_seconds(states: Sequence[DatasetState]) -> dict[str, int | None]:
    """Until each dataset ends, at its cap or with its source; None where that cannot be told, and where nothing comes.

    The servers give what they give: when one dataset ends, the others share its rate in proportion to theirs.
    """
    rates = {state.name: state.tokens_per_second for state in states if state.state in OPEN_STATES}
    to_come = {state.name: _to_come_tokens(state) for state in states if rates.get(state.name, 0) > 0}
    known = {name: tokens for name, tokens in to_come.items() if tokens is not None}
    ends = ends_seconds(known, rates, sum(rates.values()))
    return {state.name: round(ends[state.name]) if state.name in ends else None for state in states}


def end_of_all_seconds(states: Sequence[DatasetState]) -> int | None:
    """Until all datasets have ended that are open; None where that cannot be told for one of them."""
    opened = [state for state in states if state.state in OPEN_STATES]
    to_come = [tokens for state in opened if (tokens := _to_come_tokens(state)) is not None]
    rate = sum(state.tokens_per_second for state in opened)
    return round(sum(to_come) / rate) if rate > 0 and len(to_come) == len(opened) else None


def _to_come_tokens(state: DatasetState) -> float | None:
    """Completion tokens until the dataset's cap, or until the last of its samples where all of them are known."""
    ends: list[float] = []
    if state.cap_tokens:
        # A cap on all tokens is neared faster than the completion tokens grow, by the prompts that come with them.
        share = state.completion_tokens / state.spent_tokens if state.spent_tokens else 1.0
        ends.append(max(0, state.cap_tokens - state.spent_tokens) * share)
    if state.ended and state.done:
        ends.append((state.queued + state.in_flight) * state.completion_tokens / state.done)
    return min(ends, default=None)


def _processes(
    processes: Mapping[str, tuple[int, dict[str, Any]]], now_ms: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The workers, the servers as the workers see them, and what any process says is wrong."""
    workers: list[dict[str, Any]] = []
    servers: dict[str, dict[str, Any]] = {}
    troubles: list[str] = []
    for name, (seen_ms, facts) in sorted(processes.items()):
        if facts.get("kind") != "worker":
            continue
        silent = max(0.0, (now_ms - seen_ms) / 1000)
        own = {key: value for key, value in facts.items() if key not in {"kind", "servers", "began"}}
        state = state_of(facts, silent)
        own |= {"in_flight": 0} if state == "dead" else {}
        workers.append({"name": name, **own, "state": state, "seen_seconds_ago": round(silent, 1)})
        if silent > SILENT_SECONDS:
            gone = "; its process is gone" if state == "dead" else ""
            troubles.append(f"{name} was last heard of {silent:.0f} s ago{gone}")
            continue
        if facts.get("trouble"):
            troubles.append(f"{name}: {facts['trouble']}")
        for server in facts.get("servers", []):
            _merge(servers, server)
    return workers, list(servers.values()), troubles


def state_of(facts: Mapping[str, Any], silent_seconds: float) -> str:
    """A worker's state: its own word, or silent (not heard of for 10 s), or dead (and its process, here, is gone)."""
    if silent_seconds <= SILENT_SECONDS:
        return str(facts.get("state", "working"))
    return "dead" if is_gone(facts) else "silent"


def _over_caps(datasets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Datasets that still run, and have spent more than they may: nobody wants to see that days later."""
    return [
        f"{d['name']} is at {d['spent_tokens']:,} tokens, {d['spent_tokens'] / d['cap_tokens'] - 1:.0%} over its cap"
        for d in datasets
        if d["state"] in OPEN_STATES and is_over(d)
    ]


def _at_work(workers: Sequence[Mapping[str, Any]]) -> bool:
    return any(worker["seen_seconds_ago"] <= SILENT_SECONDS for worker in workers)


def _server_troubles(servers: Sequence[Mapping[str, Any]], now: float, *, at_work: bool) -> list[str]:
    """What is wrong with servers, and since when; `now` in seconds since the epoch, `at_work` if a worker lives."""
    if at_work and all(server["state"] == "draining" for server in servers):
        return ["every server of this job is drained; take one again with `tokenmill servers add URL`"]
    away = [server for server in servers if server["state"] in _AWAY]
    troubles = [f"{s['url']} is {_AWAY[s['state']]} {_since(s['since'], now)}: {s['reason']}" for s in away]
    if away and len(away) == len(servers):
        since = max(server["since"] for server in away)
        troubles.insert(0, f"no server can be used {_since(since, now)}; the workers wait, and no sample loses a try")
    return troubles


def _since(then: float, now: float) -> str:
    moment = datetime.fromtimestamp(then).astimezone()
    return f"since {moment:%Y-%m-%d %H:%M:%S} ({duration(max(0.0, now - then))})"


def _merge(servers: dict[str, dict[str, Any]], seen: dict[str, Any]) -> None:
    """A server is as well as the worker finds it that finds it best; the limits of the workers there add up."""
    known = servers.setdefault(seen["url"], {**seen, "in_flight": 0, "answers": 0, "limit": None})
    if seen.get("limit") is not None:
        known["limit"] = (known["limit"] or 0) + seen["limit"]
    for figure in ("running", "waiting", "kv_usage", "tokens_per_second", "why"):
        if known.get(figure) is None:
            known[figure] = seen.get(figure)
    known["in_flight"] += seen["in_flight"]
    known["answers"] += seen.get("answers", 0)
    known["version"] = known.get("version") or seen.get("version")
    if SERVER_STATES.index(seen["state"]) < SERVER_STATES.index(known["state"]):
        known["state"], known["since"], known["reason"] = seen["state"], seen["since"], seen["reason"]


def _totals(datasets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> dict[str, Any]:
    summed = ("spent_tokens", "done", "failed", "rejected", "queued", "in_flight", "truncated", "no_think_end")
    totals: dict[str, Any] = {
        key: sum(dataset[key] for dataset in datasets) for key in (*summed, "expired_leases", "tokens_per_second")
    }
    caps = [dataset["cap_tokens"] for dataset in datasets]
    totals["cap_tokens"] = sum(caps) if caps and None not in caps else None
    live = (worker for worker in workers if worker["seen_seconds_ago"] <= SILENT_SECONDS)
    totals["limit"] = sum(worker.get("limit", 0) for worker in live)
    return totals
