"""The steps of a durable write that Python does not do by itself."""

import os
from pathlib import Path


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; os.write may take a part only (a nearly full disk). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder`, and those above it that are missing; each new entry survives a power cut. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)
