"""Group commit: the answers of the last 20 ms share one write, one fsync and one settle call a dataset.

Durable before counted: a record is settled only after its fsync. All of it happens in one thread, with a Redis
connection of its own; while it works, the next batch fills. What fails is repeated until it succeeds: a full disk or a
lost Redis keeps the worker from taking new samples, and costs no answer.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import redis

from common.ledger import Ledger
from common.records import Void, Voided, encode_line
from common.rejects import append_rejects
from workers.samples import Outcome
from workers.segment_writer import SegmentWriter

log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0
T = TypeVar("T")


class _GaveUpError(Exception):
    """The worker stops, and what could not be written or counted is left."""


class Commits:
    """Collects outcomes and makes them durable, then counted, in batches; for one event loop."""

    def __init__(self, *, ledger: Ledger, writer: SegmentWriter, output: Path, commit_seconds: float) -> None:
        """`ledger` and `writer` are used by the committing thread alone."""
        self._ledger = ledger
        self._writer = writer
        self._output = output
        self._commit_seconds = commit_seconds
        self._waiting: list[Outcome] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._given_up = threading.Event()
        # Called in the loop with every batch that is durable and counted.
        self.on_committed: Callable[[Sequence[Outcome]], None] = lambda _: None
        self.trouble = ""  # why nothing can be written or counted now, in words
        self.superseded = 0

    def add(self, outcome: Outcome) -> None:
        """Commit `outcome` with the batch that is forming."""
        self._waiting.append(outcome)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def flush(self, seconds: float | None = None) -> None:
        """Wait until everything added so far is committed; what is not after `seconds` is left.

        What was written but not counted then is counted by the keeper, and what was not written is generated again.
        """
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=seconds)
            if late:
                self._given_up.set()
                await asyncio.wait(late)

    def close(self) -> None:
        """Seal the segments."""
        self._thread.submit(self._writer.close).result()
        self._thread.shutdown()
        self._ledger.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                # The first answer starts the window; those that come within it share its fsync.
                await asyncio.sleep(self._commit_seconds)
                batch, self._waiting = self._waiting, []
                await loop.run_in_executor(self._thread, self._commit, batch)
                self.on_committed(batch)
        except _GaveUpError:
            log.error("stopping with %d answers not committed: %s", len(batch) + len(self._waiting), self.trouble)
        finally:
            self._task = None

    def _commit(self, batch: Sequence[Outcome]) -> None:
        by_dataset: dict[str, list[Outcome]] = {}
        for outcome in batch:
            by_dataset.setdefault(outcome.sample.claimed.dataset, []).append(outcome)
        for dataset, outcomes in by_dataset.items():
            self._commit_records(dataset, [outcome for outcome in outcomes if outcome.settled is not None])
            self._commit_rejects(dataset, [outcome for outcome in outcomes if outcome.reject is not None])
            self._observe(dataset, outcomes)

    def _observe(self, dataset: str, outcomes: Sequence[Outcome]) -> None:
        """What the budget's estimate is made of; nothing is lost if it is not kept."""
        if ended := [one for outcome in outcomes for one in outcome.observed()]:
            try:
                self._ledger.observe(dataset, ended)
            except redis.RedisError as error:
                log.warning("%d lengths are missing in the budget's estimate: %s", len(ended), error)

    def _commit_records(self, dataset: str, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        lines = [outcome.line for outcome in outcomes]
        settled = [outcome.settled for outcome in outcomes if outcome.settled is not None]
        segment, size = self._insist(lambda: self._writer.append(dataset, lines))
        counted = self._insist(lambda: self._ledger.settle(dataset, settled, segment=segment, committed_bytes=size))
        voids = []
        for outcome, record, counts in zip(outcomes, settled, counted, strict=True):
            if not counts:
                voids.append(encode_line(Void(Voided(record.index, record.attempt))))
                outcome.supersede()
        if voids:
            self.superseded += len(voids)
            voided_in, end = self._insist(lambda: self._writer.append(dataset, voids))
            self._insist(lambda: self._ledger.set_committed(segment, size))
            self._insist(lambda: self._ledger.set_committed(voided_in, end))

    def _commit_rejects(self, dataset: str, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        rejects = [outcome.reject for outcome in outcomes if outcome.reject is not None]
        ended = [
            (reject.index, outcome.sample.claimed.attempt, reject.reason)
            for outcome, reject in zip(outcomes, rejects, strict=True)
        ]
        self._insist(lambda: append_rejects(self._output, dataset, rejects))
        left = {reject.index: reject.turns_left for reject in rejects}
        counted = self._insist(lambda: self._ledger.reject(dataset, ended, turns_left=left))
        for outcome, counts in zip(outcomes, counted, strict=True):
            if not counts:
                outcome.supersede()

    def _insist(self, step: Callable[[], T]) -> T:
        """Repeat a step until it succeeds; each may be: the writer leaves no part behind, scripts are idempotent."""
        while True:
            try:
                answer = step()
            except OSError as error:
                self._say(f"cannot write to {self._output} ({error.strerror or error}); free space or mend the disk")
            except redis.RedisError as error:
                self._say(f"Redis does not answer ({error}); answers are safe on disk and wait to be counted")
            else:
                if self.trouble:
                    log.warning("writing and counting goes on")
                    self.trouble = ""
                return answer
            if self._given_up.wait(_RETRY_SECONDS):
                raise _GaveUpError

    def _say(self, trouble: str) -> None:
        """Once for each trouble, however often the step is repeated."""
        if trouble != self.trouble:
            log.error("%s; no new samples are taken until then", trouble)
            self.trouble = trouble
