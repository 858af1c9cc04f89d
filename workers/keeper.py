"""The budget keeper: once a second, for each dataset, what must happen next.

It takes lapsed leases back, counts what dead workers left written, sets the room under each cap, sends messages by the
datasets' shares, and asks for feeds. It keeps nothing that it could not lose: every tick starts from the ledger.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence

from celery import Celery
from msgspec import UNSET
from redis.exceptions import LockError

from common.broker import PRODUCE_QUEUE, Sender, waiting_messages
from common.ledger import ENDED_STATES, LOST, OPEN_STATES, SILENT_MS, SUSPECT_AFTER, DatasetState, Ended, Lapsed, Ledger
from common.logs import about
from common.payload import UNREADABLE, Packer
from common.processes import is_gone
from common.registered import registered_names
from common.rejects import Reject, append_rejects
from common.settings import Settings
from workers import budget, in_flight
from workers.adoption import adopt
from workers.gatekeeping import Gatekeeper
from workers.news import News
from workers.pacing import Pace
from workers.segment_writer import SegmentWriter
from workers.sending import Candidate, Sending

log = logging.getLogger(__name__)
# What a keeper that was killed within its tick leaves locked is not kept for so long.
_LOCK_SECONDS = 10.0
# Redis stood still, or its clock jumped, if so much of its time has passed between two ticks.
_GAP_MS = 5_000
# A sample that lost so many workers ends, though it was never the only suspect of one.
MAX_TRIES = 10
# Books that were asked for and have not come are asked for again after so long.
_ASK_AGAIN_MS = 10_000
# After a lease has run out its sample is taken back within so long.
_LAPSE_MS = 3_000
# A feed is asked for below this share of the window. At 2,500 answers/s the largest window lasts 2 s, and what is seen
# a tick too late must still be there when the feed comes: half of it would not.
_FED_BELOW = 0.75


class Keeper:
    """One tick at a time, whoever calls it: a lock in the ledger sees to that."""

    def __init__(self, settings: Settings, app: Celery, ledger: Ledger) -> None:
        self._settings = settings
        self._sender = Sender(app)
        self._ledger = ledger
        self._writer = SegmentWriter(settings.output, "keeper", settings.worker.segment_bytes)
        self._tick_ms: int | None = None  # of the tick before, by Redis's clock
        self._lenient_until_ms = 0
        self._paces: dict[str, Pace] = {}
        self._sending = Sending(ledger, self._sender)
        self._rule = {"precise": budget.PRECISE, "fast": budget.FAST}[settings.control.landing]
        self._adopted: set[str] = set()
        self._known: set[str] | None = None  # all datasets that there should be
        self._news = News(settings.output, ledger)
        self._gatekeeper = Gatekeeper(settings, ledger)
        self._states: dict[str, tuple[str, DatasetState]] = {}  # after this tick
        self._asked_ms = 0  # when the books were last asked for, until all are there

    def tick(self) -> bool:
        """Do what is due; answers False if another keeper is at it."""
        lock = self._ledger.keeping(_LOCK_SECONDS)
        if not lock.acquire():
            return False
        try:
            now_ms, slots, workers = self._slots()
            feeds_wait = waiting_messages(self._ledger.redis, PRODUCE_QUEUE) > 0
            candidates: dict[str, Candidate] = {}
            datasets = self._ledger.datasets()
            self._notice_what_was_forgotten(datasets)
            for dataset in datasets:
                try:
                    candidates[dataset] = self._keep(dataset, slots)
                except OSError as error:
                    log.error("%s: its files cannot be read or written (%s)", dataset, error, extra=about(dataset))
            self._tell_news(datasets, now_ms)
            self._sending.send(candidates, now_ms, slots, workers)
            for dataset, one in candidates.items():
                if not feeds_wait and self._needs_rows(one, slots):
                    self._sender.feed(dataset)
        finally:
            try:
                lock.release()
            except LockError:
                log.warning("this tick took longer than %.0f s", _LOCK_SECONDS)
        return True

    def _tell_news(self, datasets: Sequence[str], now_ms: int) -> None:
        states = {name: self._states[name] for name in datasets if name in self._states}
        try:
            self._news.tell(states, self._processes, now_ms)
        except OSError as error:
            log.error("what happened cannot be written down, and is told later: %s", error)

    def _slots(self) -> tuple[int, int, int]:
        """Redis's time in ms, the slots and the number of the workers that live; says that this keeper lives."""
        now_ms = self._ledger.heartbeat("keeper", {"kind": "keeper"})
        self._notice_a_gap(now_ms)
        limits: list[int] = []
        # A worker that is dead is forgotten when its samples, which it told the clocks of, were taken back.
        lapsed_ms = round(1000 * self._settings.worker.lease_seconds) + _LAPSE_MS
        self._processes = self._ledger.processes()
        for name, (seen_ms, facts) in self._processes.items():
            if abs(now_ms - seen_ms) <= SILENT_MS:
                if facts.get("kind") == "worker":
                    limits.append(int(facts["limit"]))
            elif abs(now_ms - seen_ms) > 60 * SILENT_MS or (abs(now_ms - seen_ms) > lapsed_ms and is_gone(facts)):
                self._ledger.forget_process(name)
        return now_ms, sum(limits), len(limits)

    def _notice_a_gap(self, now_ms: int) -> None:
        """After a gap in time let the workers renew their leases first: they could not, and lose no try by that."""
        gap_ms = 0 if self._tick_ms is None else now_ms - self._tick_ms
        self._tick_ms = now_ms
        if abs(gap_ms) > _GAP_MS:
            # Workers renew once in a quarter of a lease.
            self._lenient_until_ms = now_ms + round(500 * self._settings.worker.lease_seconds)
            self._news.be_quiet(now_ms)
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

    def _keep(self, dataset: str, slots: int) -> Candidate:
        """One dataset's share of a tick, and what it may start."""
        state, counted = self._ledger.snapshot(dataset), 0
        if state.state == "cancelled" and state.queued:
            self._ledger.cancel(dataset, state.reason)  # what was given back since, or fed at that moment
        if dataset not in self._adopted or (state.state in OPEN_STATES and state.in_flight == 0):
            # At the start, and before a dataset can end: its files and its books must be the same.
            if counted := adopt(self._ledger, self._writer, self._settings.output, dataset):
                text = "%s: %d records of workers that stopped were counted"
                log.warning(text, dataset, counted, extra=about(dataset))
            self._adopted.add(dataset)
        if self._take_back(dataset) or counted:
            state = self._ledger.snapshot(dataset)
        if self._gatekeeper.stops(state):
            state = self._ledger.snapshot(dataset)
        pace = self._paces.setdefault(dataset, Pace.of(state))
        pace.measure(state)
        room = self._room(state)
        state_after = self._ledger.admit(
            dataset,
            room=room,
            starts=state.starts,
            window=pace.window(slots, state, self._settings.control.window),
            tokens_per_second=round(pace.tokens_per_second, 1),
        )
        if state_after != state.state and state_after in ENDED_STATES:
            # Once more: the last leases may have ended since this tick looked.
            adopt(self._ledger, self._writer, self._settings.output, dataset)
            state = self._ledger.snapshot(dataset)
        self._states[dataset] = (state_after, state)
        return Candidate(state, room if state_after == "open" else 0, pace)

    def _room(self, state: DatasetState) -> int:
        """How many samples the cap admits beyond those in flight."""
        if state.state in ENDED_STATES:
            return 0
        if state.cap_tokens is None:
            return budget.NO_LIMIT
        progress = self._ledger.progress(state.name)
        snapshot = in_flight.snapshot(state, progress, self._settings)
        return budget.admit(snapshot, self._rule).room

    def _needs_rows(self, one: Candidate, slots: int) -> bool:
        window = one.pace.window(slots, one.state, self._settings.control.window)
        return (one.state.answers > 0 or not one.state.ended) and one.state.queued < min(window * _FED_BELOW, one.room)

    def _take_back(self, dataset: str) -> bool:
        """Samples of workers that no longer renew their leases: first count what they had written."""
        if not self._ledger.lapsed(dataset) or (self._tick_ms or 0) < self._lenient_until_ms:
            return False
        clocks = in_flight.told(self._ledger.progress(dataset))
        adopt(self._ledger, self._writer, self._settings.output, dataset)
        back, ended = self._ledger.expire(dataset, max_tries=MAX_TRIES)
        if back:
            owners = ", ".join(sorted({lapsed.owner for lapsed in back}))
            log.warning("%s: %d samples taken back from %s", dataset, len(back), owners, extra=about(dataset))
        if ended:
            self._reject(dataset, ended)
        lost = [
            Ended(one.index, one.attempt, clocks[one.index][1], LOST) for one in (*back, *ended) if _knows(clocks, one)
        ]
        if lost:
            self._ledger.observe(dataset, lost)
        return True

    def _reject(self, dataset: str, ended: list[Lapsed]) -> None:
        detail = (
            f"its worker died, or failed, {SUSPECT_AFTER + 1} times while it had this sample, the last time as the "
            f"only suspect there; or {MAX_TRIES} times in all"
        )
        turns = self._turns(dataset, ended)
        rejects = [
            Reject(index=one.index, reason="worker_lost", detail=detail, id=None, turns=turns.get(one.index, UNSET))
            for one in ended
        ]
        append_rejects(self._settings.output, dataset, rejects)
        self._ledger.reject(
            dataset,
            [(one.index, one.attempt, "worker_lost") for one in ended],
            turns_left={reject.index: reject.turns_left for reject in rejects},
        )
        for one in ended:
            log.error("%s: rejected %d: %s", dataset, one.index, detail, extra=about(dataset, one.index))

    def _turns(self, dataset: str, ended: Sequence[Lapsed]) -> dict[int, int]:
        """How many turns the conversations were to have that end with these samples."""
        turns = {}
        for index, packed in self._ledger.payloads(dataset, [one.index for one in ended]).items():
            with contextlib.suppress(*UNREADABLE):
                payload = Packer().unpack(packed)
                if payload.turns is not None:
                    turns[index] = payload.turns
        return turns

    def close(self) -> None:
        """Seal the keeper's own segments."""
        self._writer.close()


def _knows(clocks: Mapping[int, tuple[int, float]], lapsed: Lapsed) -> bool:
    """Whether the attempt that was lost had told how far it was."""
    return clocks.get(lapsed.index, (0, 0.0))[0] == lapsed.attempt


def keeper_of(settings: Settings, app: Celery) -> Keeper:
    """A keeper with a connection of its own."""
    return Keeper(settings, app, Ledger.connect(settings.redis_url))
