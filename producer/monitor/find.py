"""Finds one record in the segments of a dataset without reading all of them.

The ledger numbers an attempt by the time of its claim, a segment is written in the order of time, and a record says
when it was made. So a record stands behind the place where its segment reaches the time of the claim, which is found
by bisection, and between them stands only what was answered while its sample was in flight: some hundred records,
whatever the size of the dataset. Where the ledger does not know the attempt, or clocks differ, everything is read.
"""

import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from common.ledger import Ledger
from common.records import VOID_PREFIX, Head, Voided
from common.segments import NOT_JSON, Entry, Line, lines, read, segment_paths

# By how much the clocks of Redis and of the workers may differ; NTP keeps them within milliseconds.
_SKEW_SECONDS = 5.0
# How near a bisection goes; what is left is read.
_NEAR_BYTES = 256 * 1024
_BLOCK_BYTES = 1024 * 1024
# Attempts are times since the year 2001; a smaller one comes from elsewhere.
_FIRST_TIME_MS = 10**12


class _Made(msgspec.Struct, frozen=True):
    index: int
    attempt: int
    created_at: str


_decode_made = msgspec.json.Decoder(_Made).decode


@dataclass(frozen=True, slots=True)
class Found:
    """The entry of the record that counts, if there is one; `superseded` are attempts whose record does not count."""

    entry: Entry | None
    superseded: tuple[int, ...] = ()


