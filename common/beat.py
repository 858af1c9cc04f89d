"""The keeper's clock: Celery's beat, on the monotonic clock."""

import time

from celery.beat import Scheduler

from common.broker import KEEP_SECONDS


class Steady(Scheduler):
    """Sends the entries of the schedule every KEEP_SECONDS.

    Celery's own schedulers go by the time of day: when that was set back by an hour, the keeper was not called for one.
    """

    _due = 0.0

    def tick(self) -> float:  # type: ignore[override]
        """Send what is due; answers the seconds until the next call."""
        now = time.monotonic()
        if now < self._due:
            return self._due - now
        self._due = now + KEEP_SECONDS
        for entry in list(self.schedule.values()):
            self.apply_entry(self.reserve(entry), producer=self.producer)  # type: ignore[arg-type]
        return KEEP_SECONDS

    def install_default_entries(self, data: object) -> None:
        """None: Celery's clean up a backend of results, and there is none."""
