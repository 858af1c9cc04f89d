"""Whether anybody works on a job: control, without which nothing is fed or sent, and a worker at least."""

from collections.abc import Mapping
from typing import Any

from common.ledger import SILENT_MS, Ledger

Processes = Mapping[str, tuple[int, Mapping[str, Any]]]


def works(processes: Processes, now_ms: int) -> bool:
    """Whether control and a worker are heard of, so that answers can come, and are measured."""
    return _heard(processes, now_ms, "keeper") and _heard(processes, now_ms, "worker")


def nobody(processes: Processes, now_ms: int) -> str | None:
    """What is missing for open datasets to go on, and what to start; None if nothing is."""
    control, worker = _heard(processes, now_ms, "keeper"), _heard(processes, now_ms, "worker")
    if not control and not worker:
        return (
            "neither control nor a worker is heard of: nothing will start until `tokenmill run` is started, "
            "or `tokenmill control` and `tokenmill worker`"
        )
    if not control:
        return "control is not heard of: nothing more is fed or sent; start `tokenmill control`"
    return None if worker else "no worker is heard of: nothing will start until `tokenmill worker` is started"


def nobody_works(ledger: Ledger) -> str | None:
    """The same of a ledger; None also while `run` starts them. Raises redis.RedisError."""
    return None if ledger.processes_expected() else nobody(ledger.processes(), ledger.now_ms())


def _heard(processes: Processes, now_ms: int, kind: str) -> bool:
    return any(
        facts.get("kind") == kind and abs(now_ms - seen_ms) <= SILENT_MS for seen_ms, facts in processes.values()
    )
