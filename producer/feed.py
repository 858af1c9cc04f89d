"""The feed: the next rows of a source, rendered, tokenized, and put into the queue.

Rows are read as they are needed: those beyond the budget are never tokenized. The ledger's cursor moves only from where
this feed found it, so that two feeds of one dataset cannot both queue a row.
"""

import contextlib
import logging
import time

import msgspec
from celery import Celery
from redis.exceptions import LockError
from redis.lock import Lock

from common.broker import Sender
from common.chat_template import Tokenizer
from common.errors import DataError, TokenizerUnavailable
from common.ledger import OPEN_STATES, DatasetState, Ledger
from common.payload import Packer
from common.rejects import append_rejects
from common.sections import DatasetSettings
from common.settings import Settings
from producer.datasets.containers import Cursor, Reader, Row
from producer.datasets.standard_input import source_of
from producer.prepare import Limits, prepare
from producer.sources import Source, keep_source, look, read_source

log = logging.getLogger(__name__)
# Rows that are rendered and encoded together. A long row's ids take some ten times its bytes while they are made.
_CHUNK_ROWS, _CHUNK_BYTES = 128, 8_000_000
# A feed that takes longer leaves the rest to the next one, so that every dataset gets its turn.
_TURN_SECONDS = 5.0
# Renewed with each chunk. What a feed that was killed leaves locked is not fed for so long.
_LOCK_SECONDS = 10.0


class _SourceUnreadable(Exception):
    """The message is the reason that `status` shows."""


class Feeder:
    """Feeds datasets, one call at a time; keeps the tokenizer loaded between calls."""

    def __init__(self, settings: Settings, app: Celery, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._sender = Sender(app)
        self._packer = Packer()
        self._tokenizer: Tokenizer | None = None
        self._readers: dict[str, Reader] = {}

    def feed(self, dataset: str) -> int:
        """Queue rows of `dataset` until its window is full, its source ends or the turn is over; answers how many."""
        lock = self._ledger.feeding(dataset, _LOCK_SECONDS)
        if not lock.acquire():
            return 0
        try:
            return self._feed(dataset, lock)
        except (_SourceUnreadable, TokenizerUnavailable, DataError) as error:
            log.error("%s: %s", dataset, error)
            self._ledger.transition(dataset, "failed", OPEN_STATES, str(error))
            return 0
        except OSError as error:
            # The cursor has not moved, so the next feed finds the same rows.
            log.error("%s: its files cannot be written, trying again: %s", dataset, error)
            return 0
        finally:
            with contextlib.suppress(LockError):  # ran out: the cursor guards what the lock no longer does
                lock.release()

    def _feed(self, dataset: str, lock: Lock) -> int:
        model = self._ledger.model()
        if model is None:
            return 0  # `run` and `enqueue` write it first; without it no prompt can be checked
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._settings.tokenizer)
        sampling = self._settings.sampling
        limits = Limits(model["vocab_size"], model.get("context_length"), sampling.max_new_tokens, sampling.fit)
        deadline = time.monotonic() + _TURN_SECONDS
        fed, nothing_sent = 0, False
        while time.monotonic() < deadline:
            with contextlib.suppress(LockError):  # as below
                lock.reacquire()
            state = self._ledger.snapshot(dataset)
            nothing_sent = state.sent == 0
            wanted = min(state.window, state.room) - state.queued
            if state.state != "open" or state.ended or wanted <= 0:
                break
            queued = self._feed_chunk(state, limits, min(_CHUNK_ROWS, wanted))
            if queued is None:
                break
            fed += queued
        if fed and nothing_sent:
            self._sender.keep()  # nothing is on its way to the workers: its next tick would be late
        return fed

    def _feed_chunk(self, state: DatasetState, limits: Limits, rows: int) -> int | None:
        """One step of the cursor; None if another feed took it."""
        spec = msgspec.convert(state.spec, dict)
        dataset = DatasetSettings(**spec)
        cursor = Cursor.parse(state.cursor)
        known = read_source(self._settings.output, state.name)
        source = source_of(self._settings.output, dataset)
        reader = self._readers.get(state.name)
        if reader is None or (reader.source, reader.max_row_bytes) != (source, dataset.max_row_bytes):
            reader = self._readers[state.name] = Reader(source, dataset.max_row_bytes)
        taken, ended, seen = _take(reader, cursor, rows, known)
        if ended:
            del self._readers[state.name]  # and close its file
        after = taken[-1].after if taken else cursor
        assert self._tokenizer is not None
        done = self._ledger.done_among(state.name, cursor.index, after.index - cursor.index)
        chunk = prepare([row for row in taken if row.index not in done], dataset, self._tokenizer, limits, self._packer)
        keep_source(self._settings.output, state.name, seen, known)  # before any of its rows can have a record
        if chunk.rejects:
            append_rejects(self._settings.output, state.name, chunk.rejects)
        return self._ledger.feed(
            state.name,
            before=state.cursor,
            after=after.text(),
            ended=ended,
            rejected=[(reject.index, reject.reason) for reject in chunk.rejects],
            samples=chunk.samples,
            prompts=chunk.prompts if dataset.count == "total" else None,
        )


def _take(reader: Reader, cursor: Cursor, rows: int, known: Source | None) -> tuple[list[Row], bool, Source]:
    """The next `rows` rows, or fewer where they are long; whether the source ends with them; what was read by then."""
    taken: list[Row] = []
    size, ended = 0, True
    try:
        if known and (change := known.change(reader.source)):
            raise _SourceUnreadable(
                f"its source {reader.source} was replaced after it was read: {change}; put the earlier file back and "
                "start it again, or stop everything and go on with --accept-changes"
            )
        try:
            for row in reader.rows(cursor):
                taken.append(row)
                size += row.size
                if len(taken) == rows or size >= _CHUNK_BYTES:
                    ended = False
                    break
        except (OSError, DataError):
            if not taken:
                raise
            ended = False  # what was read before it counts first; the next step meets the fault again
        return taken, ended, look(reader.source, taken[-1].after if taken else cursor, None if ended else known)
    except OSError as error:
        raise _SourceUnreadable(
            f"its source {reader.source} cannot be read: {error.strerror or error}; correct that and start it again"
        ) from error
