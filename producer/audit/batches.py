"""The two files of a batch of OpenAI's: requests in NAME.input.jsonl, answers in NAME.output.jsonl, by `custom_id`.

A server may answer in any order. So the requests are gone through once for a digest of each `custom_id` and where its
line begins, 16 bytes a request, and are read again one by one as the answers come.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from producer.audit.answer_objects import asked_in
from producer.datasets.compressed import Text
from producer.datasets.containers import Cursor, Row, rows_of
from producer.datasets.jsonl import BOM, lines
from producer.datasets.kinds import kind_of
from producer.datasets.places import is_url
from producer.datasets.reasons import NOT_JSON

INPUT, OUTPUT = ".input.jsonl", ".output.jsonl"
_PIECE_BYTES = 64 * 1024


class _Id(msgspec.Struct):
    custom_id: str


_id_of = msgspec.json.Decoder(_Id).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Batch(msgspec.Struct, frozen=True):
    """The requests of a batch, and their answers."""

    requests: str
    answers: str


def paired(files: Sequence[str]) -> list[str | Batch]:
    """The files of a source, those of a batch together. These are files of this machine, not compressed.

    Raises OSError.
    """
    answers = {file.removesuffix(OUTPUT) for file in files if file.endswith(OUTPUT) and not is_url(file)}
    names = {name for file in files if (name := file.removesuffix(INPUT)) in answers and _has_requests(file)}
    requests = {name + INPUT for name in names}
    batches = {name + OUTPUT: Batch(name + INPUT, name + OUTPUT) for name in names}
    return [batches.get(file, file) for file in files if file not in requests]


def _has_requests(file: str) -> bool:
    """Others have files of these names, too: questions and answers by line."""
    with open(file, "rb") as head:  # noqa: PTH123  it may be any text that names a file
        return b'"custom_id"' in head.read(_PIECE_BYTES)


class Unpaired:
    """How many requests of a batch have no answer, and how many answers no request; known once all rows are read."""

    def __init__(self) -> None:
        self.requests = self.answers = 0


def rows_in(file: str | Batch, start: Cursor, limit: int, unpaired: Unpaired) -> Iterator[Row]:
    """The rows of one file of a source, from its beginning; of a batch, each answer with its request.

    `start` is their first index and number. Raises OSError, DataError.
    """
    if isinstance(file, str):
        kind = kind_of(file)
        return rows_of(Text(file, kind.compression), kind.layout, start, limit)
    return _joined(file, start, limit, unpaired)


def _joined(batch: Batch, start: Cursor, limit: int, unpaired: Unpaired) -> Iterator[Row]:
    with open(batch.requests, "rb") as file:  # noqa: PTH123  it may be any text that names a file
        requests = _Requests(file, limit)
        kind = kind_of(batch.answers)
        for row in rows_of(Text(batch.answers, kind.compression), kind.layout, start, limit):
            answer = _object_in(row.value)
            if answer is None:
                yield row
                continue
            asked, size = requests.of(answer.get("custom_id"))
            unpaired.answers += asked is None
            yield msgspec.structs.replace(row, value={**(asked or {}), **answer}, size=row.size + size)
        unpaired.requests += requests.unanswered


def _object_in(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, bytes):
        return None
    try:
        return _decode(value)
    except NOT_JSON:
        return None


class _Requests:
    """The lines of an open file of requests, each found by its custom_id."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        digests, places = array("q"), array("q")
        begin = 0
        for line, end in lines(iter(lambda: file.read(_PIECE_BYTES), b""), 0, limit):
            try:
                digests.append(hash(_id_of((line or b"").removeprefix(BOM)).custom_id))
                places.append(begin)
            except NOT_JSON:
                pass  # it is a request of nobody
            begin = end
        kept = np.frombuffer(digests, np.int64)
        order = np.argsort(kept, kind="stable")
        self._digests, self._places = kept[order], np.frombuffer(places, np.int64)[order]
        self._answered = np.zeros(len(order), np.bool_)

    def of(self, custom_id: Any) -> tuple[dict[str, Any] | None, int]:
        """What was asked under this id, as columns of a row, and the bytes of its line; None if nothing was."""
        if isinstance(custom_id, str):
            at = int(np.searchsorted(self._digests, hash(custom_id)))
            while at < len(self._digests) and self._digests[at] == hash(custom_id):
                self._file.seek(int(self._places[at]))
                line = self._file.readline(self._limit)
                found = _object_in(line.removeprefix(BOM))
                if found is not None and found.get("custom_id") == custom_id:
                    self._answered[at] = True
                    return asked_in(found), len(line)
                at += 1
        return None, 0

    @property
    def unanswered(self) -> int:
        return int(np.count_nonzero(~self._answered))
