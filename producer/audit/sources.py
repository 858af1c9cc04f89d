"""What is named on the command line, as sources of rows."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from producer.datasets.places import is_url

STANDARD_INPUT = "-"


def sources_of(named: str) -> list[str]:
    """The source itself; of the folder of an export, the folders of rows in it."""
    folder = Path(named)
    if is_url(named) or not (folder / "manifest.json").is_file():
        return [named]
    parts = [one for one in sorted(folder.iterdir()) if one.is_dir()]
    # `arrow` holds a folder for each split.
    split = [inner for one in parts for inner in (sorted(one.iterdir()) if one.name == "arrow" else [one])]
    return [str(one) for one in split] or [named]


@contextmanager
def spooled(stream: BinaryIO) -> Iterator[Path]:
    """A file with what comes from `stream`, removed behind the block: what it is, is told by reading it twice.

    Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        path = Path(folder) / "standard-input"
        with path.open("wb") as file:
            shutil.copyfileobj(stream, file, 1024 * 1024)
        yield path
