"""Logging of the processes that Celery runs: one line a message, on standard error."""

import logging
import os
import warnings
from typing import Any

from celery import Celery, signals

from common.parent import end_with_parent

# They log 40 lines of traceback a second for as long as Redis refuses writes.
_TALKATIVE = ("celery.beat", "kombu.asynchronous.timer")
# What these say at INFO is for people: the limits of the servers, and why; a server that is back.
_OURS = ("common", "workers", "producer")


def set_up(app: Celery) -> None:
    """Our lines in place of Celery's: its per-task lines and banner are not wanted at 1,000 tasks a second."""
    del app  # its signals are global; it is taken so that this is called where an application is made
    signals.setup_logging.connect(_log_to_stderr, weak=False)
    signals.worker_init.connect(_follow_the_parent, weak=False)
    signals.beat_embedded_init.connect(_follow_the_worker, weak=False)
    # Celery warns of pickle as root; nothing here accepts pickle.
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    # Said at each lost connection, of a setting that common/broker.py makes.
    warnings.filterwarnings("ignore", message=r"\s*In Celery 5\.1 we introduced an optional breaking change")


def _log_to_stderr(**_: Any) -> None:
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(one_line)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def one_line(record: logging.LogRecord) -> bool:
    """Cut a record down to its first line, without a traceback."""
    record.msg, record.args = next(iter(record.getMessage().splitlines()), ""), ()
    record.exc_info = record.exc_text = record.stack_info = None
    return True


def _follow_the_parent(**_: Any) -> None:
    end_with_parent()


def _follow_the_worker(**_: Any) -> None:
    """In the process that Celery starts for beat: a killed worker would leave it behind, ticking for nobody."""
    end_with_parent(os.getppid())
