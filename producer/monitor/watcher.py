"""A thread that takes a snapshot a second, so that a slow or dead Redis does not hold up the screen."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from common.ledger import Ledger
from producer.status import snapshot


class Watcher(threading.Thread):
    """Tells `on_seen` each snapshot, and `on_lost` in a sentence why there is none; both are called in the thread."""

    def __init__(
        self,
        ledger: Ledger,
        on_seen: Callable[[Mapping[str, Any]], object],
        on_lost: Callable[[str], object],
        every_seconds: float = 1.0,
    ) -> None:
        super().__init__(name="watcher", daemon=True)  # a call to a frozen Redis must not hold up the end
        self._ledger = ledger
        self._on_seen = on_seen
        self._on_lost = on_lost
        self._every_seconds = every_seconds
        self._stop_asked = threading.Event()
        self._now = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        while not self._stop_asked.is_set():
            try:
                self._on_seen(snapshot(self._ledger))
            except redis.RedisError as error:
                self._on_lost(f"Redis does not answer ({error})")
            except Exception as error:  # noqa: BLE001 - the thread's boundary: without it the screen would stand still
                self._on_lost(f"what Redis holds cannot be read ({type(error).__name__}: {error})")
            due = max(due + self._every_seconds, time.monotonic())
            self._now.wait(due - time.monotonic())
            self._now.clear()

    def look_now(self) -> None:
        """Take the next snapshot at once: something was changed."""
        self._now.set()

    def stop(self) -> None:
        """End after the call that is under way."""
        self._stop_asked.set()
        self._now.set()
