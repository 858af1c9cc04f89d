"""The workers of a job, on demand: which there are, more of them on this machine, fewer on any."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import UnavailableError, UsageError
from common.events import all_events, make_event, tell
from common.ledger import Ledger, Order
from common.settings import Settings, nearest
from common.words import counted
from producer.detached import Detached, changing, detached, start
from producer.status import state_of

# How long a new worker has to be heard of: it takes 2 to 3 s on a machine that is not busy.
_HEARD_SECONDS = 60.0
_POLL_SECONDS = 0.05
# States of a worker that takes samples, or will.
_AT_WORK = ("starting", "waiting", "working")


def workers_of(settings: Settings, ledger: Ledger) -> list[dict[str, Any]]:
    """Every worker that was heard of or has a pid file, by name, as `workers list --json` shows it.

    `state` is starting (not heard of yet), waiting (nothing was enqueued yet), working, draining, stopping, silent (not
    heard of for 10 s), dead (its process is gone), or unknown (not heard of, and its pid file is
    of another machine). `log` is given of those that `workers add` has started.
    """
    now_ms = ledger.now_ms()
    found: dict[str, dict[str, Any]] = {}
    for name, (seen_ms, facts) in ledger.processes().items():
        if facts.get("kind") == "worker":
            found[name] = _heard_of(name, facts, (now_ms - seen_ms) / 1000)
    for worker in detached(settings.output):
        one = found.setdefault(worker.label, _unheard(worker))
        one["log"] = str(worker.log_file)
        if worker.is_here and not worker.lives:
            one |= {"state": "dead", "in_flight": 0}
    return sorted(found.values(), key=lambda one: (one["since"] or 0, one["name"]))


def _heard_of(name: str, facts: dict[str, Any], silent_seconds: float) -> dict[str, Any]:
    state = state_of(facts, silent_seconds)
    return {
        "name": name,
        "state": state,
        **{key: facts.get(key) for key in ("host", "pid", "limit", "concurrency", "in_flight", "since")},
        **({"in_flight": 0} if state == "dead" else {}),
        "seen_seconds_ago": round(max(0.0, silent_seconds), 1),
        "log": None,
    }


def _unheard(worker: Detached) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("limit", "concurrency", "in_flight", "seen_seconds_ago", "log"))
    state = "starting" if worker.is_here else "unknown"
    own = {"host": worker.host, "pid": worker.pid, "since": worker.since}
    return {"name": worker.label, "state": state, **own, **nothing}


def add_workers(
    settings: Settings, config: Path, ledger: Ledger, n: int, concurrency: int | None, say: Callable[[str], None]
) -> list[str]:
    """Start `n` workers on this machine and wait until each is heard of; answers their names.

    Raises UnavailableError with the last words of one that has ended instead; the others go on. OSError, RedisError.
    """
    with changing(settings.output):
        return _add(settings, config, ledger, n, concurrency, say)


def _add(
    settings: Settings, config: Path, ledger: Ledger, n: int, concurrency: int | None, say: Callable[[str], None]
) -> list[str]:
    names = _free_names(settings, ledger)
    started = [start(settings.output, config, next(names), concurrency) for _ in range(n)]
    told = ", ".join(worker.label for worker in started)
    limit = concurrency or settings.worker.concurrency
    tell(settings.output, ledger, make_event("workers_added", f"{told}; each with {limit} in flight at most"))
    failed = []
    for worker, state in _heard(ledger, started):
        if state == "dead":
            worker.forget()
            failed.append(f"{worker.label} has ended: {worker.last_words() or 'it said nothing'}")
        else:
            say(f"{worker.label}: {state}, process {worker.pid}, log {worker.log_file}")
    if failed:
        raise UnavailableError("; ".join(failed))
    return [worker.label for worker in started]


def _heard(ledger: Ledger, started: Sequence[Detached]) -> Iterator[tuple[Detached, str]]:
    """Each worker once it is heard of, with its state; `dead` if it has ended, `starting` if neither came in time."""
    left, deadline = list(started), time.monotonic() + _HEARD_SECONDS
    while left and time.monotonic() < deadline:
        processes = ledger.processes()
        for worker in list(left):
            facts = processes.get(worker.label, (0, {}))[1]
            state = facts.get("state") if facts.get("pid") == worker.pid else None
            if state is None and not worker.lives:
                state = "dead"
            if state is not None:
                left.remove(worker)
                yield worker, state
        time.sleep(_POLL_SECONDS)
    yield from ((worker, "starting") for worker in left)


def _free_names(settings: Settings, ledger: Ledger) -> Iterator[str]:
    """w1, w2 and so on, without those of any worker of this job on any machine, and those that `run` gives."""
    taken = {name.partition("@")[0] for name in ledger.processes()}
    taken |= {worker.name for worker in detached(settings.output)}
    taken |= {f"w{number}" for number in range(1, settings.run.workers + 1)}
    number = 0
    while True:
        number += 1
        if f"w{number}" not in taken:
            yield f"w{number}"


def end_worker(settings: Settings, ledger: Ledger, word: str, order: Order) -> str:
    """Let a worker end, wherever it runs; `word` is its name, with or without @host. Answers what is done.

    Raises UsageError, with the near names, if there is no such worker, or more than one; OSError, redis.RedisError.
    """
    workers = {worker["name"]: worker for worker in workers_of(settings, ledger)}
    return _end(settings, ledger, workers[_full_name(word, list(workers))], order)


def _full_name(word: str, names: Sequence[str]) -> str:
    found = [name for name in names if word in (name, name.partition("@")[0])]
    if not found:
        short = {name.partition("@")[0] for name in names}
        near = nearest(word, short) if names else "; there is none"
        raise UsageError(f"no worker of this job is named {word!r}{near}")
    if len(found) > 1:
        raise UsageError(f"more than one worker is named {word!r}: {', '.join(found)}; name one of these")
    return found[0]


def _end(settings: Settings, ledger: Ledger, worker: dict[str, Any], order: Order) -> str:
    name, state = worker["name"], worker["state"]
    own = next((one for one in detached(settings.output) if one.label == name), None)
    if state == "dead":
        return _bury(settings, ledger, worker, own)
    if state in {"starting", "silent"} and own is not None and own.is_here:
        own.terminate()  # it does not look for orders
    elif state == "unknown":
        raise UsageError(f"{name} is not heard of; its pid file {own and own.path} is of another machine: end it there")
    ledger.order(name, order)
    in_flight = worker["in_flight"] or 0
    if order == "drain":
        what = "worker_draining"
        sentence = f"ends when what it has in flight has ended ({counted(in_flight, 'answer')})"
    else:
        seconds = settings.worker.drain_seconds
        sentence, what = f"ends within {seconds:.0f} s; what is in flight then goes to others", "worker_stopping"
    if state == "silent":
        sentence += f"; it was last heard of {worker['seen_seconds_ago']:.0f} s ago"
    tell(settings.output, ledger, make_event(what, f"{name} {sentence}"))
    return f"{name}: {sentence}"


def _bury(settings: Settings, ledger: Ledger, worker: dict[str, Any], own: Detached | None) -> str:
    """Forget a worker whose process is gone; answers what becomes of its samples."""
    name, words = worker["name"], ""
    if own is not None:
        words = own.last_words()
        own.forget()
    said = f"its process had ended already{f' ({words})' if words else ''}"
    if (age := worker["seen_seconds_ago"]) is not None:
        left = max(0.0, settings.worker.lease_seconds - age)
        said += f"; what it had in flight comes back within {left:.0f} s" if left else ""
        _tell_lost(settings, ledger, name, said)
        ledger.forget_process(name)
    return f"{name}: {said}; it is taken from the list"


def _tell_lost(settings: Settings, ledger: Ledger, name: str, said: str) -> None:
    """Unless the keeper, which finds no trace of it from now on, has told already."""
    told = [event.what for event in all_events(settings.output) if event.who == name]
    if told and told[-1] == "worker_joined":
        tell(settings.output, ledger, make_event("worker_lost", said, None, name))


def scale(
    settings: Settings, config: Path, ledger: Ledger, n: int, concurrency: int | None, say: Callable[[str], None]
) -> None:
    """Have `n` workers in all: more are started on this machine, or those drained that came last, ours here first.

    Two who scale at once do so one after the other. Raises as add_workers does.
    """
    with changing(settings.output):
        workers = [worker for worker in workers_of(settings, ledger) if worker["state"] in _AT_WORK]
        told = ledger.orders()
        workers = [worker for worker in workers if worker["name"] not in told]
        if n > len(workers):
            _add(settings, config, ledger, n - len(workers), concurrency, say)
            return
        here = {worker.label for worker in detached(settings.output) if worker.is_here}
        workers.sort(key=lambda worker: (worker["name"] not in here, -(worker["since"] or 0)))
        for worker in workers[: len(workers) - n]:
            say(_end(settings, ledger, worker, "drain"))
        if n == len(workers):
            say(f"there are {n} already")
