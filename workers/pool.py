"""A Celery worker pool that runs samples as coroutines of one event loop, in a thread of its own.

Celery's own pools were measured and fall short: gevent loses tasks, threads can neither cancel nor grow, prefork holds
one call a process. This one is loaded by Celery's documented hook, `CELERY_CUSTOM_WORKER_POOL=workers.pool:AsyncioPool`
with `-P custom`. It serves the generate task alone, and does not go through Celery's tracer: no result backend, no
Celery retries, no time limits; the ledger and the client do what those would.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from celery import bootsteps
from celery.concurrency.base import BasePool
from celery.worker.consumer import Consumer
from kombu.serialization import loads

from common.broker import message_arguments
from workers.samples import Doorbell
from workers.service import Service

log = logging.getLogger(__name__)
# Messages that a worker holds at most, whatever its slots: others may start what it has no slot for.
_MESSAGES_HELD = 2


class FewMessages(bootsteps.StartStopStep):
    """Sets the prefetch count; with `num_processes` 0 Celery leaves it alone when the pool grows."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Consumer, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        consumer.initial_prefetch_count = _MESSAGES_HELD  # type: ignore[attr-defined]


class AsyncioPool(BasePool):
    """`limit` is the number of answers in flight; `grow` and `shrink` change it while the worker runs."""

    task_join_will_block = False
    num_processes = 0

    def on_start(self) -> None:
        """Start the loop's thread, and in it the service (client, ledger, segment writer)."""
        settings = self.app.conf["tokenmill"]
        self._service = Service(settings, owner=self.options["initargs"][1], limit=self.limit)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation", daemon=True)
        self._thread.start()
        self._wait(self._service.start())

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

    def on_stop(self) -> None:
        """Drain for a bounded time, give the rest back, stop the loop."""
        self._shut(self._service.drain_seconds)

    def on_terminate(self) -> None:
        """Give everything back at once."""
        self._shut(0.0)

    def _shut(self, drain_seconds: float) -> None:
        if not self._thread.is_alive():
            return
        self._wait(self._service.stop(drain_seconds))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _set_limit(self, limit: int) -> None:
        self.limit = limit
        self._loop.call_soon_threadsafe(self._service.set_limit, limit)

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run in the loop and wait; in short steps, so that a signal's handler runs in this (the main) thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
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
