"""What is named on the command line, as sources of rows."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from common.errors import DataError, UsageError
from common.segments import NOT_JSON, segment_paths
from producer.datasets.places import is_url
from producer.datasets.shards import files_of
from producer.export.manifest import NAME as MANIFEST
from producer.export.manifest import Manifest, read_manifest

STANDARD_INPUT = "-"
_RUN, _DATASET = "run.json", "dataset.json"


class Source(msgspec.Struct, frozen=True):
    """Rows that are looked at as one.

    `listed` are its files where not all that lies under its name is rows of data; `ours` says that tokenmill wrote it.
    """

    name: str
    listed: tuple[str, ...] = ()
    ours: bool = False

    def files(self) -> list[str]:
        """Its files in the order in which their rows are counted. Raises OSError, DataError if it has none."""
        return list(self.listed) or files_of(self.name)


def sources_of(named: str) -> list[Source]:
    """The source itself; of the folder of a run, its datasets; of the folder of an export, the folders of rows in it.

    Raises OSError, and DataError for what is neither a file nor a folder.
    """
    if is_url(named):
        return [Source(named)]
    folder = Path(named)
    if not folder.is_dir():
        if folder.exists() and not folder.is_file():
            raise DataError(f"{named} is a pipe or a device, and no file; put its rows into a file")
        return [Source(named, ours=_is_exported(folder))]
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries}
    found = _of_run(folder) if _RUN in names else []
    if not found and MANIFEST in names:
        found = _of_export(folder)
    if not found and _is_dataset(folder):
        found = _segments(folder)
    return found or [Source(named, ours=_is_exported(folder))]


def _of_run(output: Path) -> list[Source]:
    return [one for folder in sorted(output.iterdir()) if folder.is_dir() for one in _segments(folder)]


def _segments(dataset: Path) -> list[Source]:
    """A dataset by its segments alone: rejects, dataset.json and the table of a shuffle lie beside them."""
    paths = tuple(str(path) for path in segment_paths(dataset.parent, dataset.name) if path.is_file())
    return [Source(str(dataset), paths, ours=True)] if paths else []


def _is_dataset(folder: Path) -> bool:
    """Whether tokenmill wrote the segments of a dataset there; others have files named dataset.json, too."""
    if (folder.absolute().parent / _RUN).is_file():
        return True
    try:
        found = msgspec.json.decode((folder / _DATASET).read_bytes(), type=dict[str, Any])
    except (OSError, *NOT_JSON):
        return False
    return found.keys() >= {"name", "path", "max_row_bytes"}


def _manifest(folder: Path) -> Manifest | None:
    """None also for one of another program, or of another release: what lies there says what it is."""
    try:
        return read_manifest(folder)
    except (OSError, DataError, *NOT_JSON):
        return None


def _is_exported(path: Path) -> bool:
    """Whether it lies in the folder of an export, `arrow` one folder deeper than the others."""
    return any(_manifest(folder) for folder in path.absolute().parents[:3])


def _of_export(folder: Path) -> list[Source]:
    """The files that hold rows as its manifest lists them, by folder."""
    manifest = _manifest(folder)
    listed: dict[Path, list[str]] = {}
    for file in manifest.files if manifest else ():
        if file.rows:
            path = folder / file.path
            listed.setdefault(path.parent, []).append(str(path))
    if listed:
        return [Source(str(place), tuple(paths), ours=True) for place, paths in listed.items()]
    parts = [one for one in sorted(folder.iterdir()) if one.is_dir()]
    # `arrow` holds a folder for each split.
    split = [inner for one in parts for inner in (sorted(one.iterdir()) if one.name == "arrow" else [one])]
    return [Source(str(one)) for one in split]


def is_stream(named: str) -> bool:
    """Whether it can be read only once: standard input, or a pipe."""
    return named == STANDARD_INPUT or (not is_url(named) and Path(named).is_fifo())


@contextmanager
def spooled(named: str) -> Iterator[Path]:
    """A file with what comes from a stream, removed behind the block: what it is, is told by reading it twice.

    Raises OSError, UsageError.
    """
    with ExitStack() as stack:
        if named == STANDARD_INPUT:
            if sys.stdin is None:  # it was closed
                raise UsageError("there is no standard input; pipe the rows in, or name a file")
            stream: BinaryIO = sys.stdin.buffer
        else:
            stream = stack.enter_context(Path(named).open("rb"))
        yield stack.enter_context(_copied(stream))


@contextmanager
def _copied(stream: BinaryIO) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        path = Path(folder) / "standard-input"
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file, 1024 * 1024)
        yield path
