"""What a run is doing: one read model for `status`, `run` and `demo`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from common.ledger import OPEN_STATES, SILENT_MS, DatasetState, Ledger
from producer.datasets.rows import REASONS
from producer.display import duration

SILENT_SECONDS = SILENT_MS / 1000
# The states of a server (workers/sglang/servers.py).
_BEST_FIRST = ("up", "draining", "half_open", "checking", "down", "unfit")
_AWAY = {"half_open": "on trial, after it was down", "down": "down", "unfit": "unfit for this run"}


def snapshot(ledger: Ledger) -> dict[str, Any]:
    """Datasets, workers, servers and totals, in the form that `status --json` promises (DESIGN section 9)."""
    states = [ledger.snapshot(name) for name in ledger.datasets()]
    now_ms = ledger.now_ms()
    workers, servers, troubles = _processes(ledger, now_ms)
    datasets = [_dataset(state) for state in states]
    return {
        "datasets": datasets,
        "workers": workers,
        "servers": servers,
        "totals": _totals(datasets, workers) | {"failed_attempts": ledger.failed_attempts()},
        "troubles": troubles + _server_troubles(servers, now_ms / 1000, at_work=_at_work(workers)),
    }


def _dataset(state: DatasetState) -> dict[str, Any]:
    return {
        "name": state.name,
        "state": state.state,
        "reason": state.reason,
        "cap_tokens": state.cap_tokens,
        "count": state.count,
        "spent_tokens": state.spent_tokens,
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "done": state.done,
        "failed": sum(n for reason, n in state.rejects.items() if reason not in REASONS),
        "rejected": state.rejected,
        "rejects": dict(state.rejects),
        "queued": state.queued,
        "in_flight": state.in_flight,
        "mean_tokens": round(state.completion_tokens / state.done, 1) if state.done else 0.0,
        "p50_tokens": state.percentile(0.5),
        "p95_tokens": state.percentile(0.95),
        "max_tokens": state.max_tokens,
        "truncated": state.flags.get("truncated", 0),
        "flags": dict(state.flags),
        "expired_leases": state.expired,
        "tokens_per_second": state.tokens_per_second if state.state in OPEN_STATES else 0.0,
        "eta_seconds": _eta_seconds(state),
    }


def _eta_seconds(state: DatasetState) -> int | None:
    """Until the cap at the present rate; None without a cap, and where nothing comes."""
    if not state.cap_tokens or not state.completion_tokens or state.state not in OPEN_STATES:
        return None
    # The rate is of completion tokens; a cap on all tokens is neared faster, by the prompts that come with them.
    rate = state.tokens_per_second * state.spent_tokens / state.completion_tokens
    return round(max(0, state.cap_tokens - state.spent_tokens) / rate) if rate > 0 else None


def _processes(ledger: Ledger, now_ms: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The workers, the servers as the workers see them, and what any process says is wrong."""
    workers: list[dict[str, Any]] = []
    servers: dict[str, dict[str, Any]] = {}
    troubles: list[str] = []
    for name, (seen_ms, facts) in sorted(ledger.processes().items()):
        if facts.get("kind") != "worker":
            continue
        silent = max(0.0, (now_ms - seen_ms) / 1000)
        own = {key: value for key, value in facts.items() if key not in {"kind", "servers"}}
        workers.append({"name": name, **own, "seen_seconds_ago": round(silent, 1)})
        if silent > SILENT_SECONDS:
            troubles.append(f"{name} was last heard of {silent:.0f} s ago")
            continue
        if facts.get("trouble"):
            troubles.append(f"{name}: {facts['trouble']}")
        for server in facts.get("servers", []):
            _merge(servers, server)
    return workers, list(servers.values()), troubles


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
    if _BEST_FIRST.index(seen["state"]) < _BEST_FIRST.index(known["state"]):
        known["state"], known["since"], known["reason"] = seen["state"], seen["since"], seen["reason"]


def _totals(datasets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> dict[str, Any]:
    summed = ("spent_tokens", "done", "failed", "rejected", "queued", "in_flight", "truncated", "tokens_per_second")
    totals: dict[str, Any] = {key: sum(dataset[key] for dataset in datasets) for key in summed}
    live = (worker for worker in workers if worker["seen_seconds_ago"] <= SILENT_SECONDS)
    totals["limit"] = sum(worker.get("limit", 0) for worker in live)
    etas = [dataset["eta_seconds"] for dataset in datasets if dataset["eta_seconds"] is not None]
    totals["eta_seconds"] = max(etas) if etas else None
    return totals
