"""What kind of container a file is: told by its first bytes, and by its name only where they do not tell (CSV)."""

import contextlib
import re
from functools import lru_cache
from typing import NamedTuple

import msgspec

from common.errors import DataError
from common.segments import NOT_JSON
from producer.datasets import arrow
from producer.datasets.compressed import GZIP, ZSTD, Text
from producer.datasets.json_array import first_element
from producer.datasets.jsonl import BOM
from producer.datasets.places import cache_key, open_file

_MAGIC_BYTES = 32
_HEAD_BYTES = 256 * 1024
_CSV_ENDINGS = (".csv", ".tsv")
# The first message of an Arrow stream: a continuation mark, or in files before 0.15 the length alone (not read).
_ARROW_STREAM = b"\xff\xff\xff\xff"
_TURN_BEGINS = re.compile(rb'\[\s*\{\s*"(role|from|content|value)"')
# Behind its first byte, a frame of Zstandard that holds no data; pzstd begins with one.
_SKIPPABLE = b"\x2a\x4d\x18"
_REFUSED = {
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"BZh": "is compressed by bzip2; unpack it, or compress it by gzip or zstd",
    b"\xfd7zXZ": "is compressed by xz; unpack it, or compress it by gzip or zstd",
    b"\xff\xfe": "is UTF-16; convert it to UTF-8",
    b"\xfe\xff": "is UTF-16; convert it to UTF-8",
    b"SQLite format 3": "is an SQLite database; export its rows as JSON lines",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`",
}


class Kind(NamedTuple):
    """`layout` is jsonl, array, documents, csv, parquet or arrow; `compression` of a text is "", gz or zst."""

    layout: str
    compression: str = ""

    @property
    def columnar(self) -> bool:
        """Whether the file is no text, and its rows are counted."""
        return self.layout in {"parquet", "arrow"}

    @property
    def grows(self) -> bool:
        """Whether rows may be appended to what was read of it."""
        return not self.columnar and not self.compression

    def __str__(self) -> str:
        return f"{self.layout}.{self.compression}" if self.compression else self.layout


def kind_of(where: str) -> Kind:
    """What the file is. Raises OSError, and DataError for what cannot be read."""
    return _kind_of(where, cache_key(where))


@lru_cache(maxsize=4096)
def _kind_of(where: str, _key: tuple[object, ...]) -> Kind:
    with open_file(where) as file:
        magic = file.read(_MAGIC_BYTES)
    if magic.startswith(b"PAR1"):
        return Kind("parquet")
    if magic.startswith(arrow.FEATHER) or _is_stream(magic):
        return Kind("arrow")
    compression = "gz" if magic.startswith(GZIP) else ""
    if magic.startswith(ZSTD) or magic[1:4] == _SKIPPABLE:
        compression = "zst"
    head = _head(Text(where, compression))
    refused = next((why for mark, why in _REFUSED.items() if head.startswith(mark)), None)
    if refused is None and compression and head.startswith((b"PAR1", _ARROW_STREAM, GZIP, ZSTD)):
        refused = "is compressed, and no text is within; unpack it"
    if refused:
        raise DataError(f"{where} {refused}")
    name = where.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith(_CSV_ENDINGS):
        return Kind("csv", compression)
    return Kind(_layout(head.removeprefix(BOM).lstrip()), compression)


def _is_stream(magic: bytes) -> bool:
    """Whether the length of a message of Arrow follows its mark: it is padded to 8 bytes."""
    length = int.from_bytes(magic[4:8], "little", signed=True)
    return magic.startswith(_ARROW_STREAM) and len(magic) == _MAGIC_BYTES and length > 0 and length % 8 == 0


def _head(text: Text) -> bytes:
    head = b""
    with contextlib.suppress(DataError):  # a file that is cut off is read as far as it goes, and named then
        for chunk in text.chunks(0):
            head += chunk
            if len(head) >= _HEAD_BYTES:
                break
    return head


def _layout(head: bytes) -> str:
    """Of JSON that begins with `head`: jsonl, array or documents.

    Lines can be bare lists, an array can stand on one line, and a list of turns or of ids is one row and not many.
    """
    if head[:1] not in {b"{", b"["}:
        return "jsonl"
    line, newline, rest = head.partition(b"\n")
    rest = rest.lstrip()
    if newline or len(head) < _HEAD_BYTES:
        cut = _is_cut(line)
        if not cut and rest:
            return "jsonl"
        if head[:1] == b"{":  # the second line of a document is its first key; that of JSON lines is a row
            return "documents" if cut and rest[:1] in {b'"', b"}"} else "jsonl"
        if cut and rest[:1] == b"[" and line.strip() != b"[" and not line.rstrip().endswith(b","):
            return "jsonl"  # the first of several lines is damaged
    elif head[:1] == b"{":
        return "jsonl"
    return "documents" if _is_one_row(head) else "array"


def _is_cut(line: bytes) -> bool:
    """Whether the value that begins in `line` goes on behind it."""
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except NOT_JSON as error:
        return "truncated" in str(error)
    return False


def _is_one_row(head: bytes) -> bool:
    """Whether the list that begins here is a conversation or a list of ids, so that it is one row by itself."""
    first = first_element(head)
    if first is None:  # longer than the head
        return bool(_TURN_BEGINS.match(head))
    try:
        value = msgspec.json.decode(first)
    except NOT_JSON:
        return False
    if isinstance(value, dict):
        return bool(value.keys() & {"role", "from"}) and bool(value.keys() & {"content", "value", "tool_calls"})
    return isinstance(value, int) and not isinstance(value, bool)
