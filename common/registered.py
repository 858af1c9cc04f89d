"""Which datasets a run has, kept beside their files: `<output>/<dataset>/dataset.json` holds what was registered.

Redis may be emptied while nobody but `control` and workers runs. Their configuration does not say what was registered:
with which cap, or whether at all. These files do; the books of each are in its segments.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import ValidationError

from common.durable import make_folder, replace_file
from common.errors import DataError
from common.sections import DatasetSettings

_NAME = "dataset.json"
_LOCK = ".registering"


def registered_names(output: Path) -> set[str]:
    """The datasets that were registered in `output`. Raises OSError."""
    return {path.parent.name for path in output.glob(f"*/{_NAME}")}


def read_registered(output: Path) -> list[DatasetSettings]:
    """The datasets that were registered in `output`, as they were. Raises DataError, OSError."""
    return [_read(output / name / _NAME) for name in sorted(registered_names(output))]


def _read(path: Path) -> DatasetSettings:
    try:
        return DatasetSettings(**msgspec.json.decode(path.read_bytes(), type=dict))
    except (msgspec.DecodeError, ValidationError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and `tokenmill enqueue` its dataset") from error


def keep_registered(output: Path, dataset: DatasetSettings) -> None:
    """Write down that `dataset` is registered, and how. Raises OSError."""
    path = output / dataset.name / _NAME
    text = msgspec.json.format(msgspec.json.encode(dataset.model_dump(mode="json")), indent=2) + b"\n"
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == text:
            return
    make_folder(path.parent)
    replace_file(path, [text])


@contextlib.contextmanager
def registering(output: Path) -> Iterator[None]:
    """Wait until nobody else registers datasets in `output`, or builds their books anew, and be the one who does.

    A lock in Redis would not do: Redis is what is lost. This one ends with its process. Raises OSError.
    """
    make_folder(output)
    descriptor = os.open(output / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
