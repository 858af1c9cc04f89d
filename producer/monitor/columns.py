"""What is shown of datasets, workers, servers and events, in `status` and in `top`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from common.words import counted
from producer.monitor.figures import Look, cut, duration, share, short, sparkline
from producer.monitor.grid import Column, Entry, Line

_STATE_STYLES = {
    "open": "good",
    "closing": "good",
    "capped": "ended",
    "exhausted": "ended",
    "cancelled": "ended",
    "paused": "warn",
}
_SERVER_STYLES = {"up": "good", "draining": "warn", "drained": "warn", "half_open": "warn", "checking": "warn"}
# A cap is landed on within about one answer. More than that and this above it is worth a look.
_OVER = 1.01


def _bad_if_any(key: str) -> Any:
    return lambda entry: "bad" if entry[key] else ""


def _part(dataset: Entry) -> float | None:
    return dataset["spent_tokens"] / dataset["cap_tokens"] if dataset["cap_tokens"] else None


def is_over(dataset: Entry) -> bool:
    """Whether it spent clearly more than its cap."""
    cap = dataset["cap_tokens"]
    return bool(cap and dataset["state"]) and dataset["spent_tokens"] > _OVER * cap + dataset["max_tokens"]


def _of_cap(dataset: Entry) -> str:
    if not dataset["state"] and not dataset["cap_tokens"]:  # the sum of some that have a cap and some that have none
        return ""
    return share(dataset["spent_tokens"], dataset["cap_tokens"]) + ("!" if is_over(dataset) else "")


def _length(key: str) -> Any:
    return lambda entry: f"{entry[key]:,.0f}" if key in entry else ""  # there is none of all datasets


def _state_style(entry: Entry) -> str:
    return _STATE_STYLES.get(entry["state"], "bad") if entry["state"] else ""


_NAME = Column("dataset", lambda d: d["name"], left=True, widest=20)
_STATE = Column("state", lambda d: d["state"], _state_style, left=True)
_BAR = Column("", part=_part, style=lambda d: "bad" if is_over(d) else "good", rank=6)
_OF_CAP = Column("of cap", _of_cap, lambda d: "bad" if is_over(d) else "")
_RATE = Column("tok/s", lambda d: f"{d['tokens_per_second']:,.0f}")
_ETA = Column("eta", lambda d: duration(d["eta_seconds"]))
_IN_FLIGHT = Column("flight", lambda d: f"{d['in_flight']:,}", rank=5)
_TRUNCATED = Column("trunc", lambda d: short(d["truncated"]), _bad_if_any("truncated"))
# Answers that end within the think block.
_NO_THINK_END = Column("no</th>", lambda d: short(d["no_think_end"]), _bad_if_any("no_think_end"))
_REJECTED = Column("rej", lambda d: short(d["rejected"]), lambda d: "warn" if d["rejected"] else "")
_FAILED = Column("fail", lambda d: short(d["failed"]), _bad_if_any("failed"))
_LENGTHS = (
    Column("mean", _length("mean_tokens"), rank=7),
    Column("p50", _length("p50_tokens"), rank=10),
    Column("p95", _length("p95_tokens"), rank=9),
    Column("max", _length("max_tokens"), rank=8),
)
_SAMPLES = Column("samples", lambda d: f"{d['done']:,}", rank=4)
_TOKENS = Column("tokens", lambda d: f"{d['spent_tokens']:,}", rank=3)

PROGRESS = (_NAME, _STATE, _BAR, _OF_CAP, _TOKENS, _SAMPLES, _IN_FLIGHT, _RATE, _ETA)
ANSWERS = (
    _NAME,
    *_LENGTHS,
    _TRUNCATED,
    _NO_THINK_END,
    _REJECTED,
    _FAILED,
    Column("expired", lambda d: short(d["expired_leases"]), rank=11),
    Column("weight", lambda d: f"{d['weight']:g}" if "weight" in d else "", rank=12),
)
# All of it, for one row a dataset.
DATASETS = (*PROGRESS, *ANSWERS[1:-2])
# The same on a screen that has a line with the details of one dataset beside them: bars before figures.
ON_SCREEN = tuple(replace(column, rank=1) if column.part else column for column in DATASETS)
ON_SMALL_SCREEN = (replace(_NAME, widest=14), *ON_SCREEN[1:])


def sums(totals: Entry) -> dict[str, Any]:
    """The totals as the last row of the datasets' tables."""
    return {**totals, "name": "all", "state": ""}


def _failures(worker: Entry) -> str:
    return short(sum(worker.get("failed_attempts", {}).values()))


def _worker_style(worker: Entry) -> str:
    return {"working": "good", "silent": "bad", "dead": "bad"}.get(worker["state"], "warn")


WORKERS = (
    Column("worker", lambda w: w["name"], left=True, widest=32),
    Column("state", lambda w: w["state"], _worker_style, left=True),
    Column("flight", lambda w: f"{w.get('in_flight', 0):,}"),
    Column("limit", lambda w: f"{w.get('limit', 0):,}"),
    Column("most", lambda w: f"{w.get('concurrency', 0):,}", rank=2),
    Column("ended", lambda w: short(w.get("ended", 0)), rank=1),
    Column("failed", _failures, rank=3),
    Column("seen", lambda w: f"{w['seen_seconds_ago']:.0f}s", rank=4),
    Column("trouble", lambda w: w.get("trouble") or "", lambda _: "bad", left=True, rank=5, rest=True),
)


