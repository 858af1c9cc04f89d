"""The feed: the next rows of a source, rendered, tokenized, and put into the queue.

Rows are read as they are needed: those beyond the budget are never tokenized. The ledger's cursor moves only from where
this feed found it, so that two feeds of one dataset cannot both queue a row.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from celery import Celery
from redis.exceptions import LockError
from redis.lock import Lock

from common.broker import Sender
from common.chat_template import Tokenizer
from common.errors import DataError, TokenizerUnavailable
from common.ledger import OPEN_STATES, DatasetState, Ledger
from common.payload import Packer
from common.rejects import Reject, append_rejects
from common.sections import DatasetSettings
from common.settings import Settings
from producer.datasets.jsonl import Cursor, Row, read_rows
from producer.datasets.rows import BadRow, Prompt, convert
from producer.sources import Source, keep_source, look, read_source

log = logging.getLogger(__name__)
# Rows that are rendered and encoded together. A long row's ids take some ten times its bytes while they are made.
_CHUNK_ROWS, _CHUNK_BYTES = 128, 8_000_000
# A feed that takes longer leaves the rest to the next one, so that every dataset gets its turn.
_TURN_SECONDS = 5.0
# Renewed with each chunk. What a feed that was killed leaves locked is not fed for so long.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must keep to: ids below `vocab_size`, prompt and answer within `context_length` (None: unknown)."""

    vocab_size: int
    context_length: int | None
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows made ready: samples as (index, payload), their prompt tokens by index, and rejects."""

    samples: list[tuple[int, bytes]]
    prompts: dict[int, int]
    rejects: list[Reject]


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
        limits = Limits(model["vocab_size"], model.get("context_length"), self._settings.sampling.max_new_tokens)
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
        taken, ended, seen = _take(dataset.path, cursor, rows, known)
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


def _take(path: Path, cursor: Cursor, rows: int, known: Source | None) -> tuple[list[Row], bool, Source]:
    """The next `rows` rows, or fewer where they are long; whether the source ends with them; what was read by then."""
    taken: list[Row] = []
    size, ended = 0, True
    try:
        if known and (change := known.change(path)):
            raise _SourceUnreadable(
                f"its source {path} was replaced after it was read: {change}; put the earlier file back and start it "
                "again, or stop everything and go on with --accept-changes"
            )
        for row in read_rows(path, cursor):
            taken.append(row)
            size += len(row.line)
            if len(taken) == rows or size >= _CHUNK_BYTES:
                ended = False
                break
        return taken, ended, look(path, taken[-1].after if taken else cursor)
    except OSError as error:
        raise _SourceUnreadable(
            f"its source {path} cannot be read: {error.strerror or error}; correct that and start it again"
        ) from error


def prepare(
    rows: Sequence[Row], dataset: DatasetSettings, tokenizer: Tokenizer, limits: Limits, packer: Packer
) -> Chunk:
    """Rows to payloads; a row that cannot become a prompt is a reject, and costs the others nothing."""
    rejects: list[Reject] = []
    prompts: list[tuple[int, Prompt]] = []
    texts: list[str] = []
    for row in rows:
        try:
            prompt = convert(row.line, dataset)
            if prompt.input_ids is None:
                texts.append(_render(prompt, tokenizer))
            prompts.append((row.index, prompt))
        except BadRow as bad:
            rejects.append(_reject(row.index, bad))
    encoded = iter(tokenizer.encode(texts) if texts else [])
    samples: list[tuple[int, bytes]] = []
    tokens: dict[int, int] = {}
    for index, prompt in prompts:
        input_ids = next(encoded) if prompt.input_ids is None else prompt.input_ids
        try:
            _check(input_ids, limits, prompt)
            samples.append((index, packer.pack(input_ids, prompt.meta)))
            tokens[index] = len(input_ids)
        except BadRow as bad:
            rejects.append(_reject(index, bad))
    return Chunk(samples, tokens, rejects)


def _render(prompt: Prompt, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.render(prompt.messages, prompt.tools)
    except Exception as error:
        raise BadRow("template_error", f"the chat template cannot render it: {error}", prompt.meta.get("id")) from error


def _check(input_ids: Sequence[int], limits: Limits, prompt: Prompt) -> None:
    row_id = prompt.meta.get("id")
    if not input_ids:
        raise BadRow("bad_input_ids", "the prompt has no ids", row_id)
    try:
        msgspec.convert(input_ids, _known_ids(limits.vocab_size))
    except msgspec.ValidationError:
        raise BadRow("id_out_of_range", f"an id is not within 0 to {limits.vocab_size - 1}", row_id) from None
    if limits.context_length and len(input_ids) + limits.max_new_tokens > limits.context_length:
        raise BadRow(
            "too_long",
            f"{len(input_ids)} prompt tokens and max_new_tokens {limits.max_new_tokens} exceed the context of "
            f"{limits.context_length}",
            row_id,
        )


@cache
def _known_ids(vocab_size: int) -> Any:
    """The type of a list of ids of the vocabulary. To check 1,000 against it takes 10 us; min() and max() take 25."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _reject(index: int, bad: BadRow) -> Reject:
    return Reject(index=index, reason=bad.reason, detail=bad.detail, id=bad.row_id)
