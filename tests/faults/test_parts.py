"""TERM and Ctrl-C of each part of a shared installation, in mid-run; and files that are damaged between two runs."""

import signal
from collections.abc import Callable

from tests.conftest import wait_until
from tests.faults.apart import Apart
from tests.faults.harness import DATASET, Job, Simulator


def test_each_part_may_be_told_to_end_and_is_started_again(make_apart: Callable[..., Apart]) -> None:
    job = make_apart(rows=900, lease_seconds=60)
    job.begin("control", "worker")
    waits = job.start_part("enqueue", options=("--wait",))
    done = 40
    for number in (signal.SIGTERM, signal.SIGINT):
        for name in ("control", "worker"):
            done = min(job.wait_for_done(done).done + 20, 800)
            pid = job.signal(name, number)
            wait_until(f"{name} has ended", lambda: pid not in job.pids(name))  # noqa: B023
            job.start_part(name)
    # A second `run` would be a second control, and a second embedded Redis for nobody.
    job.wait_for_keepers_ticks(1)
    refused = job.command("run")
    assert refused.returncode == 2
    assert b"a control process is at work" in refused.stderr
    waits.kill()
    job.wait_for_done(done)
    pid = job.signal("valkey", signal.SIGTERM)
    wait_until("Redis has ended", lambda: pid not in job.pids("valkey"))
    job.valkey.restart_if_dead()
    job.end()
    kept = job.check()
    # All that ended was given back, and nothing was made twice.
    assert len(job.written()) == len(kept)


def test_files_that_were_damaged_between_two_runs_are_repaired(make_job: Callable[..., tuple[Job, Simulator]]) -> None:
    job, _ = make_job(rows=160)
    run = job.start()
    job.wait_for_done(60)
    run.send_signal(signal.SIGTERM)
    job.finish(run, 130)
    job.check("open")
    (segment,) = sorted((job.output / DATASET).glob("w1-*.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    # A line twice, a line of something else, and the last five lines gone, the last of them in its middle.
    segment.write_bytes(b"".join((*lines[:20], lines[3], b"not a record\n", *lines[20:-5], lines[-5][:-30])))
    assert job.command("verify").returncode == 3
    mended = job.command("verify", "--repair")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    job.finish(job.start())
    job.check()
