"""Standard input as a source (`path = "-"`): it can be read once, so it is kept in the output folder first.

A row that was not answered is read again after a crash, and by other processes than the one that has the input.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

from common.durable import make_folder, sync_folder
from common.errors import ConfigError
from common.sections import DatasetSettings

STANDARD_INPUT = "-"
_NAME = "standard-input"
_CHUNK_BYTES = 1024 * 1024


def source_of(output: Path, dataset: DatasetSettings) -> str | Path:
    """Where the rows of `dataset` are: its path or URL, or the copy of what came from standard input."""
    return output / dataset.name / _NAME if dataset.path == STANDARD_INPUT else dataset.path


def refuse_no_input(output: Path, dataset: DatasetSettings) -> None:
    """Raises ConfigError if nothing is piped in, and nothing was before."""
    if not Path(source_of(output, dataset)).exists() and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(
            f'the path of dataset {dataset.name} is "-", and nothing is piped in; pipe its rows in, or name a file'
        )


def keep_standard_input(output: Path, dataset: DatasetSettings, stream: BinaryIO | None = None) -> str | None:
    """Copy standard input into the output folder, unless it was; answers a sentence that says so.

    Raises ConfigError if nothing is there to be read, OSError.
    """
    copy = source_of(output, dataset)
    if dataset.path != STANDARD_INPUT or Path(copy).exists():
        return None
    refuse_no_input(output, dataset)
    stream = stream or sys.stdin.buffer
    make_folder(Path(copy).parent)
    part = Path(f"{copy}.part")
    with part.open("wb") as file:
        shutil.copyfileobj(stream, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    if not size:
        part.unlink()
        raise ConfigError(f'the path of dataset {dataset.name} is "-", and standard input is empty; pipe its rows in')
    part.replace(copy)
    sync_folder(Path(copy).parent)
    return f"{dataset.name}: standard input was copied to {copy} ({size:,} bytes); a resume reads it from there"
