"""Keeps a worker's leases alive, from a thread and a connection of its own.

With the event loop busy, or the main thread draining at shutdown, a timer in either would stop; the leases would run
out and the samples be generated a second time.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from common.ledger import Claimed, Ledger, Order
from common.logs import about

log = logging.getLogger(__name__)
_HEARTBEAT_SECONDS = 1.0


class Leases:
    """The samples that this worker holds, and the thread that renews them and says that the worker lives."""

    def __init__(self, ledger: Ledger, owner: str, lease_seconds: float) -> None:
        self._ledger = ledger
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._held: dict[str, dict[int, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = 0
        # The name of this life of the process; what an earlier one of the same name counted stays.
        self._life = f"{owner} {time.time():.3f}"
        self._failed_attempts: Mapping[str, int] = {}
        self._told: set[str] = set()  # datasets of the clocks that Redis holds

    def start(
        self,
        facts: Callable[[], Mapping[str, Any]],
        clocks: Callable[[], Mapping[str, bytes]],
        obey: Callable[[Order], None] = lambda _: None,
    ) -> None:
        """Start the thread; each heartbeat tells the `facts`, and of each dataset the `clocks` of what is in flight.

        `obey` is called there with what a person tells this worker to do.
        """
        self._facts, self._clocks, self._obey = facts, clocks, obey
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def hold(self, samples: list[Claimed]) -> None:
        """Renew these from now on."""
        with self._lock:
            for sample in samples:
                self._held.setdefault(sample.dataset, {})[sample.index] = sample.attempt

    def drop(self, samples: list[Claimed]) -> None:
        """These are settled, rejected or released."""
        with self._lock:
            for sample in samples:
                self._forget(sample.dataset, sample.index, sample.attempt)

    def _forget(self, dataset: str, index: int, attempt: int) -> None:
        held = self._held.get(dataset, {})
        if held.get(index) == attempt:
            del held[index]

    def holds(self, sample: Claimed) -> bool:
        """Whether `sample` is held by the attempt that claimed it."""
        with self._lock:
            return self._held.get(sample.dataset, {}).get(sample.index) == sample.attempt

    @property
    def held(self) -> int:
        """How many samples this worker holds, started or not, written or not."""
        with self._lock:
            return sum(map(len, self._held.values()))

    def stop(self) -> None:
        """End the thread and say goodbye."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self._ledger.heartbeat(self._owner, None)
            for dataset in self._told:
                self._ledger.tell(dataset, self._owner, b"")
        except redis.RedisError as error:
            log.warning("could not say goodbye to Redis: %s", error)
        self._ledger.close()

    def _run(self) -> None:
        # A quarter of the lease: three renewals may fail before a sample is lost.
        period = min(_HEARTBEAT_SECONDS, self._lease_seconds / 4)
        due = 0.0
        while not self._stop.wait(period):
            due -= period
            try:
                if due <= 0:
                    self._renew()
                    due = self._lease_seconds / 4
                self._say()
            except redis.RedisError as error:
                log.warning("leases could not be renewed, Redis does not answer: %s", error)
            except Exception:  # the thread's boundary: without it every sample would be generated twice
                log.exception("a heartbeat failed")

    def _say(self) -> None:
        if (order := self._ledger.order_for(self._owner)) is not None:
            self._ledger.order(self._owner, None)
            self._obey(order)
        facts = self._facts()
        self._ledger.heartbeat(self._owner, facts)
        clocks = self._clocks()
        for dataset in self._told | clocks.keys():
            self._ledger.tell(dataset, self._owner, clocks.get(dataset, b""))
        self._told = set(clocks)
        failed = facts.get("failed_attempts", {})
        if failed != self._failed_attempts:
            self._ledger.set_failed_attempts(self._life, failed)
            self._failed_attempts = failed

    def _renew(self) -> None:
        with self._lock:
            held = {dataset: list(samples.items()) for dataset, samples in self._held.items() if samples}
        for dataset, samples in held.items():
            lost = set(self._ledger.renew(dataset, self._owner, self._lease_seconds, samples))
            if lost:
                self.lost += len(lost)
                text = "%s: %d samples went to another attempt; their answers will be voided"
                log.warning(text, dataset, len(lost), extra=about(dataset))
                with self._lock:
                    for index, attempt in samples:
                        if index in lost:
                            self._forget(dataset, index, attempt)
