"""Logging of the processes that run for days: one line an event, on standard error.

On a terminal a line is for people; elsewhere, and with TOKENMILL_LOG_FORMAT=json, it is one JSON object:
`at` (UTC), `level`, `logger`, `message`, then where they apply `dataset`, `index`, `server`, `repeated`, `traceback`.
What repeats is told a few times, and at the end of a burst how often it was not.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec

from common.records import timestamp

FORMAT = "TOKENMILL_LOG_FORMAT"
# They log 40 lines of traceback a second for as long as Redis refuses writes.
_TALKATIVE = ("celery.beat", "kombu.asynchronous.timer")
# What these say at INFO is for people: the limits of the servers, and why; a server that is back.
_OURS = ("common", "workers", "producer")
# Fields of a record that stand in its JSON by themselves; see `about`.
_FIELDS = ("dataset", "index", "server", "repeated")
# So many lines of one kind within so many seconds are told; the others are counted.
_MOST_REPEATS = 5
_BURST_SECONDS = 10.0


def about(dataset: str | None = None, index: int | None = None, server: str | None = None) -> Mapping[str, Any]:
    """What a message is about, for `extra`: `log.warning("...", extra=about("B1", 7))`."""
    given = {"dataset": dataset, "index": index, "server": server}
    return {name: value for name, value in given.items() if value is not None}


def log_to_stderr(**_: Any) -> None:
    """Let this process log as the module says; takes what Celery's signal gives."""
    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(one_line)
    handler = Lines(sys.stderr)
    as_json = os.environ.get(FORMAT, "text" if sys.stderr.isatty() else "json") == "json"
    handler.setFormatter(Json() if as_json else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Json(logging.Formatter):
    """One JSON object a record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "at": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told, enc_hook=str).decode()


@dataclass(slots=True)
class _Burst:
    """What one kind of message has said since `since`, and the last of those that were held back."""

    since: float
    told: int
    held: int = 0
    last: logging.LogRecord | None = None


class Lines(logging.StreamHandler[TextIO]):
    """Writes records, of one kind no more than some within a burst; then one that says how many there were.

    Of one kind are those of one logger, level and message with the same text in it, and about the same dataset; numbers
    and errors differ from one to the next.
    """

    def __init__(self, stream: TextIO, seconds: float = _BURST_SECONDS) -> None:
        super().__init__(stream)
        self._seconds = seconds
        self._bursts: dict[Any, _Burst] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        words = tuple(word for word in record.args if isinstance(word, str)) if isinstance(record.args, tuple) else ()
        kind = (record.name, record.levelno, str(record.msg), words, getattr(record, "dataset", None))
        now = time.monotonic()
        burst = self._bursts.get(kind)
        if burst is None or now - burst.since >= self._seconds:
            self._tell(kind)
            self._sweep(now)
            burst = self._bursts[kind] = _Burst(now, 0)
        if burst.told < _MOST_REPEATS:
            burst.told += 1
            super().emit(record)
            return
        burst.held += 1
        burst.last = record
        if burst.held == 1:
            timer = threading.Timer(burst.since + self._seconds - now, self._tell_later, (kind,))
            timer.daemon = True
            timer.start()

    def _sweep(self, now: float) -> None:
        for kind in [kind for kind, burst in self._bursts.items() if now - burst.since >= self._seconds]:
            self._tell(kind)

    def _tell_later(self, kind: Any) -> None:
        self.acquire()
        try:
            self._tell(kind)
        finally:
            self.release()

    def _tell(self, kind: Any) -> None:
        """The end of a burst: how often what it said was not told."""
        burst = self._bursts.pop(kind, None)
        if burst is None or burst.last is None:
            return
        last = burst.last
        text = f"{last.getMessage()} (repeated {burst.held} times)"
        told = logging.makeLogRecord(last.__dict__ | {"msg": text, "args": (), "repeated": burst.held})
        super().emit(told)

    def close(self) -> None:
        """Tell what was held back; logging calls this at the end of the process."""
        for kind in list(self._bursts):
            self._tell(kind)
        super().close()


def one_line(record: logging.LogRecord) -> bool:
    """Cut a record down to its first line, without a traceback."""
    record.msg, record.args = next(iter(record.getMessage().splitlines()), ""), ()
    record.exc_info = record.exc_text = record.stack_info = None
    return True


def last_words(text: str) -> str:
    """What a process that has ended said of why: the last error in its log, else its last line; empty if none says.

    What it told in passing (info) says nothing of that; of a warning its message is the line.
    """
    last = ""
    for line in reversed(text.strip().splitlines()):
        told = _told(line)
        level = None if told is None else told.get("level")
        if told is not None and level in {"error", "critical"}:
            return str(told.get("message"))
        if not last and level not in {"info", "debug"}:
            last = line if told is None or level is None else str(told.get("message"))
    return last


def _told(line: str) -> dict[str, Any] | None:
    """What a line of such a log says; None where it is none."""
    try:
        told = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return None
    return told if isinstance(told, dict) else None
