"""Celery's workers as processes of ours: their log, their end, and what they wait for before they consume."""

import logging
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any, cast

import redis
from celery import Celery, bootsteps, signals
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.exceptions import KombuError

from common.logs import log_to_stderr
from common.parent import end_with_parent

log = logging.getLogger(__name__)
_PROBE_KEY = "tokenmill:takes-writes"
_PROBE_SECONDS = 1.0


def set_up(app: Celery) -> None:
    """Our lines in place of Celery's: its per-task lines and banner are not wanted at 1,000 tasks a second."""
    del app  # its signals are global; it is taken so that this is called where an application is made
    signals.setup_logging.connect(log_to_stderr, weak=False)
    signals.worker_init.connect(_follow_the_parent, weak=False)
    signals.beat_embedded_init.connect(_follow_the_worker, weak=False)
    # Celery warns of pickle as root; nothing here accepts pickle.
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    # Said at each lost connection, of a setting that common/broker.py makes.
    warnings.filterwarnings("ignore", message=r"\s*In Celery 5\.1 we introduced an optional breaking change")


def _follow_the_parent(**_: Any) -> None:
    end_with_parent()


def _follow_the_worker(**_: Any) -> None:
    """In the process that Celery starts for beat: a killed worker would leave it behind, ticking for nobody."""
    end_with_parent(os.getppid())


class TakesWrites(bootsteps.StartStopStep):
    """Consumes nothing until Redis takes writes: kombu pops a message, and then cannot note that it has it.

    Celery would connect anew five times a second, with some connections left over each time. It starts its steps at
    each new connection, and stops them when one failed, also one that it had not yet got past.
    """

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, parent: Consumer) -> None:
        """Wait, in Celery's main thread; a signal ends the wait."""
        self._wait(parent)
        state.maybe_shutdown()

    def stop(self, parent: Consumer) -> None:
        """The same before the next connection; at the end of the process there is nothing to wait for."""
        self._wait(parent)

    @staticmethod
    def _wait(consumer: Consumer) -> None:
        said = False
        while not _ends():
            try:
                with cast("Any", consumer).app.connection_for_write() as connection:
                    # Not its default_channel, which would connect again and again.
                    connection.channel().client.set(_PROBE_KEY, "", px=1)
            except redis.ResponseError as error:
                if not said:
                    log.error("Redis refuses writes (%s); nothing is consumed until it takes them", error)
                    said = True
                time.sleep(_PROBE_SECONDS)
            except (redis.RedisError, KombuError, OSError):
                return  # Celery sees to a lost connection itself
            else:
                if said:
                    log.warning("Redis takes writes again")
                return


def _ends() -> bool:
    """Whether a signal has asked this process to stop; the flags hold its exit code, which may be 0."""
    flags: tuple[Any, ...] = (state.should_stop, state.should_terminate)
    return any(flag is not None and flag is not False for flag in flags)


def run_celery(app: Celery, arguments: Sequence[str]) -> int:
    """Celery's `worker` command in this process; answers the exit code, which `app.start` drops."""
    # Not through celery.bin.celery: that loads every command, Flower and a shell of its own, a quarter of a second.
    from celery.bin.base import CLIContext  # noqa: PLC0415 - only what is a worker pays for it
    from celery.bin.worker import worker  # noqa: PLC0415

    context = CLIContext(app=app, no_color=True, workdir=None, quiet=True)
    code = worker.main(args=list(arguments), standalone_mode=False, obj=context)
    return code if isinstance(code, int) else 0
