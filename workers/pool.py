"""A Celery worker pool that runs samples as coroutines of one event loop, in a thread of its own.

Celery's own pools were measured and fall short: gevent loses tasks, threads can neither cancel nor grow, prefork holds
one call a process. This one is loaded by Celery's documented hook, `CELERY_CUSTOM_WORKER_POOL=workers.pool:AsyncioPool`
with `-P custom`. It serves the generate task alone, and does not go through Celery's tracer: no result backend, no
Celery retries, no time limits; the ledger and the client do what those would.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from celery import bootsteps, signals
from celery.concurrency.base import BasePool
from celery.worker.consumer import Consumer
from kombu.serialization import loads

from common.broker import message_arguments
from workers.pacing import messages_held
from workers.samples import Doorbell
from workers.service import Service

log = logging.getLogger(__name__)


class FewMessages(bootsteps.StartStopStep):
    """Sets the prefetch count, and lets it follow the slots; `num_processes` 0 keeps Celery from doing so itself."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Consumer, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._held = messages_held(getattr(consumer.pool, "slots", 0))  # the keeper's pool has none
        consumer.initial_prefetch_count = self._held  # type: ignore[attr-defined]
        consumer.pool.reconnect = lambda: _reconnect(consumer)
        consumer.pool.on_slots = lambda slots: self._follow(consumer, slots)

    def _follow(self, consumer: Any, slots: int) -> None:
        """Called in the generation's thread; kombu carries a change out in the consumer's own."""
        held = messages_held(slots)
        if held != self._held and consumer.qos is not None:
            change = consumer.qos.increment_eventually if held > self._held else consumer.qos.decrement_eventually
            change(abs(held - self._held))
            self._held = held
            consumer.initial_prefetch_count = held  # with which Celery begins anew after a lost connection


def _reconnect(consumer: Consumer) -> None:
    """Let Celery connect anew, as it does when its connection breaks; called from any thread."""

    def broken() -> None:
        raise ConnectionError("messages wait, and this worker gets none")

    hub: Any = consumer.hub  # type: ignore[attr-defined]
    if hub is not None:
        hub.call_soon(broken)


class AsyncioPool(BasePool):
    """`limit` is the most answers in flight; `grow` and `shrink` change it while the worker runs.

    `slots` is how many the governors of the servers allow of these now.
    """

    task_join_will_block = False
    num_processes = 0
    # Set with Celery's consumer.
    reconnect: Callable[[], None] = staticmethod(lambda: None)
    on_slots: Callable[[int], None] = staticmethod(lambda _: None)
    slots = 0
    # Whether a person has told the worker of this process to end; read when it has.
    dismissed = False

    def on_start(self) -> None:
        """Start the loop's thread, and in it the service (client, ledger, segment writer)."""
        # What is loaded by now stays, and no collection looks at it again: a tenth of the CPU of an answer.
        gc.collect()
        gc.freeze()
        settings = self.app.conf["tokenmill"]
        owner = self.options["initargs"][1]
        self._service = Service(
            settings,
            owner=owner,
            concurrency=self.limit,
            reconnect=self._connect_anew,
            on_slots=self._slots_changed,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._thread.start()
        self._stopping: Future[None] | None = None
        self._asked_to_stop = 0
        signals.worker_shutting_down.connect(self._on_signal, weak=False)
        self._wait(asyncio.run_coroutine_threadsafe(self._service.start(), self._loop))

    def _connect_anew(self) -> None:
        self.reconnect()

    def _slots_changed(self, slots: int) -> None:
        self.slots = slots
        self.on_slots(slots)

    def _on_signal(self, **_: Any) -> None:
        """Called by Celery for each TERM and INT: a second one comes from somebody who will not wait for the drain."""
        self._asked_to_stop += 1
        self._service.life.end()
        if self._asked_to_stop > 1 and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._service.hurry)

    def on_apply(self, target: Any, args: Any = None, kwargs: Any = None, **callbacks: Any) -> None:
        """Take one message; called by Celery in its main thread. `args` is what Celery would give to its tracer."""
        del target, kwargs
        _, _, _, body, content_type, content_encoding = args
        accepted: Callable[..., None] = callbacks["accept_callback"]
        succeeded: Callable[..., None] = callbacks["callback"]
        started = time.monotonic()
        try:
            if not isinstance(body, list | tuple):
                body = loads(body, content_type, content_encoding, accept={"application/json"})
            dataset, indices = message_arguments(body)
        except ValueError as error:
            log.error("a message was dropped: %s; its samples, if any, are sent again", error)
            accepted(None, time.time())
            succeeded((False, "not a generate message", 0.0))
            return
        bell = Doorbell(
            dataset,
            indices,
            on_claimed=lambda: _call(accepted, None, time.time()),
            on_ended=lambda summary: _call(succeeded, (False, summary, time.monotonic() - started)),
        )
        self._loop.call_soon_threadsafe(self._service.ring, bell)

    def grow(self, n: int = 1) -> None:
        """Allow `n` more answers in flight."""
        self._set_limit(self.limit + n)

    def shrink(self, n: int = 1) -> None:
        """Allow `n` fewer; those in flight end by themselves."""
        self._set_limit(max(1, self.limit - n))

    def terminate_job(self, pid: int | None, signal: int | None = None) -> None:
        """Nothing: one sample's answer is not ended from outside.

        Celery calls this for each message in flight at a second Ctrl-C, and for Flower's "terminate". BasePool's own
        raises, which broke off the drain and left the answers running on the server.
        """

    def on_stop(self) -> None:
        """Drain for a bounded time, give the rest back, stop the loop."""
        self._shut(self._service.life.drain_seconds)

    def on_terminate(self) -> None:
        """Give everything back at once."""
        self._shut(0.0)

    def _shut(self, drain_seconds: float) -> None:
        if not self._thread.is_alive():
            return
        if self._stopping is None:
            self._stopping = asyncio.run_coroutine_threadsafe(self._service.stop(drain_seconds), self._loop)
        else:
            # At a second Ctrl-C Celery stops the pool from the signal's handler, within the first stop's wait.
            self._loop.call_soon_threadsafe(self._service.hurry)
        self._wait(self._stopping)
        type(self).dismissed = self._service.life.dismissed
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self._loop.call_soon_threadsafe(self._service.set_concurrency, limit)

    @staticmethod
    def _wait(future: Future[None]) -> None:
        """Wait in short steps, so that a signal's handler runs in this (the main) thread."""
        while not future.done():
            time.sleep(0.02)
        future.result()

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()  # type: ignore[misc]
        return info | {"max-concurrency": self.limit}


def _call(callback: Callable[..., None], *args: Any) -> None:
    """Celery's callbacks send events and acks; one that fails (the broker is away) must not end a coroutine."""
    try:
        callback(*args)
    except Exception:
        log.warning("Celery could not be told how a message ended", exc_info=True)
