"""The output folder becomes read-only in mid-run, as a file system does after an error: the job waits, and goes on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.faults.apart import Apart
from tests.faults.harness import DATASET

MakeApart = Callable[..., Apart]
_READ_ONLY = "Read-only file system"


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    """`folder` as a mount of its own, which can be made read-only; skips the test where that is not allowed."""
    if os.getuid() != 0 or not _mount("--bind", str(folder), str(folder)):
        pytest.skip("only root may mount a folder, and not in every container")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_an_output_folder_that_is_read_only_for_a_while_costs_nothing(make_apart: MakeApart) -> None:
    # Each commit begins a segment: the kernel makes nothing read-only that is open for writing.
    job = make_apart(rows=400, hold_after=200, segment_bytes=1, lease_seconds=60)
    folder = job.output / DATASET
    folder.mkdir(parents=True)
    with _mounted(folder):
        job.begin("control", "worker")
        job.wait_for_done(100)
        wait_until("it is read-only", lambda: _mount("-o", "remount,ro,bind", str(folder)))
        job.release()
        wait_until("status says so", lambda: _READ_ONLY in " ".join(job.seen()["troubles"]))
        assert _mount("-o", "remount,rw,bind", str(folder))
        job.end()
        kept = job.check()
        assert len(job.written()) == len(kept)
        assert job.log("worker").count(_READ_ONLY) == 1
