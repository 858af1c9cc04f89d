"""The budget keeper: once a second, for each dataset, what must happen next.

It takes lapsed leases back, counts what dead workers left written, sets the room under each cap, sends lost messages
again, and asks for feeds. It keeps nothing that it could not lose: every tick starts from the ledger.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery import Celery
from redis.exceptions import LockError

from common.broker import PRODUCE_QUEUE, Sender, pending_samples, waiting_messages
from common.ledger import ENDED_STATES, OPEN_STATES, SUSPECT_AFTER, DatasetState, Lapsed, Ledger
from common.registered import registered_names
from common.rejects import Reject, append_rejects
from common.settings import Settings
from workers import budget
from workers.adoption import adopt
from workers.segment_writer import SegmentWriter

log = logging.getLogger(__name__)
# A process that was not heard of for this long is no longer shown, and its slots no longer planned with.
_SILENT_MS = 10_000
# What a keeper that was killed within its tick leaves locked is not kept for so long.
_LOCK_SECONDS = 10.0
# Redis stood still, or its clock jumped, if so much of its time has passed between two ticks.
_GAP_MS = 5_000
# A sample that lost so many workers ends, though it was never the only suspect of one.
MAX_TRIES = 10
# Books that were asked for and have not come are asked for again after so long.
_ASK_AGAIN_MS = 10_000
# Queued samples are looked for in the messages when they were sent so long ago.
_MESSAGE_MS = 2_000
# What may wait in Redis: two rounds of the slots and some seconds of the measured rate, within these bounds.
_MIN_WINDOW, _MAX_WINDOW = 64, 5_000
_WINDOW_SECONDS = 4.0
# A feed is asked for below this share of the window. At 2,500 answers/s the largest window lasts 2 s, and what is seen
# a tick too late must still be there when the feed comes: half of it would not.
_FED_BELOW = 0.75
_RATE_WEIGHT = 0.3  # of the newest second, in the running rates
# A message holds what a worker with all its slots full answers in so many seconds: 1 sample where answers take
# minutes, 32 where 128 slots answer 640 a second. An answer costs a worker 1.6 ms of CPU with 1 sample a message, 0.40
# with 16 and 0.32 with 32.
_MESSAGE_SECONDS = 0.05
_MAX_PER_MESSAGE = 32


@dataclass(slots=True)
class _Rates:
    """Running rates of a dataset, per second, and the running mean of its samples in flight."""

    at_ms: int
    done: int
    tokens: int
    answers_per_second: float = 0.0
    tokens_per_second: float = 0.0
    in_flight: float = 0.0


class Keeper:
    """One tick at a time, whoever calls it: a lock in the ledger sees to that."""

    def __init__(self, settings: Settings, app: Celery, ledger: Ledger) -> None:
        self._settings = settings
        self._sender = Sender(app)
        self._ledger = ledger
        self._writer = SegmentWriter(settings.output, "keeper", settings.worker.segment_bytes)
        self._tick_ms: int | None = None  # of the tick before, by Redis's clock
        self._lenient_until_ms = 0
        self._rates: dict[str, _Rates] = {}
        self._adopted: set[str] = set()
        self._known: set[str] | None = None  # all datasets that there should be
        self._asked_ms = 0  # when the books were last asked for, until all are there

    def tick(self) -> bool:
        """Do what is due; answers False if another keeper is at it."""
        lock = self._ledger.keeping(_LOCK_SECONDS)
        if not lock.acquire():
            return False
        try:
            slots, workers = self._slots()
            feeds_wait = waiting_messages(self._ledger.redis, PRODUCE_QUEUE) > 0
            in_messages = functools.cache(lambda: pending_samples(self._ledger.redis))  # one look a tick, if any
            datasets = self._ledger.datasets()
            self._notice_what_was_forgotten(datasets)
            for dataset in datasets:
                try:
                    if self._keep(dataset, slots, workers, in_messages) and not feeds_wait:
                        self._sender.feed(dataset)
                except OSError as error:
                    log.error("%s: its files cannot be read or written (%s)", dataset, error)
        finally:
            try:
                lock.release()
            except LockError:
                log.warning("this tick took longer than %.0f s", _LOCK_SECONDS)
        return True

    def _slots(self) -> tuple[int, int]:
        """The slots and the number of the workers that live; says that this keeper lives."""
        now_ms = self._ledger.heartbeat("keeper", {"kind": "keeper"})
        self._notice_a_gap(now_ms)
        limits: list[int] = []
        for name, (seen_ms, facts) in self._ledger.processes().items():
            if abs(now_ms - seen_ms) <= _SILENT_MS:
                if facts.get("kind") == "worker":
                    limits.append(int(facts["limit"]))
            elif abs(now_ms - seen_ms) > 60 * _SILENT_MS:
                self._ledger.heartbeat(name, None)
        return sum(limits), len(limits)

    def _notice_a_gap(self, now_ms: int) -> None:
        """After a gap in time let the workers renew their leases first: they could not, and lose no try by that."""
        gap_ms = 0 if self._tick_ms is None else now_ms - self._tick_ms
        self._tick_ms = now_ms
        if abs(gap_ms) > _GAP_MS:
            # Workers renew once in a quarter of a lease.
            self._lenient_until_ms = now_ms + round(500 * self._settings.worker.lease_seconds)
            log.warning("Redis, its clock or this keeper leapt by %.0f s; leases may be renewed first", gap_ms / 1000)
        if gap_ms < 0:
            for dataset in self._ledger.datasets():
                self._ledger.pull_back(dataset, now_ms, self._settings.worker.lease_seconds)

    def _notice_what_was_forgotten(self, datasets: Sequence[str]) -> None:
        """Have the books built anew where Redis was emptied: `run`, which would see that, may not be there."""
        has_model = self._ledger.model() is not None
        if has_model and self._known is not None and self._known <= set(datasets):
            self._known, self._asked_ms = set(datasets), 0
            return
        try:
            registered = registered_names(self._settings.output)
        except OSError as error:
            log.error("it cannot be seen which datasets there are: %s", error)
            return
        # Without any, nothing was enqueued yet, or a person has removed the files, too, to begin anew.
        self._known = registered | set(datasets)
        lost = registered - set(datasets)
        now_ms = self._tick_ms or 0
        if not (lost or (registered and not has_model)) or abs(now_ms - self._asked_ms) < _ASK_AGAIN_MS:
            return
        names = ", ".join(sorted(lost)) or "what the servers serve"
        log.error("Redis has forgotten %s: it was emptied; the books are built anew from the files", names)
        self._asked_ms = now_ms
        self._adopted.clear()
        self._sender.restore()

    def _keep(self, dataset: str, slots: int, workers: int, in_messages: Callable[[], dict[str, set[int]]]) -> bool:
        """One dataset's share of a tick; answers whether it needs rows."""
        state = self._ledger.snapshot(dataset)
        if dataset not in self._adopted or (state.state in OPEN_STATES and state.in_flight == 0):
            # At the start, and before a dataset can end: its files and its books must be the same.
            if counted := adopt(self._ledger, self._writer, self._settings.output, dataset):
                log.warning("%s: %d records of workers that stopped were counted", dataset, counted)
                state = self._ledger.snapshot(dataset)
            self._adopted.add(dataset)
        self._take_back(dataset)
        rates = self._measure(state)
        room = budget.room(state, self._settings.sampling.max_new_tokens)
        per_message = self._per_message(rates, slots, workers)
        state_after = self._ledger.admit(
            dataset,
            room=room,
            window=self._window(rates, slots),
            per_message=per_message,
            tokens_per_second=round(rates.tokens_per_second, 1),
        )
        if state_after != state.state and state_after in ENDED_STATES:
            # Once more: the last leases may have ended since this tick looked.
            adopt(self._ledger, self._writer, self._settings.output, dataset)
            log.warning("%s: %s -> %s, %s tokens", dataset, state.state, state_after, f"{state.spent_tokens:,}")
        if state_after != "open" or room <= 0:
            return False
        self._resend(state, room, per_message, in_messages)
        return not state.ended and state.queued < min(self._window(rates, slots) * _FED_BELOW, room)

    def _take_back(self, dataset: str) -> None:
        """Samples of workers that no longer renew their leases: first count what they had written."""
        if not self._ledger.lapsed(dataset) or (self._tick_ms or 0) < self._lenient_until_ms:
            return
        adopt(self._ledger, self._writer, self._settings.output, dataset)
        back, ended = self._ledger.expire(dataset, max_tries=MAX_TRIES)
        if back:
            owners = ", ".join(sorted({lapsed.owner for lapsed in back}))
            log.warning("%s: %d samples taken back from %s", dataset, len(back), owners)
        if ended:
            self._reject(dataset, ended)

    def _reject(self, dataset: str, ended: list[Lapsed]) -> None:
        detail = (
            f"its worker died, or failed, {SUSPECT_AFTER + 1} times while it had this sample, the last time as the "
            f"only suspect there; or {MAX_TRIES} times in all"
        )
        rejects = [Reject(index=one.index, reason="worker_lost", detail=detail, id=None) for one in ended]
        append_rejects(self._settings.output, dataset, rejects)
        self._ledger.reject(dataset, [(one.index, one.attempt, "worker_lost") for one in ended])
        log.error("%s: rejected %s: %s", dataset, [one.index for one in ended], detail)

    def _resend(
        self, state: DatasetState, room: int, per_message: int, in_messages: Callable[[], dict[str, set[int]]]
    ) -> None:
        """Send messages for samples that are in none: given back, lost at a pop, or once refused for want of room."""
        dataset = state.name
        due = self._ledger.due(dataset, state.now_ms - _MESSAGE_MS)
        if not due:
            return
        given_back = self._ledger.due(dataset, 0)
        waiting = in_messages().get(dataset, set()) if len(due) > len(given_back) else set()
        missing = [index for index in due if index not in waiting][:room]
        sent = self._ledger.resend(dataset, state.now_ms, missing)
        if sent:
            self._sender.generate(dataset, sorted(sent), per_message)
            log.info("%s: %d samples sent again", dataset, len(sent))

    def _measure(self, state: DatasetState) -> _Rates:
        tokens = state.completion_tokens
        rates = self._rates.setdefault(state.name, _Rates(state.now_ms, state.done, tokens))
        seconds = (state.now_ms - rates.at_ms) / 1000
        if seconds > 0:
            answers = max(0, state.done - rates.done) / seconds
            rates.answers_per_second += _RATE_WEIGHT * (answers - rates.answers_per_second)
            rates.tokens_per_second += _RATE_WEIGHT * (
                max(0, tokens - rates.tokens) / seconds - rates.tokens_per_second
            )
            rates.in_flight += _RATE_WEIGHT * (state.in_flight - rates.in_flight)
        if seconds:  # less than nothing where Redis's clock was set back
            rates.at_ms, rates.done, rates.tokens = state.now_ms, state.done, tokens
        return rates

    def _window(self, rates: _Rates, slots: int) -> int:
        given = self._settings.control.window
        wanted = 2 * slots + round(rates.answers_per_second * _WINDOW_SECONDS)
        return given or max(_MIN_WINDOW, min(_MAX_WINDOW, wanted))

    def _per_message(self, rates: _Rates, slots: int, workers: int) -> int:
        """One sample a message where answers take minutes, up to a quarter of a worker's slots where milliseconds.

        By the rate that full slots would have, from what an answer takes now (Little's law: in flight / rate). The
        rate itself would not do: small messages make a fast server look slow, and slow rates make small messages.
        """
        if not workers:
            return 1
        slots_full = rates.answers_per_second * slots / max(1.0, min(rates.in_flight, slots))
        by_rate = round(slots_full / workers * _MESSAGE_SECONDS)
        return max(1, min(_MAX_PER_MESSAGE, slots // workers // 4, by_rate))

    def close(self) -> None:
        """Seal the keeper's own segments."""
        self._writer.close()


def keeper_of(settings: Settings, app: Celery) -> Keeper:
    """A keeper with a connection of its own."""
    return Keeper(settings, app, Ledger.connect(settings.redis_url))
