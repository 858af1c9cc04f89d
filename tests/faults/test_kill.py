"""kill -9 of each process of a run, in mid-run: the run finishes, or finishes when it is started again."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.conftest import wait_until
from tests.faults.harness import PATIENCE_SECONDS, Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]


@pytest.mark.parametrize("role", ["worker", "valkey", "keeper", "feeder", "control"])
def test_a_run_survives_the_death_of_its_parts(make_job: Make, role: str) -> None:
    job, _ = make_job(rows=400)
    run = job.start()
    job.wait_for_done(100)
    pid = job.signal(role, signal.SIGKILL)
    wait_until(f"another {role} runs", lambda: job.pid(role) != pid, PATIENCE_SECONDS)
    job.finish(run)
    job.check()


def test_all_die_and_the_run_is_started_again_at_once(make_job: Make) -> None:
    job, _ = make_job(rows=500)
    run = job.start()
    job.wait_for_done(100)
    for role in ("worker", "valkey", "run"):
        job.signal(role, signal.SIGKILL)
    run.wait()
    kept = {index for index, _ in job.written()}
    job.finish(job.start())
    assert kept <= job.check().keys()


def test_the_children_of_a_killed_run_end_by_themselves(make_job: Make) -> None:
    job, _ = make_job(rows=400)
    run = job.start()
    job.wait_for_done(100)
    job.signal("run", signal.SIGKILL)
    run.wait()
    wait_until("only Valkey is left", lambda: {one.role for one in job.processes()} == {"valkey"}, 15)
    orphan = job.pid("valkey")
    run = job.start()
    wait_until("the orphan is followed by another", lambda: job.pid("valkey") != orphan, PATIENCE_SECONDS)
    job.finish(run)
    job.check()


def test_the_children_of_a_killed_run_end_without_redis(make_job: Make) -> None:
    job, server = make_job(rows=400)
    run = job.start()
    job.wait_for_done(100)
    job.signal("run", signal.SIGSTOP)
    job.signal("valkey", signal.SIGKILL)
    job.signal("run", signal.SIGKILL)
    run.wait()
    job.gone(15)
    wait_until("the server is idle", lambda: server.at_work() == 0, 5)
    job.finish(job.start())
    job.check()


def test_a_model_server_that_dies_costs_nothing(make_job: Make) -> None:
    job, server = make_job(rows=400)
    run = job.start()
    job.wait_for_done(100)
    server.kill()
    seen = job.wait_for_done(100)
    server.start()
    job.wait_for_done(seen.done + 100)
    job.finish(run)
    job.check()


@pytest.mark.parametrize("cap_tokens", [None, 6_000])
@pytest.mark.parametrize("fate", [signal.SIGCONT, signal.SIGKILL])
def test_records_written_but_not_settled_count_once(make_job: Make, fate: signal.Signals, cap_tokens: int | None) -> None:
    """The worker dies between fsync and settle: Redis is frozen, so that settle waits, and then continued or killed.

    Continued, Redis still finds the dead worker's call in its socket; killed, the call is lost, and the keeper adopts.
    """
    job, _ = make_job(rows=300)
    job.configure(cap_tokens)
    run = job.start()
    # With a cap: its last answers are in flight when Redis freezes.
    job.wait_for("the time has come", lambda state: state.done >= 100 if cap_tokens is None else state.room == 0)
    worker = job.pid("worker")
    valkey = job.signal("valkey", signal.SIGSTOP)
    before = job.written()
    wait_until("records are written that cannot be settled", lambda: job.written() > before)
    os.kill(worker, signal.SIGKILL)
    wait_until("the worker is dead", lambda: worker not in {one.pid for one in job.processes()})
    late = job.written() - before
    os.kill(valkey, fate)
    job.finish(run)
    kept = job.check("exhausted" if cap_tokens is None else "capped")
    assert late
    assert late <= {(index, record.attempt) for index, record in kept.items()}
