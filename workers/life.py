"""One worker's life as people see it: where it runs, since when, and how it was told to end."""

import logging
import math
import os
import signal
import socket
import time
from typing import Any, Literal

from common.ledger import Order
from common.processes import began

log = logging.getLogger(__name__)


class Life:
    """`state` is waiting (nothing was enqueued yet), working, draining or stopping.

    `dismissed` says that a person has told it to end: whoever has started it does not start it again.
    """

    def __init__(self, drain_seconds: float) -> None:
        self.drain_seconds = drain_seconds
        self.dismissed = False
        self.state: Literal["waiting", "working", "draining", "stopping"] = "waiting"
        self._since = round(time.time(), 3)
        self._began = began(os.getpid())

    def facts(self) -> dict[str, Any]:
        """What every heartbeat tells of it; `since` in seconds since the epoch, `began` by common/processes.py."""
        where = {"host": socket.gethostname(), "pid": os.getpid(), "began": self._began}
        return {**where, "since": self._since, "state": self.state}

    @property
    def ending(self) -> bool:
        """Whether it takes nothing new."""
        return self.state in {"draining", "stopping"}

    def end(self) -> None:
        """A signal asks it to end."""
        if not self.ending:
            self.state = "stopping"

    def obey(self, order: Order) -> None:
        """What `tokenmill workers drain` and `stop` ask for. A second one does not wait for what is in flight."""
        if self.state != "draining":
            self.state = "draining" if order == "drain" else "stopping"
        if order == "drain":
            self.drain_seconds = math.inf
        self.dismissed = True
        log.warning("told to %s", "end when what is in flight has ended" if order == "drain" else "end")
        # As if it came from outside: Celery stops consuming, then the pool.
        os.kill(os.getpid(), signal.SIGTERM)
