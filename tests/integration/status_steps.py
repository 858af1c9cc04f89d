"""A ledger with something in it, and what workers say, for the tests of status."""

import json
import time
from pathlib import Path
from typing import Any

from common.ledger import Ledger, Settled
from common.ledger._keys import WORKERS
from common.sections import DatasetSettings


def server(url: str, state: str = "up", in_flight: int = 0, reason: str | None = None, **load: Any) -> dict[str, Any]:
    return {"url": url, "state": state, "in_flight": in_flight, "since": time.time() - 310, "reason": reason, **load}


def worker(limit: int, in_flight: int, *servers: dict[str, Any], trouble: str | None = None) -> dict[str, Any]:
    """What a worker says of itself."""
    return {
        "kind": "worker",
        "concurrency": limit,
        "limit": limit,
        "in_flight": in_flight,
        "trouble": trouble,
        "servers": list(servers),
    }


def say(ledger: Ledger, name: str, facts: dict[str, Any], seconds_ago: float = 0) -> None:
    now = ledger.heartbeat(name, facts)
    if seconds_ago:
        ledger.redis.hset(WORKERS, name, f"{now - round(seconds_ago * 1000)} {json.dumps(facts)}")


def at_work(ledger: Ledger) -> None:
    """Control and a worker are heard of."""
    say(ledger, "keeper", {"kind": "keeper"})
    say(ledger, "w9@host", worker(8, 0, server("http://a:1")))


def register(ledger: Ledger, name: str, **more: Any) -> None:
    ledger.register(DatasetSettings(name=name, path=Path(f"{name}.jsonl"), **more))


def fill(ledger: Ledger) -> None:
    """Dataset A: of 20 rows 2 bad ones, 6 answered, 1 that could not be, 3 in flight, 8 queued; B and C beside it."""
    register(ledger, "A", cap_tokens=1000)
    ledger.feed(
        "A",
        before="",
        after="end",
        ended=True,
        rejected=[(0, "not_json"), (1, "too_long")],
        samples=[(index, b"prompt") for index in range(2, 20)],
    )
    ledger.admit("A", room=50, window=64, tokens_per_second=25.5)
    claimed, _ = ledger.claim("A", "w1@host", 3600, list(range(2, 12)))
    tokens = [10, 20, 30, 40, 50, 90]
    records = [
        Settled(one.index, one.attempt, 100, n, 60, ("truncated",) if n == 90 else ())
        for one, n in zip(claimed, tokens, strict=False)
    ]
    assert all(ledger.settle("A", records))
    assert ledger.reject("A", [(8, claimed[6].attempt, "bad_request")]) == [True]
    register(ledger, "B", cap_tokens=100_000, count="total")
    ledger.settle("B", [Settled(0, 1, 700, 300, 0, ())], rebuild=True)
    ledger.admit("B", room=9, window=64, tokens_per_second=30)
    register(ledger, "C")
    ledger.heartbeat("keeper", {"kind": "keeper"})
    ledger.transition("C", "failed", ["open"], "its source c.jsonl cannot be read: No such file or directory")
