"""Clocks that leap by an hour in mid-run, forward and back: Redis's, by which leases run out, and the processes' own.

The seam is the C library's: clock.c, loaded before it by the processes whose clock it is.
"""

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from common.segments import count
from tests.conftest import wait_until
from tests.faults.apart import Apart
from tests.faults.harness import DATASET

MakeApart = Callable[..., Apart]
HOUR = 3600
IN_FLIGHT = 32  # of a worker: what may be made again at each leap
PACE = ("--latency-mean", "0.5", "--latency-cv", "0.5")


class Clock:
    """A clock that the processes with `environment` go by; `leap` sets it off from the true one."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler is here to make a clock with: apt install gcc libc6-dev")
        library, self._file = folder / "clock.so", folder / "leap"
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "LEAP_FILE": str(self._file)}

    def leap(self, seconds: int) -> None:
        """`seconds` are from the true time, not from the last leap."""
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


def test_the_clock_of_redis_leaps(make_apart: MakeApart, tmp_path: Path) -> None:
    clock, job = Clock(tmp_path), make_apart(rows=400, pace=PACE, hold_after=250)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        job.valkey.start()
    for name in ("control", "worker"):
        job.start_part(name)
    job.enqueue()
    job.wait_for_done(60)
    clock.leap(HOUR)
    wait_until("the keeper has seen it", lambda: "leapt by 36" in job.log("control"))
    seen = job.wait_for("answers go on", lambda state: state.done > 60)
    # What a worker holds that dies now is not waited for until the leases run out that it had before.
    job.signal("worker", signal.SIGKILL)
    clock.leap(-HOUR)
    job.start_part("worker")
    job.release()
    job.wait_for("they go on", lambda state: state.now_ms < seen.now_ms and state.done > seen.done + IN_FLIGHT)
    _ends_well(job, leaps=2)


def test_the_clocks_of_the_processes_leap(make_apart: MakeApart, tmp_path: Path) -> None:
    clock, job = Clock(tmp_path), make_apart(rows=400, pace=PACE, hold_after=250)
    job.valkey.start()
    for name in ("control", "worker"):
        job.start_part(name, clock.environment)
    job.enqueue()
    job.wait_for_done(60)
    for seconds in (HOUR, 0, -HOUR):
        clock.leap(seconds)
        job.wait_for_keepers_ticks(2)
    _ends_well(job, leaps=3)


def _ends_well(job: Apart, leaps: int) -> None:
    job.end()
    kept = job.check()
    again = count(job.output, DATASET).superseded
    assert len(job.written()) == len(kept) + again
    assert again <= leaps * IN_FLIGHT
