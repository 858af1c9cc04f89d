"""What happens by itself in a job, told once each: datasets end or open again, workers and servers come and go.

The keeper tells it at its ticks, into events.jsonl. What was told already is read from that file, from the place where
it was read before: so it is told once whoever of several keepers tells it, also after Redis or the keeper was lost.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.events import EVENTS, decoded, last_events, make_event, tell
from common.ledger import KEPT_EVENTS, SILENT_MS, DatasetState, Event, Ledger
from common.logs import about
from common.words import counted

log = logging.getLogger(__name__)
# Workers tell of themselves every second; after Redis was emptied, or stood still, those that live are missed at first.
_QUIET_MS = 10_000
# A worker is told of after it began; by clocks that differ by less than this, on one machine by none.
_CLOCKS_SECONDS = 1.0
# States of a server in which somebody can use it, and in which nobody can (workers/sglang/servers.py).
_UP, _DOWN = {"up", "draining"}, {"down", "unfit"}
_TOLD_STATES = ("capped", "exhausted", "halted", "failed")
_OPENING = {"registered", "reopened", "resumed", "restored"}

Processes = Mapping[str, tuple[int, Mapping[str, Any]]]


class News:
    """Remembers what was told: by dataset its state, by worker `joined` or `lost`, by server `up` or `down`."""

    def __init__(self, output: Path, ledger: Ledger) -> None:
        self._output = output
        self._ledger = ledger
        self._read_to = 0
        self._quiet_until_ms = 0
        self._datasets: dict[str, str] = {}
        self._workers: dict[str, str] = {}
        self._joined_at: dict[str, float] = {}  # seconds since the epoch
        self._lives: dict[str, float] = {}  # by worker, since when the one is there that was told of
        self._servers: dict[str, str] = {}

    def be_quiet(self, now_ms: int) -> None:
        """Redis or its clock was away: workers that are not heard of now may well be there."""
        self._quiet_until_ms = now_ms + _QUIET_MS

    def tell(self, datasets: Mapping[str, tuple[str, DatasetState]], processes: Processes, now_ms: int) -> None:
        """Tell what is new, given each dataset's state and the figures behind it. Raises OSError, redis.RedisError."""
        self._catch_up()
        if self._read_to and not self._ledger.events(1):
            # Redis was emptied: what it had of the file is put there again.
            self._ledger.refill_events(last_events(self._output, KEPT_EVENTS))
            self.be_quiet(now_ms)
        for event in (
            *self._of_datasets(datasets),
            *self._of_workers(processes, now_ms),
            *self._of_servers(processes, now_ms),
        ):
            tell(self._output, self._ledger, event)
        self._catch_up()

    def _catch_up(self) -> None:
        """Read what was told since, by whomever."""
        try:
            with (self._output / EVENTS).open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_to:  # a person has put another file there
                    self._forget()
                file.seek(self._read_to)
                text = file.read()
        except FileNotFoundError:
            self._forget()
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for event in decoded(whole.split(b"\n")):
            self._note(event)

    def _forget(self) -> None:
        self._read_to = 0
        for told in (self._datasets, self._workers, self._servers):
            told.clear()

    def _note(self, event: Event) -> None:
        if event.dataset is not None:
            if event.what in _TOLD_STATES:
                self._datasets[event.dataset] = event.what
            elif event.what in _OPENING:
                self._datasets[event.dataset] = "open"
        elif event.what in {"worker_joined", "worker_lost"}:
            self._workers[event.who] = event.what.removeprefix("worker_")
            self._joined_at[event.who] = datetime.fromisoformat(event.at).timestamp()
        elif event.what == "worker_drained":
            self._workers.pop(event.who, None)
        elif event.what in {"server_up", "server_down"}:
            self._servers[event.who] = event.what.removeprefix("server_")

    def _of_datasets(self, datasets: Mapping[str, tuple[str, DatasetState]]) -> Iterator[Event]:
        for name, (state, figures) in datasets.items():
            told = self._datasets.get(name, "open")
            if state in _TOLD_STATES and state != told:
                log.warning("%s: %s with %s tokens", name, state, f"{figures.spent_tokens:,}", extra=about(name))
                yield make_event(state, _ending(state, figures), name, "keeper")
            elif state in {"open", "closing"} and told in _TOLD_STATES:
                yield make_event("reopened", f"open again, after it was {told}", name, "keeper")

    def _of_workers(self, processes: Processes, now_ms: int) -> Iterator[Event]:
        workers = {name: seen for name, seen in processes.items() if seen[1].get("kind") == "worker"}
        for name, (seen_ms, facts) in workers.items():
            silent_ms, told = abs(now_ms - seen_ms), self._workers.get(name)
            if silent_ms <= SILENT_MS and (told != "joined" or self._is_another(name, facts)):
                limit = f"up to {counted(facts.get('concurrency', 0), 'answer')} in flight"
                detail = f"is heard of again, {limit}" if told == "lost" else f"is here, {limit}"
                self._lives[name] = facts.get("since", 0.0)
                yield make_event("worker_joined", detail, None, name)
            elif silent_ms > SILENT_MS and told != "lost" and now_ms > self._quiet_until_ms:
                detail = (
                    f"was last heard of {silent_ms / 1000:.0f} s ago with {facts.get('in_flight', 0)} in flight, "
                    "which others get when the leases run out"
                )
                yield make_event("worker_lost", detail, None, name)
        if now_ms > self._quiet_until_ms:
            for name in [name for name, told in self._workers.items() if told == "joined" and name not in workers]:
                yield make_event("worker_drained", "has ended, and given back what it had", None, name)

    def _is_another(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Whether the worker began after one of its name was told of: nobody was there to tell of the end of that one.

        Clocks of machines differ; so each is taken for another once.
        """
        since = float(facts.get("since", 0.0))
        return since > self._joined_at[name] + _CLOCKS_SECONDS and self._lives.get(name) != since

    def _of_servers(self, processes: Processes, now_ms: int) -> Iterator[Event]:
        seen: dict[str, list[Mapping[str, Any]]] = {}
        for seen_ms, facts in processes.values():
            if abs(now_ms - seen_ms) <= SILENT_MS:
                for server in facts.get("servers", ()):
                    seen.setdefault(server["url"], []).append(server)
        for url, views in seen.items():
            states, told = {view["state"] for view in views}, self._servers.get(url, "up")
            if states <= _DOWN and told == "up":
                reasons = sorted({str(view["reason"]) for view in views if view.get("reason")})
                yield make_event("server_down", "; ".join(reasons) or "it does not answer", None, url)
            elif states & _UP and told == "down":
                yield make_event("server_up", "answers again", None, url)


def _ending(state: str, figures: DatasetState) -> str:
    made = f"{counted(figures.done, 'record')}, {figures.spent_tokens:,}"
    if state == "capped":
        return f"{made} of {figures.cap_tokens or 0:,} tokens"
    if state == "exhausted":
        return f"its source has ended: {made} tokens"
    return figures.reason or f"{made} tokens"
