"""Runs that are stopped, and gone on with: nothing is lost, nothing is made twice."""

import shutil
import signal
from collections.abc import Callable

import msgspec

from common.records import Record
from tests.conftest import wait_until
from tests.faults.harness import LATENCY, Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]
# Answers of a minute: whoever waits for one fails.
SLOW = ("--latency-mean", "60")


def test_ctrl_c_drains_and_the_next_run_goes_on_even_without_redis(make_job: Make) -> None:
    job, _ = make_job(rows=300, drain_seconds=60, lease_seconds=60)
    run = job.start()
    job.wait_for_done(100)
    run.send_signal(signal.SIGINT)
    job.finish(run, 130)
    assert "go on with: tokenmill run -c" in job.said()
    kept = job.check("open")
    assert job.written() == _attempts(kept)
    shutil.rmtree(job.settings.redis_dir)
    job.finish(job.start())
    after = job.check()
    assert {index: after[index] for index in kept} == kept
    assert job.written() == _attempts(after)


def test_a_second_ctrl_c_leaves_at_once(make_job: Make) -> None:
    job, server = make_job(rows=60, pace=SLOW, drain_seconds=300, lease_seconds=600)
    run = job.start()
    job.wait_for("answers are in flight", lambda state: state.in_flight >= 32)
    run.send_signal(signal.SIGINT)
    wait_until("run waits for the answers", lambda: "Ctrl-C again" in job.said())
    run.send_signal(signal.SIGINT)
    job.finish(run, 130)
    job.gone()
    wait_until("the server is idle", lambda: server.at_work() == 0)
    server.kill()
    server.pace = LATENCY
    server.start()
    # Nothing waits for a lease to run out: all were given back.
    job.finish(job.start())
    job.check()


def test_a_worker_that_is_told_to_stop_gives_back_what_it_holds(make_job: Make) -> None:
    job, server = make_job(rows=60, pace=SLOW, drain_seconds=1, lease_seconds=600)
    run = job.start()
    job.wait_for("answers are in flight", lambda state: state.in_flight >= 32)
    worker = job.signal("worker", signal.SIGTERM)
    wait_until("the worker has ended", lambda: worker not in job.pids("worker"))
    # Another one is at them, long before the leases would have run out.
    job.wait_for("answers are in flight again", lambda state: state.in_flight >= 32)
    wait_until("the server is at those alone", lambda: server.at_work() == 32)
    run.send_signal(signal.SIGINT)
    job.finish(run, 130)
    assert job.check("open") == {}


def test_one_run_an_output(make_job: Make) -> None:
    job, server = make_job(rows=60, pace=SLOW, drain_seconds=0)
    run = job.start()
    job.wait_for("answers are in flight", lambda state: state.in_flight == 32)
    second = job.command("run")
    assert second.returncode == 2
    assert b"another tokenmill runs" in second.stderr
    assert second.stdout == b""
    seen = job.command("status", "--json")
    assert seen.returncode == 0
    assert [worker["name"].partition("@")[0] for worker in msgspec.json.decode(seen.stdout)["workers"]] == ["w1"]
    wait_until("the server is at the first run's", lambda: server.at_work() == 32)
    run.send_signal(signal.SIGINT)
    job.finish(run, 130)
    assert job.check("open") == {}


def test_a_raised_cap_is_gone_on_to(make_job: Make) -> None:
    job, _ = make_job(rows=400, lease_seconds=60)
    job.configure(cap_tokens=4_000)
    job.finish(job.start())
    kept = job.check("capped")
    job.configure(cap_tokens=9_000)
    job.finish(job.start())
    after = job.check("capped")
    assert {index: after[index] for index in kept} == kept
    spent = sum(record.completion_tokens for record in after.values())
    assert 8_000 < spent < 10_000
    assert job.written() == _attempts(after)


def _attempts(kept: dict[int, Record]) -> set[tuple[int, int]]:
    return {(index, record.attempt) for index, record in kept.items()}
