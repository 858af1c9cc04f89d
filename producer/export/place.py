"""The folder of an export: what it may replace, and that neither a half one nor one of two stands there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.durable import make_folder, sync_folder, try_lock
from common.errors import UsageError
from producer.export.manifest import NAME, read_manifest, strangers


def refuse_folder(output: Path, folder: Path, *, overwrite: bool) -> None:
    """Raises UsageError unless `folder` is new, empty, or an earlier export that may be replaced."""
    ours = folder.resolve()
    if Path.cwd().is_relative_to(ours):
        raise UsageError(f"{folder} is the folder that you are in, or one above it; name one in it with -o")
    if ours == output.resolve() or ours.is_relative_to(output.resolve()) or output.resolve().is_relative_to(ours):
        raise UsageError(f"{folder} holds the run's own files, or lies among them; name another folder with -o")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with -o")
    if folder.is_mount():  # it cannot be renamed
        raise UsageError(f"{folder} is a mount point, which cannot be replaced; name a folder in it with -o")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{folder} is not empty; name another folder, or replace an earlier export with --overwrite")
    manifest = read_manifest(folder)
    if manifest is None:
        raise UsageError(f"{folder} is no earlier export (it has no {NAME}) and is not replaced; name another folder")
    others = strangers(folder, manifest)
    if others:
        raise UsageError(
            f"{folder} has files that are not of its export and would be lost, as {others[0].relative_to(folder)}; "
            "move or delete them, or name another folder"
        )


@contextmanager
def part_of(output: Path, folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder beside `folder` that no other export writes to; what is left of it at the end is removed.

    Raises UsageError where another export is at work for `folder`, and as refuse_folder does.
    """
    refuse_folder(output, folder, overwrite=overwrite)
    place = folder.resolve()  # beside what a link points to, which may be on another disk
    part = place.with_name(f".{place.name}.part")
    make_folder(part)
    # The lock is on the folder itself, so that none stays of an export that was killed.
    descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not try_lock(descriptor, shared=False) or not _is_at(part, descriptor):
            raise UsageError(f"another export writes {folder} at this moment; wait for it, or name another folder")
        try:
            _put_back(place)
            refuse_folder(output, folder, overwrite=overwrite)  # the other one may have ended meanwhile
            _empty(part)  # of an export that was killed
            yield part
        finally:
            if _is_at(part, descriptor):
                shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(descriptor)


def move(part: Path, folder: Path) -> None:
    """Put `part` in the place of `folder`, whose files are those of an earlier export. Raises OSError."""
    folder = folder.resolve()
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except BaseException:
        _put_back(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _put_back(folder: Path) -> None:
    """The earlier export, where an end came between the two steps of `move`."""
    if _old(folder).is_dir() and not folder.exists():
        _old(folder).rename(folder)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open folder is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
