"""The feed: the next rows of a source, rendered, tokenized, and put into the queue.

Rows are read as they are needed: those beyond the budget are never tokenized. The ledger's cursor moves only from where
this feed found it, so that two feeds of one dataset cannot both queue a row.
"""

import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from celery import Celery
from redis.exceptions import LockError
from redis.lock import Lock

from common.broker import Sender
from common.chat_template import Tokenizer
from common.errors import DataError, TokenizerUnavailable
from common.ledger import OPEN_STATES, DatasetState, Ending, Ledger, NextTurn
from common.logs import about
from common.payload import Packer
from common.rejects import append_rejects
from common.sections import DatasetSettings
from common.settings import Settings
from producer.conversations import Turns
from producer.datasets.containers import Cursor, Reader, Row
from producer.datasets.row_table import ShuffledReader
from producer.datasets.standard_input import source_of
from producer.dedupe import without_duplicates
from producer.prepare import Chunk, Limits, prepare
from producer.sources import Source, keep_source, look, read_source, shuffled_reader

log = logging.getLogger(__name__)
# Rows that are rendered and encoded together. A long row's ids take some ten times its bytes while they are made.
# Of short rows many: each chunk looks at the source anew, asks Redis four times, and has one core idle at its ends.
_CHUNK_ROWS, _CHUNK_BYTES = 1024, 8_000_000
# Answers that are followed together: each comes with a whole conversation.
_FOLLOWED = 64
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
            log.error("%s: %s", dataset, error, extra=about(dataset))
            self._ledger.transition(dataset, "failed", OPEN_STATES, str(error))
            return 0
        except OSError as error:
            # The cursor has not moved, so the next feed finds the same rows.
            log.error("%s: its files cannot be written, trying again: %s", dataset, error, extra=about(dataset))
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
        deadline = time.monotonic() + _TURN_SECONDS
        fed, nothing_sent = 0, False
        while time.monotonic() < deadline:
            with contextlib.suppress(LockError):  # as below
                lock.reacquire()
            state = self._ledger.snapshot(dataset)
            nothing_sent = state.sent == 0
            wanted = min(state.window, state.room) - state.queued
            if state.state != "open" or (state.ended and not state.answers) or wanted <= 0:
                break
            # Answers first: that ends conversations, and so bounds what is kept of them.
            step = self._follow if state.answers else self._feed_chunk
            queued = step(state, model, min(_CHUNK_ROWS, wanted))
            if queued is None:
                break
            fed += queued
        if fed and nothing_sent:
            self._sender.keep()  # nothing is on its way to the workers: its next tick would be late
        return fed

    def _reader(self, dataset: DatasetSettings, known: Source | None) -> tuple[Reader | ShuffledReader, Source | None]:
        """What reads the rows of `dataset`, and what counts as read where that is all of its source."""
        if dataset.shuffle is not None:
            return shuffled_reader(self._settings.output, dataset, known)
        source = source_of(self._settings.output, dataset)
        reader = self._readers.get(dataset.name)
        if reader is None or (reader.source, reader.max_row_bytes) != (source, dataset.max_row_bytes):
            reader = self._readers[dataset.name] = Reader(source, dataset.max_row_bytes)
        return reader, None

    def _feed_chunk(self, state: DatasetState, model: Mapping[str, Any], rows: int) -> int | None:
        """One step of the cursor; None if another feed took it."""
        dataset, limits = self._dataset(state, model)
        cursor = Cursor.parse(state.cursor)
        known = read_source(self._settings.output, state.name)
        reader, whole = self._reader(dataset, known)
        limit = sys.maxsize if dataset.limit is None else dataset.limit
        taken, ended, seen = _take(reader, cursor, min(rows, limit - cursor.index), known, whole)
        after = taken[-1].after if taken else cursor
        ended = ended or after.index >= limit
        if ended:
            self._readers.pop(state.name, None)  # and close its file
        turns, chunk = self._prepare(dataset, limits, taken)
        keep_source(self._settings.output, state.name, seen, known)  # before any of its rows can have a record
        if chunk.rejects:
            append_rejects(self._settings.output, state.name, chunk.rejects)
        begun = self._ledger.converse(state.name, turns, before=state.cursor) if turns else 0
        if begun is None:
            return None
        fed = self._ledger.feed(
            state.name,
            before=state.cursor,
            after=after.text(),
            ended=ended,
            rejected=[(reject.index, reject.reason) for reject in chunk.rejects],
            samples=chunk.samples,
            prompts=chunk.prompts if dataset.count == "total" else None,
        )
        return None if fed is None else fed + begun

    def _prepare(
        self, dataset: DatasetSettings, limits: Limits, rows: Sequence[Row]
    ) -> tuple[Sequence[NextTurn | Ending], Chunk]:
        """The samples of rows that are not done; of conversations that are made turn by turn the turn that is due."""
        assert self._tokenizer is not None
        if dataset.turns == "all":
            return Turns(dataset, limits, self._packer, self._tokenizer).of_rows(rows, self._ledger)
        done = self._ledger.done_among(dataset.name, [row.index for row in rows])
        untold = self._ledger.untold(dataset.name, done) if dataset.dedupe else set()
        rows = [row for row in rows if row.index not in done or row.index in untold]
        chunk = prepare(rows, dataset, self._tokenizer, limits, self._packer)
        return [], without_duplicates(chunk, dataset, self._ledger, self._packer, untold) if dataset.dedupe else chunk

    def _follow(self, state: DatasetState, model: Mapping[str, Any], limit: int) -> int | None:
        """Queue the turns behind answers that wait for them; None if another feed has read on meanwhile."""
        assert self._tokenizer is not None
        turns = Turns(*self._dataset(state, model), self._packer, self._tokenizer)
        answered = self._ledger.answered(state.name, min(limit, _FOLLOWED))
        return self._ledger.converse(state.name, turns.behind(answered), before=state.cursor)

    def _dataset(self, state: DatasetState, model: Mapping[str, Any]) -> tuple[DatasetSettings, Limits]:
        """Its settings, and what its prompts must keep to."""
        spec = msgspec.convert(state.spec, dict)
        dataset = DatasetSettings(**spec)
        sampling = self._settings.sampling_of(dataset)
        return dataset, Limits(model["vocab_size"], model.get("context_length"), sampling.max_new_tokens, sampling.fit)


def _take(
    reader: Reader | ShuffledReader, cursor: Cursor, rows: int, known: Source | None, whole: Source | None
) -> tuple[list[Row], bool, Source]:
    """The next `rows` rows, or fewer where they are long; whether the source ends with them; what was read by then.

    `whole` is what counts as read of a source whose rows are not read in its order.
    """
    taken: list[Row] = []
    size, ended = 0, True
    try:
        if (read := known or whole) and (change := read.change(reader.source)):
            raise _SourceUnreadable(
                f"its source {reader.source} was replaced after it was read: {change}; put the earlier file back and "
                "start it again, or stop everything and go on with --accept-changes"
            )
        try:
            for row in itertools.islice(reader.rows(cursor), max(0, rows)):
                taken.append(row)
                size += row.size
                if len(taken) == rows or size >= _CHUNK_BYTES:
                    ended = False
                    break
        except (OSError, DataError):
            if not taken:
                raise
            ended = False  # what was read before it counts first; the next step meets the fault again
        after = taken[-1].after if taken else cursor
        return taken, ended, whole or look(reader.source, after, None if ended else known)
    except OSError as error:
        raise _SourceUnreadable(
            f"its source {reader.source} cannot be read: {error.strerror or error}; correct that and start it again"
        ) from error
