"""JSON lines: split at newlines alone, a blank line is no row."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from producer.datasets.cursor import Cursor, Row, too_long

if TYPE_CHECKING:  # fsspec comes with it, which takes a third of the start of a process of an audit
    from producer.datasets.compressed import Text

BOM = b"\xef\xbb\xbf"


def lines(chunks: Iterator[bytes], offset: int, limit: int) -> Iterator[tuple[bytes | None, int]]:
    """Each line, with its newline if it has one, and the byte behind it; None for a line of more than `limit` bytes."""
    kept: list[bytes] = []  # of the line that is not complete
    held = 0  # its bytes, those that were let go included
    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start) + 1) > 0:
            size = held + end - start
            offset += size
            piece = chunk[start:end]
            yield (None if size > limit else b"".join((*kept, piece)) if held else piece), offset
            kept.clear()
            held, start = 0, end
        held += len(chunk) - start
        if held > limit:
            kept.clear()
        elif start < len(chunk):
            kept.append(chunk[start:])
    if held:
        yield (None if held > limit else b"".join(kept)), offset + held


def rows(text: "Text", start: Cursor, limit: int) -> Iterator[Row]:
    """The rows of `text` from `start` on. Raises OSError, DataError."""
    at, first = start, start.offset == 0
    for line, end in lines(text.chunks(start.offset), start.offset, limit):
        if line is None:
            at = at.behind(end)
            yield Row(at.index - 1, too_long(limit), at, limit)
        elif value := (line.removeprefix(BOM) if first else line).strip():
            at = at.behind(end)
            yield Row(at.index - 1, value, at, len(value))
        first = False
