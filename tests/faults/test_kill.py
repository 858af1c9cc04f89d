"""kill -9 of each process of a run, in mid-run: the run finishes, or finishes when it is started again."""

import os
import signal
from collections.abc import Callable

import pytest

from common.ledger import DatasetState
from tests.conftest import wait_until
from tests.faults.harness import Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]


@pytest.mark.parametrize("role", ["worker", "valkey"])
def test_a_run_survives_the_death_of_a_part(make_job: Make, role: str) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(100)
    pid = job.signal(role, signal.SIGKILL)
    job.wait_for_another(role, pid)
    job.finish(run)
    job.check()
    assert "A: 6 rejected (6 bad_input_ids); each with its index:" in job.said()


def test_a_run_survives_the_death_of_control_piece_by_piece(make_job: Make) -> None:
    job, _ = make_job(rows=500)
    run = job.start()
    for role, done in (("keeper", 100), ("feeder", 200), ("control", 300)):
        job.wait_for_done(done)
        pid = job.signal(role, signal.SIGKILL)
        job.wait_for_another(role, pid)
    job.finish(run)
    job.check()


def test_all_die_and_the_run_is_started_again_at_once(make_job: Make) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(100)
    for role in ("worker", "valkey", "run"):
        job.signal(role, signal.SIGKILL)
    run.wait()
    kept = {index for index, _ in job.written()}
    job.finish(job.start())
    assert kept <= job.check().keys()


def test_the_children_of_a_killed_run_end_by_themselves(make_job: Make) -> None:
    job, server = make_job(rows=400)
    run = job.start()
    job.wait_for_done(100)
    job.signal("run", signal.SIGKILL)
    run.wait()
    wait_until("only Valkey is left", lambda: {one.role for one in job.processes()} == {"valkey"}, 15)
    wait_until("the server is idle", lambda: server.at_work() == 0, 5)

    # The next run ends that orphan. Then the same without Redis.
    orphan = job.pid("valkey")
    run = job.start()
    job.wait_for_another("valkey", orphan)
    job.wait_for_done(200)
    run_pid, valkey = job.pid("run"), job.pid("valkey")
    os.kill(run_pid, signal.SIGSTOP)
    os.kill(valkey, signal.SIGKILL)
    os.kill(run_pid, signal.SIGKILL)
    run.wait()
    job.gone(15)
    wait_until("the server is idle", lambda: server.at_work() == 0, 5)
    job.finish(job.start())
    job.check()


def test_a_model_server_that_dies_costs_nothing(make_job: Make) -> None:
    job, server = make_job(rows=300)
    run = job.start()
    job.wait_for_done(100)
    server.kill()
    seen = job.wait_for_done(100)
    server.start()
    job.wait_for_done(seen.done + 100)
    job.finish(run)
    job.check()


@pytest.mark.parametrize(
    ("fate", "cap_tokens"), [(signal.SIGCONT, None), (signal.SIGKILL, 4_000)], ids=["continued", "killed-with-a-cap"]
)
def test_records_written_but_not_settled_count_once(
    make_job: Make, fate: signal.Signals, cap_tokens: int | None
) -> None:
    """The worker dies between fsync and settle: Redis is frozen, so that settle waits, and then continued or killed.

    Continued, Redis still finds the dead worker's call in its socket; killed, the call is lost, and the keeper adopts.
    """
    job, server = make_job(rows=200, pace=("--latency-mean", "1", "--latency-cv", "0.5"))
    job.configure(cap_tokens)
    run = job.start()
    worker, valkey = job.pid("worker"), job.pid("valkey")
    if cap_tokens is None:
        job.wait_for_done(50)
    else:
        job.wait_for("the last answers under the cap are in flight", _last_answers_fly)
    os.kill(valkey, signal.SIGSTOP)
    # All that was in flight is answered then, and its first batch written; what Redis did not hear of is among it.
    wait_until("the server has answered all", lambda: server.at_work() == 0)
    written = job.written()
    os.kill(worker, signal.SIGKILL)
    wait_until("the worker is dead", lambda: worker not in job.pids("worker"))
    os.kill(valkey, fate)
    job.finish(run)
    kept = job.check("exhausted" if cap_tokens is None else "capped")
    assert written <= {(index, record.attempt) for index, record in kept.items()}


def _last_answers_fly(state: DatasetState) -> bool:
    return state.done >= 50 and state.room == 0 and state.in_flight >= 8
