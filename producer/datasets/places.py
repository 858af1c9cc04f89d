"""Files by path or by URL (s3://, gs://, hf:// and whatever else fsspec knows): what reading rows needs of them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from producer.datasets import remote

_SETTLED_NS = 1_000_000_000


def is_url(where: str | Path) -> bool:
    """Whether it is reached through fsspec."""
    return "://" in str(where)


@contextmanager
def open_file(where: str) -> Iterator[BinaryIO]:
    """The file, to read bytes and to seek. Raises OSError."""
    if is_url(where):
        with remote.open_url(where) as file:
            yield file
    else:
        with Path(where).open("rb") as file:
            yield file


def size_of(where: str) -> int:
    """Bytes of the file. Raises OSError."""
    return remote.info(where).size if is_url(where) else os.stat(where).st_size  # noqa: PTH116  a third of Path's time


def stamp(where: str) -> tuple[object, ...]:
    """What is another as soon as the file is replaced or written to, as far as can be told without reading it.

    It has the time of the last change of the inode, which nobody can set. Raises OSError.
    """
    if is_url(where):
        found = remote.info(where)
        return found.size, found.version
    return _stamp(os.stat(where))  # noqa: PTH116


def cache_key(where: str) -> tuple[object, ...]:
    """The stamp, for caches of what is in a file or folder. Raises OSError.

    The clock of inodes ticks every few milliseconds: two writes within a tick have one stamp. So one of the last second
    is another each time.
    """
    if is_url(where):
        return stamp(where)
    now = os.stat(where)  # noqa: PTH116
    settled = time.time_ns() - now.st_ctime_ns > _SETTLED_NS
    return _stamp(now) if settled else (*_stamp(now), time.monotonic_ns())


def _stamp(now: os.stat_result) -> tuple[object, ...]:
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def is_folder(where: str) -> bool:
    """Whether it is a folder. Raises OSError for a URL that cannot be reached."""
    return remote.is_folder(where) if is_url(where) else Path(where).is_dir()


def names_in(folder: str) -> list[str]:
    """The files of a folder, not those of its sub-folders. Raises OSError."""
    if is_url(folder):
        return remote.names_in(folder)
    with os.scandir(folder) as entries:
        return [entry.path for entry in entries if is_file(entry.path)]


def is_file(path: str) -> bool:
    """Whether it is a file, or a link to one that is not there: that is missed when it is read, and not left out."""
    return Path(path).is_file() or (Path(path).is_symlink() and not Path(path).exists())
