"""A disk that fills up: a file system of some KiB, where this process may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB in `folder`; skips the test where it cannot be had."""
    disk = folder / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small file system, and not in every container")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def enlarge(disk: Path) -> None:
    """Give a small disk 16 MiB."""
    subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
