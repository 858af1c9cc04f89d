"""Which datasets a run has, kept beside their files: `<output>/<dataset>/dataset.json` holds what was registered.

Redis may be emptied while nobody but `control` and workers runs. Their configuration does not say what was registered:
with which cap, or whether at all; nor that it was paused since. These files do; the books of each are in its segments.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import ValidationError

from common.durable import make_folder, replace_file
from common.errors import DataError
from common.sections import DatasetSettings

_NAME = "dataset.json"
_LOCK = ".registering"
_STEERING = "steering"


class Steering(msgspec.Struct, frozen=True, omit_defaults=True):
    """What people have asked of a dataset since it was registered.

    `configured` is what the configuration said of a cap_tokens or weight when it was changed by hand: the change holds
    until the configuration says something else.
    """

    state: Literal["", "paused", "cancelled"] = ""
    reason: str = ""  # by whom, and when
    configured: dict[str, Any] = {}


def registered_names(output: Path) -> set[str]:
    """The datasets that were registered in `output`. Raises OSError."""
    return {path.parent.name for path in output.glob(f"*/{_NAME}")}


def read_registered(output: Path) -> list[DatasetSettings]:
    """The datasets that were registered in `output`, as they are now. Raises DataError, OSError."""
    kept = (read_kept(output, name) for name in sorted(registered_names(output)))
    return [one[0] for one in kept if one is not None]


def read_kept(output: Path, name: str) -> tuple[DatasetSettings, Steering] | None:
    """The dataset's settings as they are now, and what was asked since; None if it is not registered.

    Raises DataError, OSError.
    """
    path = output / name / _NAME
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        steering = msgspec.convert(found.pop(_STEERING, {}), Steering)
        return DatasetSettings(**found), steering
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and `tokenmill enqueue` its dataset") from error


def keep_registered(output: Path, dataset: DatasetSettings, steering: Steering) -> None:
    """Write down that `dataset` is registered, how, and what was asked of it since. Raises OSError."""
    path = output / dataset.name / _NAME
    found = dataset.model_dump(mode="json")
    if steering != Steering():
        found[_STEERING] = msgspec.to_builtins(steering)
    text = msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
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
