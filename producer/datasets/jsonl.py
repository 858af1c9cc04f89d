"""Reads a JSONL source from a cursor on: lines are split at newlines alone, a blank line is no row."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

_BOM = b"\xef\xbb\xbf"


class Cursor(msgspec.Struct, frozen=True):
    """Where the next row begins: its index, and its byte in the file."""

    index: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """The cursor as the ledger keeps it; an empty text is the start."""
        return msgspec.json.decode(text, type=cls) if text else cls()

    def text(self) -> str:
        """As the ledger keeps it."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the source, and the cursor behind it."""

    index: int
    line: bytes
    after: Cursor


def read_rows(path: Path, start: Cursor) -> Iterator[Row]:
    """The rows from `start` on, read as they are asked for; raises OSError."""
    index, offset = start.index, start.offset
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            line = (raw if offset else raw.removeprefix(_BOM)).strip()
            offset += len(raw)
            if line:
                yield Row(index, line, Cursor(index + 1, offset))
                index += 1
