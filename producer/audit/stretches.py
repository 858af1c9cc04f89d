"""A file of JSON lines in stretches of bytes, which several processes may read at once.

A stretch has the rows that begin in it, the last of them to its end, wherever that is: so it is cut without a look into
the file, and each row is in one stretch.
"""

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec

from producer.audit.part import Part
from producer.audit.sample import Candidates
from producer.datasets.cursor import too_long
from producer.datasets.jsonl import BOM, lines

# Of short rows some 6,000: what is sent of them is some 150 kB, and at the end no process waits long for another.
STRETCH_BYTES = 2 * 1024 * 1024
_PIECE_BYTES = 256 * 1024


class Stretch(msgspec.Struct, frozen=True):
    """The rows that begin at byte `start` or behind it, and before byte `end`, of this file of a source."""

    path: str
    start: int
    end: int
    file: int = 0


class Wanted(msgspec.Struct, frozen=True):
    """What is wanted of a stretch: rows for the sample that draw less than `below`, by this seed."""

    stretch: Stretch
    max_row_bytes: int
    sample_rows: int
    below: float
    seed: int


def stretches(path: str, size: int, file: int = 0) -> Iterator[Stretch]:
    """Those of a file of `size` bytes, which is number `file` of its source."""
    for start in range(0, size, STRETCH_BYTES):
        yield Stretch(path, start, min(start + STRETCH_BYTES, size), file)


def part_of(wanted: Wanted) -> Part:
    """What is seen in a stretch, up to an error if there is one. Raises OSError where nothing was seen."""
    part = Part(Candidates(wanted.sample_rows, wanted.below, wanted.seed), wanted.stretch.file)
    try:
        for value, size in _rows(wanted.stretch, wanted.max_row_bytes):
            part.take(value, size)
    except OSError as error:
        if not part.rows:
            raise
        part.error = error
    return part


def _rows(stretch: Stretch, limit: int) -> Iterator[tuple[object, int]]:
    """Each row and its bytes, as producer/datasets/jsonl.py has them."""
    # Without a buffer, which would lose what it has read where the next byte cannot be read.
    with Path(stretch.path).open("rb", buffering=0) as file:
        begin = _first(file, stretch)
        for line, end in lines(_pieces(file, begin), begin, limit) if begin < stretch.end else ():
            if line is None:
                yield too_long(limit), limit
            elif value := (line if begin else line.removeprefix(BOM)).strip():
                yield value, len(value)
            if end >= stretch.end:
                return
            begin = end


def _first(file: FileIO, stretch: Stretch) -> int:
    """Where the first line begins that begins in the stretch; its end if none does."""
    if not stretch.start:
        return 0
    at = stretch.start - 1  # a newline there ends the line before
    file.seek(at)
    while at < stretch.end and (piece := file.read(_PIECE_BYTES)):
        if (newline := piece.find(b"\n")) >= 0:
            return at + newline + 1
        at += len(piece)
    return stretch.end


def _pieces(file: FileIO, start: int) -> Iterator[bytes]:
    file.seek(start)
    while piece := file.read(_PIECE_BYTES):
        yield piece