class Finder:
    """Looks into the segments of one dataset. Without a `ledger` the files say which record counts.

    `bytes_read` is what was read so far. Methods raise OSError, and redis.RedisError.
    """

    def __init__(self, output: Path, dataset: str, ledger: Ledger | None) -> None:
        self._dataset = dataset
        self._paths = segment_paths(output, dataset)
        self._ledger = ledger
        self.bytes_read = 0

    def by_index(self, index: int) -> Found:
        """The record of a sample."""
        if self._ledger is not None:
            state = self._ledger.sample(self._dataset, index)
            if state.done and state.attempt >= _FIRST_TIME_MS:
                entry = self._behind_claim(index, state.attempt)
                if entry is not None:
                    return Found(entry)
            elif not state.done and state.lost == 0:
                return Found(None)  # no attempt of it has ended
        return self._by_reading_all(index)

    def newest(self, flag: str | None = None) -> Entry | None:
        """The last record that counts, in the segment that was written last; with `flag` the last one that has it."""
        paths = sorted(self._paths, key=lambda path: path.stat().st_mtime, reverse=True)
        return self._first_that_counts((line for path in paths for line in lines_back(path)), flag)

    def drawn(self, flag: str | None = None) -> Entry | None:
        """The next record that counts behind a byte that is drawn evenly from all; with `flag` the next that has it."""
        sizes = [path.stat().st_size for path in self._paths]
        at = random.randrange(max(1, sum(sizes)))
        number = 0
        while number < len(sizes) and at >= sizes[number]:
            at -= sizes[number]
            number += 1
        around = [*self._paths[number + 1 :], *self._paths[: number + 1]]
        begun = lines(self._paths[number], at) if self._paths else iter(())
        return self._first_that_counts((line for part in (begun, *map(lines, around)) for line in part), flag)

    def _first_that_counts(self, candidates: Iterable[Line], flag: str | None) -> Entry | None:
        mark = None if flag is None else msgspec.json.encode(flag)
        for line in candidates:
            self.bytes_read += len(line.text)
            if mark is not None and mark not in line.text:
                continue
            entry = read(line, self._dataset)
            if (
                isinstance(entry, Entry)
                and isinstance(entry.what, Head)
                and (flag is None or flag in entry.what.flags)
                and self._counts(entry.what)
            ):
                return entry
        return None

    def _counts(self, head: Head) -> bool:
        if self._ledger is None:
            found = self._by_reading_all(head.index).entry
            return found is not None and found.what.attempt == head.attempt
        state = self._ledger.sample(self._dataset, head.index)
        return state.done and state.attempt == head.attempt

    def _behind_claim(self, index: int, attempt: int) -> Entry | None:
        """The record that `attempt` made; segments are read side by side, in the order of time."""
        since = attempt / 1000 - _SKEW_SECONDS
        ahead = sorted(
            (first, path, offset)
            for path in self._paths
            if path.stat().st_mtime >= since and (found := self._first_since(path, since)) is not None
            for first, offset in [found]
        )
        heap: list[tuple[float, int, int, Line, Iterator[Line]]] = []
        number = 0
        while heap or ahead:
            while ahead and (not heap or ahead[0][0] <= heap[0][0]):
                _, path, offset = ahead.pop(0)
                number = self._push(heap, lines(path, offset), number)
            if not heap:
                continue
            _, _, at, line, rest = heapq.heappop(heap)
            if at == index and isinstance(entry := read(line, self._dataset), Entry) and entry.what.attempt == attempt:
                return entry
            number = self._push(heap, rest, number)
        return None

    def _push(self, heap: list[tuple[float, int, int, Line, Iterator[Line]]], rest: Iterator[Line], number: int) -> int:
        for line in rest:
            self.bytes_read += len(line.text)
            if (made := _made(line)) is not None:
                heapq.heappush(heap, (_seconds(made), number, made.index, line, rest))
                break
        return number + 1

    def _first_since(self, path: Path, since: float) -> tuple[float, int] | None:
        """The time and the place of a record of the segment near its first one made at or after `since`."""
        low, high = 0, path.stat().st_size
        first = self._next_made(path, 0)
        if first is None or first[0] >= since:
            return first
        while high - low > _NEAR_BYTES:
            middle = (low + high) // 2
            found = self._next_made(path, middle)
            if found is None or found[0] >= since:
                high = middle
            else:
                low = found[1]
        return since, low

    def _next_made(self, path: Path, start: int) -> tuple[float, int] | None:
        """The time and the place of the first record that begins behind `start`, or at 0."""
        for number, line in enumerate(lines(path, start)):
            self.bytes_read += len(line.text)
            if (not start or number) and (made := _made(line)) is not None:
                return _seconds(made), line.offset
        return None

    def _by_reading_all(self, index: int) -> Found:
        needles = b'"index":%d' % index, b'"index": %d' % index
        records: dict[int, Entry] = {}
        voided: set[int] = set()
        for path in self._paths:
            for line in lines(path):
                self.bytes_read += len(line.text)
                if not any(needle in line.text for needle in needles):
                    continue
                entry = read(line, self._dataset)
                if isinstance(entry, Entry) and entry.what.index == index:
                    if isinstance(entry.what, Voided):
                        voided.add(entry.what.attempt)
                    else:
                        records.setdefault(entry.what.attempt, entry)
        standing = max(records.keys() - voided, default=None)
        if self._ledger is not None:
            state = self._ledger.sample(self._dataset, index)
            standing = state.attempt if state.done and state.attempt in records else None
        superseded = tuple(sorted(attempt for attempt in records if attempt != standing))
        return Found(None if standing is None else records[standing], superseded)


def lines_back(path: Path, block_bytes: int = _BLOCK_BYTES) -> Iterator[Line]:
    """The lines of a file from the last to the first, read so much at a time; their numbers are 0. Raises OSError."""
    with path.open("rb") as file:
        start = file.seek(0, 2)
        end_of_rest, rest = start, b""
        while start > 0:
            size = min(block_bytes, start)
            start -= size
            file.seek(start)
            rest = file.read(size) + rest
            while (newline := rest.rfind(b"\n", 0, len(rest) - 1)) >= 0:
                yield Line(path, 0, end_of_rest - (len(rest) - newline - 1), rest[newline + 1 :])
                end_of_rest -= len(rest) - newline - 1
                rest = rest[: newline + 1]
        if rest:
            yield Line(path, 0, 0, rest)


def _made(line: Line) -> _Made | None:
    """When the record of a line was made; None for a void, and for what is no record."""
    if line.torn or line.text.startswith(VOID_PREFIX):
        return None
    try:
        return _decode_made(line.text)
    except NOT_JSON:
        return None


def _seconds(made: _Made) -> float:
    try:
        return datetime.fromisoformat(made.created_at).timestamp()
    except ValueError:
        return 0.0
