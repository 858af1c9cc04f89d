"""Which samples get a message now, of which dataset, and how many: the keeper's way out to the workers.

Samples wait in the ledger, not in messages. Messages are taken first in, first out, so whoever has few of them out
decides late who gets the next slot; shares, pauses and caps then hold from one second to the next.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from common.broker import Sender, pending_samples
from common.ledger import DatasetState, Ledger
from common.logs import about
from workers.pacing import Pace, messages_held
from workers.shares import Shares, Standing, to_send

log = logging.getLogger(__name__)
# Queued samples are looked for in the messages when they were sent so long ago.
_MESSAGE_MS = 2_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dataset as a tick of the keeper found it; `room` is what it may start now: 0 unless it is open."""

    state: DatasetState
    room: int
    pace: Pace


class Sending:
    """Sends for all datasets of a tick together; remembers what each is owed."""

    def __init__(self, ledger: Ledger, sender: Sender) -> None:
        self._ledger = ledger
        self._sender = sender
        self._shares = Shares()
        self._at_ms: int | None = None

    def send(self, candidates: Mapping[str, Candidate], now_ms: int, slots: int, workers: int) -> None:
        """Send again what was lost on its way, and as much more as the workers will start before the next tick."""
        in_messages = functools.cache(lambda: pending_samples(self._ledger.redis))  # one look a tick, if any
        for name, one in candidates.items():
            if one.room > 0:
                self._send_again(name, one, in_messages)
        # A worker takes one suspect at a time. More of them would be refused, tick after tick, and keep the samples
        # behind them from the slots: with 100 that waited, 5 of 100 slots were in use.
        held_back = {name: set(self._suspects(name, one)[workers:]) for name, one in candidates.items()}
        standings = {name: _standing(one, slots, workers, len(held_back[name])) for name, one in candidates.items()}
        if self._at_ms is not None:
            self._shares.advance(max(0, now_ms - self._at_ms) / 1000, standings)
        self._at_ms = now_ms
        per_message = max((one.per_message for one in standings.values() if one.open), default=1)
        samples = to_send(
            max(0, slots - sum(one.in_flight for one in standings.values())),
            self._shares.starts_per_second,
            sum(one.sent for one in standings.values() if one.open),
            max(0, workers - 1) * messages_held(slots // max(1, workers)) * per_message,
        )
        if messages := self._messages(self._shares.choose(samples, standings), held_back):
            self._sender.generate(messages)

    def _suspects(self, name: str, one: Candidate) -> list[int]:
        return self._ledger.suspects(name) if one.room > 0 else []

    def _messages(
        self, runs: Sequence[tuple[str, int]], held_back: Mapping[str, Collection[int]]
    ) -> list[tuple[str, list[int]]]:
        """The samples of each run, marked as sent; none of those in `held_back`."""
        wanted: Counter[str] = Counter()
        for name, samples in runs:
            wanted[name] += samples
        ready: dict[str, Iterator[int]] = {}
        for name, samples in wanted.items():
            unsent = self._ledger.unsent(name, samples + len(held_back[name]))
            unsent = [index for index in unsent if index not in held_back[name]][:samples]
            sent = set(self._ledger.resend(name, 1, unsent))
            ready[name] = iter([index for index in unsent if index in sent])
        messages = ((name, list(islice(ready[name], samples))) for name, samples in runs)
        return [(name, indices) for name, indices in messages if indices]

    def _send_again(self, name: str, one: Candidate, in_messages: Callable[[], dict[str, set[int]]]) -> None:
        """Samples that were sent and are in no message any more: it was lost at a pop, or purged."""
        due = self._ledger.due(name, one.state.now_ms - _MESSAGE_MS)
        if not due:
            return
        waiting = in_messages().get(name, set())
        missing = [index for index in due if index not in waiting][: one.room]
        if sent := self._ledger.resend(name, one.state.now_ms, missing):
            self._sender.generate([(name, [index]) for index in sent])
            log.info("%s: %d samples sent again", name, len(sent), extra=about(name))


def _standing(one: Candidate, slots: int, workers: int, held_back: int) -> Standing:
    state = one.state
    return Standing(
        weight=state.weight,
        in_flight=state.in_flight,
        sent=state.sent,
        available=max(0, min(state.queued - held_back, one.room) - state.sent),
        ended=state.done + state.rejected,
        open=one.room > 0 and (state.queued > 0 or not state.ended),
        per_message=one.pace.per_message(slots, workers),
    )
