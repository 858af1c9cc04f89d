"""The worker's heart: doorbells in, claimed samples, one call a slot, committed outcomes out. Knows no Celery.

Slots limit the calls, not messages: as many as the governors of the servers allow, and never more than `--concurrency`.
A message's samples are claimed when slots are free (or will be within 20 ms), so
that no worker sits on work that another could start. The message is acked at the claim; from there the lease guards.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import redis

from common.ledger import LOST, OPEN_STATES, Ended, InFlight, Ledger, pack_in_flight
from common.logs import about
from common.payload import UNREADABLE, Packer
from workers.commits import Commits
from workers.leases import Leases
from workers.marking import Marker
from workers.outcomes import recorded, rejected
from workers.samples import Doorbell, Outcome, Sample
from workers.sglang.answer import BadAnswer
from workers.sglang.answer import Outcome as Verdict
from workers.sglang.client import Sampling, SGLangClient

log = logging.getLogger(__name__)
# Samples are claimed ahead of a free slot by what the worker starts within this time: a claim takes milliseconds.
_AHEAD_SECONDS = 0.02
_MAX_AHEAD = 64
_RATE_SECONDS = 2.0
_REDIS_RETRY_SECONDS = 1.0
# How soon a second signal is noticed.
_HURRY_SECONDS = 0.1
# How long the servers have to answer an abort before the calls are given up.
_ABORT_SECONDS = 5.0
# How long a stopping worker tries to write and count its last answers on a full disk or without Redis.
_COMMIT_SECONDS = 10.0


class Generation:
    """Holds at most `concurrency` calls in flight; lives in one event loop."""

    def __init__(
        self,
        *,
        owner: str,
        concurrency: int,
        lease_seconds: float,
        vocab_size: int,
        client: SGLangClient,
        ledger: Ledger,
        commits: Commits,
        leases: Leases,
        sampling_of: Callable[[bytes], Sampling | None] = lambda _: None,
        marker_of: Callable[[str, bytes], Marker | None] = lambda *_: None,
    ) -> None:
        """`ledger` is used by the claiming thread alone, and so are the last two, which get a dataset's spec there."""
        self.concurrency = concurrency
        self.on_slots: Callable[[int], None] = lambda _: None  # called when the slots are others than before
        self._known_slots = 0
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._vocab_size = vocab_size
        self._client = client
        self._ledger = ledger
        self._commits = commits
        self._leases = leases
        self._sampling_of = sampling_of
        self._marker_of = marker_of
        self._bells: deque[Doorbell] = deque()
        self._backlog: deque[Sample] = deque()
        self._running: dict[asyncio.Task[None], Sample] = {}
        self._claiming: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="claim")
        self._packer = Packer()
        self._closing = False
        self._hurried = False
        self._ended = 0
        self._rate = 0.0  # samples ended a second
        self._rate_since = (time.monotonic(), 0)

    def facts(self) -> dict[str, Any]:
        """What status shows of this worker."""
        return {
            "kind": "worker",
            "concurrency": self.concurrency,
            "limit": self.slots,
            "in_flight": len(self._running),
            "ended": self._ended,
            "superseded": self._commits.superseded,
            "trouble": self._commits.trouble,
            "failed_attempts": dict(self._client.failed_attempts),
            "servers": [msgspec.to_builtins(server) for server in self._client.servers()],
        }

    def clocks(self) -> dict[str, bytes]:
        """By dataset, how far the answers in flight have come (common.ledger.InFlight); called from any thread."""
        found: dict[str, list[InFlight]] = {}
        for sample in list(self._running.values()):
            claimed, clock = sample.claimed, sample.clock
            found.setdefault(claimed.dataset, []).append(
                InFlight(claimed.index, claimed.attempt, clock.furthest, clock.tokens_per_second)
            )
        return {dataset: pack_in_flight(samples) for dataset, samples in found.items()}

    # The way of a sample

    @property
    def slots(self) -> int:
        """How many calls may be in flight now."""
        given = self._client.slots
        return self.concurrency if given is None else min(self.concurrency, given)

    def slots_changed(self) -> None:
        """Called by the client when they may have."""
        if (slots := self.slots) != self._known_slots:
            self._known_slots = slots
            self.on_slots(slots)
        self.fill()

    def ring(self, bell: Doorbell) -> None:
        """Take a message in."""
        self._bells.append(bell)
        self.fill()

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many calls may be in flight at most; what is above a lowered number ends by itself."""
        self.concurrency = max(1, concurrency)
        self.slots_changed()

    def fill(self) -> None:
        """Start what may start, claim what will be needed."""
        if self._stopped():
            return
        slots = self.slots
        while self._backlog and len(self._running) < slots:
            sample = self._backlog.popleft()
            task = asyncio.get_running_loop().create_task(self._one(sample))
            self._running[task] = sample
        if self._bells and self._claiming is None and self._wanted() > 0:
            self._claiming = asyncio.get_running_loop().create_task(self._claim())

    @property
    def starves(self) -> bool:
        """Whether it could start more than it is given: no message is at hand, and slots are free."""
        return not (self._stopped() or self._bells or self._backlog) and len(self._running) < self.slots

    def _stopped(self) -> bool:
        """Whether nothing new may start: the worker ends, or its answers cannot be written or counted."""
        return self._closing or bool(self._commits.trouble)

    def _wanted(self) -> int:
        """How many samples more keep the slots full until the next claim has answered."""
        ahead = min(_MAX_AHEAD, int(self._rate * _AHEAD_SECONDS))
        return self.slots - len(self._running) - len(self._backlog) + ahead

    async def _claim(self) -> None:
        """Claim whole messages until enough samples are at hand."""
        loop = asyncio.get_running_loop()
        try:
            while self._bells and not self._stopped() and (wanted := self._wanted()) > 0:
                bells: list[Doorbell] = []
                while self._bells and wanted > 0:
                    bells.append(self._bells.popleft())
                    wanted -= len(bells[-1].indices)
                samples, unclaimed = await loop.run_in_executor(self._thread, self._claim_bells, bells)
                self._bells.extendleft(reversed(unclaimed))
                self._take(bells[: len(bells) - len(unclaimed)], samples)
                if unclaimed:
                    await asyncio.sleep(_REDIS_RETRY_SECONDS)
        finally:
            self._claiming = None
        self.fill()

    def _claim_bells(self, bells: Sequence[Doorbell]) -> tuple[list[Sample], Sequence[Doorbell]]:
        """In the claiming thread: claim for `bells`; answers the samples, and the messages left where Redis failed."""
        samples: list[Sample] = []
        for done, bell in enumerate(bells):
            try:
                spec = self._ledger.spec(bell.dataset)
                sampling, marker = self._sampling_of(spec), self._marker_of(bell.dataset, spec)
                claimed, refused = self._ledger.claim(bell.dataset, self._owner, self._lease_seconds, bell.indices)
            except redis.RedisError as error:
                log.warning("claims wait, Redis does not answer: %s", error)
                return samples, bells[done:]
            self._leases.hold(claimed)
            if refused:
                log.debug("%s: not claimed: %s", bell.dataset, refused)
            samples += [Sample(one, bell, sampling, marker) for one in claimed]
        return samples, []

    def _take(self, bells: Sequence[Doorbell], samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.bell.left += 1
        self._backlog.extend(samples)
        for bell in bells:
            bell.on_claimed()
            if bell.left == 0:
                bell.on_ended(bell.summary())
        self.fill()

    async def _one(self, sample: Sample) -> None:
        """One sample, from its call to its outcome; never waits for disk or Redis."""
        task = asyncio.current_task()
        assert task is not None
        try:
            outcome = await self._outcome(sample)
        except Exception:  # the task boundary: a fault of ours must not hold a sample for ever
            # Its lease is no longer renewed: it runs out, counts as a lost attempt, and the third one ends the sample.
            claimed = sample.claimed
            text, extra = "%s %d: given up after a fault", about(claimed.dataset, claimed.index)
            log.exception(text, claimed.dataset, claimed.index, extra=extra)
            self._leases.drop([claimed])
            self._finish(sample, "failed")
            outcome = None
        finally:
            del self._running[task]
            self.fill()
        if outcome is not None:
            self._commits.add(outcome)

    async def _outcome(self, sample: Sample) -> Outcome | None:
        """A record or a reject; None where the sample was given back instead."""
        try:
            payload = self._packer.unpack(sample.claimed.payload)
        except UNREADABLE as error:
            return rejected(sample, None, "bad_payload", f"what Redis holds of its prompt cannot be read: {error}")
        if payload.largest_id >= self._vocab_size:
            # An id outside the vocabulary kills a real server. The feed refuses such rows; this is the last door.
            detail = f"id {payload.largest_id} is outside the model's vocabulary of {self._vocab_size} ids"
            return rejected(sample, payload, "id_out_of_range", detail)
        try:
            answer, server, seconds = await self._client.generate(
                payload.input_ids,
                prompt_tokens=payload.prompt_tokens,
                sampling=sample.sampling,
                max_new_tokens=payload.max_new_tokens,
                clock=sample.clock,
            )
            clock = sample.clock.tokens
            sample.bell.servers.add(server)
        except BadAnswer as bad:
            if bad.reason == "draining":
                return None  # drain() gives it back
            if bad.outcome in {Verdict.HALT_RUN, Verdict.HALT_DATASET}:
                await self._halt(sample, bad)
                return None
            return rejected(sample, payload, bad.reason, bad.detail)
        return recorded(sample, payload, answer, server, seconds, clock)

    def committed(self, outcomes: Sequence[Outcome]) -> None:
        """Called with outcomes that are durable and counted: ends their leases and messages."""
        for outcome in outcomes:
            bell = outcome.sample.bell
            bell.tokens += outcome.settled.completion_tokens if outcome.settled else 0
            self._finish(outcome.sample, outcome.end)
        self._leases.drop([outcome.sample.claimed for outcome in outcomes])
        self._ended += len(outcomes)
        now = time.monotonic()
        since, ended = self._rate_since
        if now - since >= _RATE_SECONDS:
            self._rate = (self._ended - ended) / (now - since)
            self._rate_since = (now, self._ended)
        self.fill()

    @staticmethod
    def _finish(sample: Sample, end: str) -> None:
        bell = sample.bell
        bell.ends[end] += 1
        bell.left -= 1
        if bell.left == 0:
            bell.on_ended(bell.summary())

    # What goes back

    async def _halt(self, sample: Sample, bad: BadAnswer) -> None:
        """Stop the sample's dataset, or all of them: what this answer says is true of every sample there."""
        whole_run = bad.outcome is Verdict.HALT_RUN
        dataset = sample.claimed.dataset

        def halt() -> None:
            halted = self._ledger.datasets() if whole_run else [dataset]
            before = [self._ledger.transition(one, "halted", OPEN_STATES, str(bad)) for one in halted]
            if not set(OPEN_STATES).isdisjoint(before):  # else another call was faster, and has said it
                log.error("%s is halted: %s", "the run" if whole_run else dataset, bad, extra=about(dataset))

        unstarted = [one for one in self._backlog if whole_run or one.claimed.dataset == dataset]
        self._backlog = deque(one for one in self._backlog if one not in unstarted)
        await self._with_ledger(halt)
        await self._give_back([sample, *unstarted])

    async def _give_back(self, samples: Sequence[Sample]) -> None:
        """Release leases; the keeper sends the samples to another worker within its next tick."""
        by_dataset: dict[str, list[tuple[int, int]]] = {}
        lost: dict[str, list[Ended]] = {}
        for sample in samples:
            claimed = sample.claimed
            by_dataset.setdefault(claimed.dataset, []).append((claimed.index, claimed.attempt))
            for clock in sample.clock.lost:
                lost.setdefault(claimed.dataset, []).append(Ended(claimed.index, claimed.attempt, clock, LOST))

        def release() -> None:
            for dataset, pairs in by_dataset.items():
                self._ledger.release(dataset, pairs, failed=False)
            for dataset, ended in lost.items():
                self._ledger.observe(dataset, ended)

        self._leases.drop([sample.claimed for sample in samples])
        await self._with_ledger(release)
        for sample in samples:
            self._finish(sample, "released")

    async def _with_ledger(self, step: Callable[[], None]) -> None:
        """Run a step in the claiming thread. Where Redis is away, the leases run out by themselves."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, step)
        except redis.RedisError as error:
            log.warning(
                "Redis does not answer (%s); what this worker held is free again when its leases run out", error
            )

    async def drain(self, seconds: float) -> None:
        """Start nothing more, wait up to `seconds` for what is in flight, abort and give back the rest, commit all."""
        self._closing = True
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        unstarted = list(self._backlog)
        self._backlog.clear()
        await self._give_back(unstarted)
        if self._running and seconds > 0:
            log.warning("waiting up to %.0f s for %d answers in flight", seconds, len(self._running))
            until = time.monotonic() + seconds
            while self._running and not self._hurried and (left := until - time.monotonic()) > 0:
                await asyncio.wait(list(self._running), timeout=min(left, _HURRY_SECONDS))
        if self._running:
            await self._abort()
        await self._commits.flush(_COMMIT_SECONDS)
        self._thread.shutdown()
        self._ledger.close()

    def hurry(self) -> None:
        """Let drain(), also one to come, wait no longer for answers in flight."""
        self._hurried = True

    async def _abort(self) -> None:
        running = dict(self._running)
        log.warning("aborting %d answers; another worker makes them anew", len(running))
        await self._client.abort_all()
        _, still = await asyncio.wait(list(running), timeout=_ABORT_SECONDS)
        for task in still:
            task.cancel()
        if still:
            await asyncio.wait(still)
        await self._commits.flush(_COMMIT_SECONDS)
        # Some were answered in the meantime; what still has a lease was not.
        await self._give_back([sample for sample in running.values() if self._leases.holds(sample.claimed)])
