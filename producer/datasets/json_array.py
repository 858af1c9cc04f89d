"""Values of JSON that do not stand on a line each: the elements of one array, or whole documents.

A row is found by counting brackets outside strings, and handed on as it stands: so one that is damaged inside is
rejected by itself, and the file can be read on from the byte behind any row. ijson would parse each value into objects
and tell no bytes. Only brackets that do not match take the rows behind them along.
"""

import re
from collections.abc import Iterator

from common.errors import DataError
from producer.datasets.compressed import Text
from producer.datasets.cursor import Cursor, Row, too_long
from producer.datasets.jsonl import BOM

# A string and, unless the piece ends before it, its closing quote; or what else counts.
_STRING = rb'"(?:[^"\\]++|\\.)*+(")?'
_INNER = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_ARRAY = re.compile(_STRING + rb"|[\[\]{},]", re.DOTALL)
_DOCUMENTS = re.compile(_STRING + rb"|[\[\]{}\n]", re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)
_QUOTE, _OPENING, _CLOSING, _BACKSLASH = b'"'[0], b"{[", b"]}", b"\\"[0]


def rows(text: Text, start: Cursor, limit: int, *, array: bool) -> Iterator[Row]:
    """The elements of the array that `text` is, or its documents, from `start` on. Raises OSError, DataError."""
    scanner, at = _Scanner(array=array), start
    kept: list[bytes] = []  # of the row that is not complete
    held, end = 0, start.offset  # its bytes, those that were let go included; the byte behind all that was scanned
    for chunk in _opened(text, start.offset, array=array):
        if scanner.is_closed():
            end = _refuse_more(text.where, chunk, end)
            continue
        begin = 0
        for stop in scanner.ends(chunk):
            held += stop - begin
            end += stop - begin
            raw = b"".join((*kept, chunk[begin:stop])) if held <= limit else b""
            value = _value(raw, array=array)
            if value or held > limit:
                # Behind the last element, not behind the blanks: another may be put there.
                blanks = len(raw) - len(raw.rstrip()) if scanner.is_closed() else 0
                at = at.behind(end - blanks)
                yield Row(at.index - 1, value or too_long(limit), at, len(value) or limit)
            kept.clear()
            held, begin = 0, stop
        if scanner.is_closed():
            end = _refuse_more(text.where, chunk[begin:].removeprefix(b"]"), end + 1)
            continue
        held += len(chunk) - begin
        end += len(chunk) - begin
        if held > limit:
            kept.clear()
        else:
            kept.append(chunk[begin:])
    if scanner.depth > scanner.top or scanner.in_string or (array and not scanner.is_closed()):
        raise DataError(
            f"{text.where} is cut off: it ends at byte {end:,} within row {at.index:,}; "
            "all rows before it were read; put a whole copy in its place"
        )
    if value := _value(b"".join(kept), array=array):
        at = at.behind(end)
        yield Row(at.index - 1, value, at, len(value))


def first_element(head: bytes) -> bytes | None:
    """The first element of the array that begins with `head`, which may be empty; None if it does not end there."""
    behind = head[1:]
    stop = next(_Scanner(array=True).ends(behind), None)
    return None if stop is None else _value(behind[:stop], array=True)


def _opened(text: Text, offset: int, *, array: bool) -> Iterator[bytes]:
    """The pieces from `offset` on, BOM and opening bracket blanked out, so that each byte keeps its place."""
    chunks = text.chunks(offset)
    if offset == 0:
        head = b""
        while len(head) <= len(BOM) or not head.removeprefix(BOM).strip():  # a frame of Zstandard may hold a BOM alone
            if not (chunk := next(chunks, b"")):
                break
            head += chunk
        if head.startswith(BOM):
            head = b"   " + head[3:]
        yield head.replace(b"[", b" ", 1) if array else head
    yield from chunks


def _value(raw: bytes, *, array: bool) -> bytes:
    value = raw.strip()
    return value.removesuffix(b",").rstrip() if array else value


def _refuse_more(where: str, rest: bytes, end: int) -> int:
    """The byte behind `rest`, which follows the array's bracket."""
    if rest.strip():
        raise DataError(f"{where} goes on behind the array that ends near byte {end:,}; all its rows were read")
    return end + len(rest)


class _Scanner:
    """Where rows end, in pieces of a file that are given one after the other."""

    def __init__(self, *, array: bool) -> None:
        self.top = self.depth = 1 if array else 0  # between rows
        self.in_string = self._closed = False
        self._escaped = False  # the last piece ended with the backslash of an escape
        self._outer = _ARRAY if array else _DOCUMENTS

    def is_closed(self) -> bool:
        """Whether the array has ended."""
        return self._closed

    def ends(self, chunk: bytes) -> Iterator[int]:
        """The position behind each row that ends in `chunk`, its comma included, the array's bracket not."""
        at = 0
        if self.in_string:
            at = self._behind_string(chunk)
        while not self.in_string:
            found = (self._outer if self.depth == self.top else _INNER).search(chunk, at)
            if found is None:
                return
            at = found.end()
            token = chunk[found.start()]
            if token == _QUOTE:
                self._note_end(chunk, at, ended=found.lastindex is not None)
            elif token in _OPENING:
                self.depth += 1
            elif token not in _CLOSING:
                yield at
            elif self.depth > self.top:
                self.depth -= 1
                if self.depth == self.top == 0:
                    yield at
            elif self.top:
                self._closed = True
                yield at - 1
                return

    def _behind_string(self, chunk: bytes) -> int:
        found = _REST_OF_STRING.match(chunk, 1 if self._escaped else 0)
        assert found  # it matches nothing at least
        self._note_end(chunk, found.end(), ended=found.lastindex is not None)
        return found.end()

    def _note_end(self, chunk: bytes, at: int, *, ended: bool) -> None:
        self.in_string = not ended
        self._escaped = not ended and at < len(chunk)
