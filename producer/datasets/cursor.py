"""What every container of rows gives: a row, and the cursor behind it."""

from typing import Any

import msgspec

# A row of more bytes is rejected, so that a file whose one line has no end is read in bounded memory.
MAX_ROW_BYTES = 64 * 1024 * 1024


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the next row begins: its index in the source, the number of the file that it is in, and where there.

    `offset` is a byte of text as it is after decompression, and a row of Parquet and Arrow files.
    """

    index: int = 0
    file: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """The cursor as the ledger keeps it; an empty text is the start."""
        return msgspec.json.decode(text, type=cls) if text else cls()

    def text(self) -> str:
        """As the ledger keeps it."""
        return msgspec.json.encode(self).decode()

    def behind(self, offset: int) -> "Cursor":
        """The cursor behind the row that begins here and ends at `offset` of the same file."""
        return Cursor(self.index + 1, self.file, offset)


class BadLine(msgspec.Struct, frozen=True):
    """In place of a row that its container cannot give: `reason` is line_too_long, not_csv or bad_text."""

    reason: str
    detail: str


class Row(msgspec.Struct, frozen=True):
    """A row of the source, and the cursor behind it.

    `value` is the JSON as it stands in the file (bytes, not yet checked), a dict by column for CSV, Parquet and Arrow,
    or BadLine. `size` is about how many bytes it takes, or took to be read.
    """

    index: int
    value: bytes | dict[str, Any] | list[Any] | BadLine
    after: Cursor
    size: int = 0


def too_long(limit: int) -> BadLine:
    """In place of a row of more than `limit` bytes."""
    return BadLine("line_too_long", f"the row has more than {limit:,} bytes, which max_row_bytes allows")
