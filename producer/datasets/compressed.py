"""The bytes of a text file from an offset on, decompressed if need be.

Neither gzip nor Zstandard has an index: byte N is found by decompressing all that stands before it (some 300 MB and
1 GB a second on one core). So whoever reads on keeps the reader, and only a new process pays for it, once.
"""

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from common.errors import DataError
from producer.datasets.places import open_file

log = logging.getLogger(__name__)
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 64 * 1024
# What is given to the Zstandard decoder at once: it answers with all that this becomes, and 4 bytes can be 128 KiB. So
# as much is given as became some 256 KiB at the last ratio.
_ZSTD_LEAST, _ZSTD_MOST, _ZSTD_BECOMES = 64, 8 * 1024, 256 * 1024
# Windows of more need `--long`, and as much memory.
_ZSTD_WINDOW = 2**27
_BYTES_PER_SECOND = {"gz": 300_000_000, "zst": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class Text:
    """A text file: where it is, and by what it is compressed ("", "gz" or "zst")."""

    where: str
    compression: str

    def chunks(self, offset: int) -> Iterator[bytes]:
        """Its bytes from the decompressed byte `offset` on, in pieces.

        Raises OSError, and DataError at the byte from which on the file is damaged or not there.
        """
        with open_file(self.where) as file:
            if not self.compression:
                file.seek(offset)
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
                return
            if offset:
                _say_what_it_costs(self, offset)
            pieces = _gunzip(self.where, file) if self.compression == "gz" else _unzstd(self.where, file)
            for piece in pieces:
                if offset >= len(piece):
                    offset -= len(piece)
                    continue
                yield piece[offset:] if offset else piece
                offset = 0


def _say_what_it_costs(text: Text, offset: int) -> None:
    log.info(
        "%s is read on from byte %s: the file has no index, so all before it is decompressed again, about %.1f s",
        text.where,
        f"{offset:,}",
        offset / _BYTES_PER_SECOND[text.compression],
    )


def _gunzip(where: str, file: BinaryIO) -> Iterator[bytes]:
    """One member after the other, as `cat a.gz b.gz` leaves them; zeros behind the last are padding."""
    decoder = zlib.decompressobj(wbits=31)
    begun, read, data = False, 0, b""
    while True:
        if not data:
            data = file.read(_CHUNK_BYTES)
            read += len(data)
            if not data:
                break
        if decoder.eof:
            data = data.lstrip(b"\0")
            if not data:
                continue
            decoder, begun = zlib.decompressobj(wbits=31), False
        try:
            piece = decoder.decompress(data, _CHUNK_BYTES)
        except zlib.error as error:
            raise _damaged(where, read - len(data), error) from error
        data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        begun = True
        if piece:
            yield piece
    if begun and not decoder.eof:
        yield from _last(decoder.flush)
        raise _cut_off(where, read)


def _unzstd(where: str, file: BinaryIO) -> Iterator[bytes]:
    """One frame after the other; skippable frames are skipped by the decoder."""
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    decoder, begun, read, data, size = context.decompressobj(), False, 0, b"", _ZSTD_LEAST
    while True:
        if not data:
            data = file.read(size)
            read += len(data)
            if not data:
                break
        if decoder.eof:
            decoder, begun = context.decompressobj(), False
        try:
            piece = decoder.decompress(data)
        except zstandard.ZstdError as error:
            raise _damaged(where, read - len(data), error) from error
        size = max(_ZSTD_LEAST, min(_ZSTD_MOST, len(data) * _ZSTD_BECOMES // max(1, len(piece))))
        data = decoder.unused_data if decoder.eof else b""
        begun = True
        for start in range(0, len(piece), _CHUNK_BYTES):
            yield piece[start : start + _CHUNK_BYTES]
    if begun and not decoder.eof:
        raise _cut_off(where, read)


def _last(flush: Callable[[], bytes]) -> Iterator[bytes]:
    if rest := flush():
        yield rest


def _damaged(where: str, byte: int, error: Exception) -> DataError:
    return DataError(
        f"{where} is damaged near byte {byte:,} of the compressed file ({error}); "
        "the rows before that part were read; put a whole copy in its place"
    )


def _cut_off(where: str, byte: int) -> DataError:
    return DataError(
        f"{where} is cut off: it ends at byte {byte:,} within a compressed stream; "
        "all rows before it were read; put a whole copy in its place"
    )
