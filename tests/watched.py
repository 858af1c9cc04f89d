"""A job as the ledger shows it, of any size and without any process, for tests and benchmarks of what watches it."""

import time
from pathlib import Path
from typing import Any

from common.events import make_event
from common.ledger import Ledger, Settled
from common.sections import DatasetSettings

_ANSWERS = 40


def server(number: int, tick: int = 0, **changes: Any) -> dict[str, Any]:
    """What a worker says of one server."""
    seen = {
        "url": f"http://gpu{number}:30000",
        "state": "up",
        "in_flight": 10,
        "answers": 5 + tick,
        "since": time.time() - 100,
        "reason": None,
        "version": "0.5.9",
        "limit": 12,
        "why": "steady: 3 waiting, 3 wanted",
        "running": 40 + tick % 7,
        "waiting": 3,
        "kv_usage": 0.7 + tick % 10 / 100,
        "tokens_per_second": 700.5 + tick,
    }
    return seen | changes


def worker(number: int, tick: int = 0, *, servers: int = 4, **changes: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    said = {
        "kind": "worker",
        "state": "working",
        "host": f"host{number}",
        "pid": 1000 + number,
        "since": time.time() - 100,
        "concurrency": 512,
        "limit": 120,
        "in_flight": 100 + tick % 20,
        "ended": 100 * tick,
        "superseded": 0,
        "trouble": None,
        "failed_attempts": {"nan": 2},
        "servers": [server(one, tick) for one in range(servers)],
    }
    return said | changes


def begin(ledger: Ledger, datasets: int = 3, workers: int = 2, servers: int = 2, cap_tokens: int = 1_000_000) -> None:
    """Datasets D0, D1 and so on, each open and with some answers; workers w0@host0 and so on; an event."""
    for number in range(datasets):
        name = f"D{number}"
        ledger.register(DatasetSettings(name=name, path=Path(f"{name}.jsonl"), cap_tokens=cap_tokens))
        ledger.feed(name, before="", after='{"index":9}', ended=False, rejected=[(0, "too_long")], samples=[(1, b"p")])
    ledger.add_event(make_event("registered", "up to 1,000,000 tokens", "D0"))
    move(ledger, 0, datasets, workers, servers)


def move(ledger: Ledger, tick: int, datasets: int = 3, workers: int = 2, servers: int = 2) -> None:
    """Let a second pass: more answers everywhere, and every worker and the keeper are heard of."""
    for number in range(datasets):
        first = 100 + tick * _ANSWERS
        answers = [
            Settled(index, 1, 100, 50 + 37 * (index % 90), 0, ("truncated",) if index % 50 == number else ())
            for index in range(first, first + _ANSWERS)
        ]
        ledger.settle(f"D{number}", answers, rebuild=True)
        ledger.admit(f"D{number}", room=50, window=64, tokens_per_second=100 + 10 * number + tick % 9)
    ledger.heartbeat("keeper", {"kind": "keeper"})
    for number in range(workers):
        ledger.heartbeat(f"w{number}@host{number}", worker(number, tick, servers=servers))
