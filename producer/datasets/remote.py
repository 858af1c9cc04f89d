"""Sources by URL, through fsspec. `tokenmill[remote]` installs what s3:// and gs:// need.

An object store is asked at most once a minute what a URL is: each question is a request, and a feed asks at each step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import fsspec

from common.errors import DataError

_ASKED_SECONDS = 60
T = TypeVar("T")
# Read ahead of a file that is read from its start to its end.
_BLOCK_BYTES = 4 * 1024 * 1024


class Found(NamedTuple):
    """What is known of a remote file: bytes, and a text that is another for another content, where there is one."""

    size: int
    version: str


@contextmanager
def open_url(url: str) -> Iterator[BinaryIO]:
    """The file, to read and to seek. Raises OSError, DataError."""
    with _as_oserror(url):
        system, path = _system(url)
        with system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file:
            yield cast("BinaryIO", file)


@contextmanager
def _as_oserror(url: str) -> Iterator[None]:
    """Each store has errors of its own (botocore, gcsfs, aiohttp): a person gets the sentence, and the URL."""
    try:
        yield
    except (OSError, DataError, GeneratorExit):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _for_a_minute(ask: Callable[[str], T]) -> Callable[[str], T]:
    """`ask`, whose answer is kept for the rest of the minute."""

    @lru_cache(maxsize=4096)
    def asked(url: str, _minute: int) -> T:
        with _as_oserror(url):
            return ask(url)

    return wraps(ask)(lambda url: asked(url, int(time.monotonic() // _ASKED_SECONDS)))


@_for_a_minute
def info(url: str) -> Found:
    """Size and version of the file. Raises OSError, DataError."""
    system, path = _system(url)
    found = system.info(path)  # without a request if its folder was listed a moment ago
    versions = (found.get(key) for key in ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created"))
    return Found(int(found["size"] or 0), next((str(one) for one in versions if one), ""))


@_for_a_minute
def is_folder(url: str) -> bool:
    """Whether it is a folder. Raises OSError, DataError."""
    system, path = _system(url)
    return bool(system.isdir(path))


@_for_a_minute
def names_in(folder: str) -> list[str]:
    """The URLs of the files in a folder. Raises OSError, DataError."""
    system, path = _system(folder)
    system.invalidate_cache()
    entries = system.ls(path, detail=True)
    return [system.unstrip_protocol(entry["name"]) for entry in entries if entry["type"] == "file"]


@_for_a_minute
def matches(pattern: str) -> list[str]:
    """The URLs of the files that a pattern with * means. Raises OSError, DataError."""
    system, path = _system(pattern)
    system.invalidate_cache()
    found = system.glob(path, detail=True)
    return [system.unstrip_protocol(name) for name, entry in found.items() if entry["type"] == "file"]


def _system(url: str) -> tuple[Any, str]:
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except ImportError:
        raise DataError(
            f"{url} needs a package that is not installed; install it beside tokenmill: s3fs for s3, gcsfs for gs"
        ) from None
    except ValueError as error:  # an unknown protocol
        raise DataError(f"{url} cannot be read: {error}; use a path, s3://, gs:// or hf://") from None
