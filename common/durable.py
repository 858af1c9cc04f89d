"""The steps of a durable write that Python does not do by itself.

A call that a signal interrupts (EINTR) is made again by Python itself (PEP 475); what else fails is an OSError, and
leaves nothing behind that a later call would take for durable. After a failed fsync the kernel may have marked the
pages clean, and says "ok" the next time: so nothing here is ever synced again, it is written again.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterable
from pathlib import Path


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; os.write may take a part only (a nearly full disk). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def try_lock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file, if nobody has it locked against that; a file system without locks has none to lose."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def unlock(descriptor: int) -> None:
    """Give up what try_lock has locked."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of `folder` survive a power cut."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make what was written to the file at `path`, and closed, survive a power cut; its entry is its folder's."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
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
    try:
        sync_folder(folder.parent)
    except OSError:
        # Else the next call would find it, and take it for durable. Whoever has put a file there keeps it.
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Put a file that holds `parts` in the place of `path`: at any moment the old one or the new one is there whole.

    Its owner and mode stay those of the file that it replaces. Raises OSError, with the old file in its place and the
    new one gone; only where the last step fails, the sync of the folder, the new one stands there and may not survive
    a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            _stay_as(path, descriptor)
            for part in parts:
                write_all(descriptor, part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def _stay_as(path: Path, descriptor: int) -> None:
    """Give a new file the owner and mode of the one at `path`, if there is one."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return
    ours = os.fstat(descriptor)
    if (ours.st_uid, ours.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)  # else a worker could not open its rejects any more
    os.fchmod(descriptor, before.st_mode & 0o7777)