def _figure(key: str, form: str = "{:,.0f}") -> Any:
    return lambda entry: "-" if entry.get(key) is None else form.format(entry[key])


def _why(server: Entry) -> str:
    return server.get("reason") or server.get("why") or ""


SERVERS = (
    Column("server", lambda s: s["url"].removeprefix("http://"), left=True, widest=32),
    Column("state", lambda s: s["state"], lambda s: _SERVER_STYLES.get(s["state"], "bad"), left=True),
    Column("running", _figure("running")),
    Column("waiting", _figure("waiting")),
    Column("KV", _figure("kv_usage", "{:.0%}")),
    Column("tok/s", _figure("tokens_per_second")),
    Column("flight", _figure("in_flight"), rank=1),
    Column("limit", _figure("limit"), rank=2),
    Column("answers", lambda s: short(s.get("answers", 0)), rank=4),
    Column("SGLang", lambda s: s.get("version") or "-", left=True, rank=5),
    Column("why", _why, left=True, rank=3, rest=True),
)


def _moment(event: Entry) -> str:
    """The time of day here, with the date unless that is today's."""
    at = datetime.fromisoformat(event["at"]).astimezone()
    return f"{at:%H:%M:%S}" if at.date() == datetime.now().astimezone().date() else f"{at:%m-%d %H:%M}"


EVENTS = (
    Column("when", _moment, left=True),
    Column("what", lambda e: e["what"], left=True),
    Column("dataset", lambda e: e["dataset"] or "", left=True, widest=20, rank=2),
    Column("who", lambda e: e["who"], left=True, widest=24, rank=1),
    Column("detail", lambda e: e["detail"], left=True, rank=3, rest=True),
)


def rejects_of(dataset: Entry) -> str:
    """`2 not_json, 1 too_long`: how many rows were rejected for which reason."""
    return ", ".join(f"{n:,} {reason}" for reason, n in sorted(dataset["rejects"].items()))


def stopped_of(dataset: Entry) -> str:
    """`200 damaged_answer, 30 truncated`: how many turns of conversations are not made for which reason."""
    return ", ".join(f"{n:,} {reason}" for reason, n in sorted(dataset["stopped"].items()))


def details(dataset: Entry, width: int, look: Look) -> list[Line]:
    """All that its row may have no room for, in as many lines as that takes."""
    cap = f"of {dataset['cap_tokens']:,} {dataset['count']} tokens" if dataset["cap_tokens"] else "tokens, no cap"
    lengths = (("mean", "mean_tokens"), ("p50", "p50_tokens"), ("p95", "p95_tokens"), ("max", "max_tokens"))
    phrases = [
        f"{dataset['name']}: {dataset['spent_tokens']:,} {cap}",
        counted(dataset["done"], "answer"),
        " ".join(f"{name} {dataset[key]:,.0f}" for name, key in lengths),
        *(f"{n:,} {flag}" for flag, n in sorted(dataset["flags"].items())),
        *(f"{n:,} rejected as {reason}" for reason, n in sorted(dataset["rejects"].items())),
        *(f"{counted(n, 'turn')} not made after {reason}" for reason, n in sorted(dataset["stopped"].items())),
        f"{dataset['queued']:,} queued",
        f"{dataset['in_flight']:,} in flight",
        f"{counted(dataset['expired_leases'], 'lease')} expired",
        f"weight {dataset['weight']:g}",
    ]
    lines = [""]
    for phrase in phrases:
        if lines[-1] and len(lines[-1]) + 2 + len(phrase) > width - 1:
            lines[-1] += ","
            lines.append("  " + phrase)
        else:
            lines[-1] += f", {phrase}" if lines[-1] else phrase
    return [[(cut(line, width, look), "head" if number == 0 else "")] for number, line in enumerate(lines)]


def headline(seen: Mapping[str, Any], rates: Sequence[float], width: int, look: Look) -> Line:
    """All datasets in one line, and how many tokens a second there were of late."""
    totals = seen["totals"]
    opened = sum(dataset["state"] in {"open", "closing"} for dataset in seen["datasets"])
    tokens = f"{short(totals['spent_tokens'])} tokens"
    if totals["cap_tokens"]:
        tokens = f"{share(totals['spent_tokens'], totals['cap_tokens'])} of {short(totals['cap_tokens'])} tokens"
    left = f" {tokens} {look.dot} {totals['tokens_per_second']:,.0f} tok/s "
    right = f" {opened}/{len(seen['datasets'])} open {look.dot} {duration(totals['eta_seconds'])} left"
    room = width - len("tokenmill") - len(left) - len(right)
    return [("tokenmill", "head"), (left, ""), (sparkline(rates, max(0, room), look), "good"), (right, "")]


def troubles(seen: Mapping[str, Any]) -> list[str]:
    """What is wrong with datasets, and with all else."""
    reasons = [f"{dataset['name']}: {dataset['reason']}" for dataset in seen["datasets"] if dataset["reason"]]
    return [*reasons, *seen["troubles"]]
