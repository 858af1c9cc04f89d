"""kill -9 of each process of a run, in mid-run: the run finishes, or finishes when it is started again."""

import os
import signal
from collections.abc import Callable
from typing import cast

import pytest
import redis

from common.ledger import DatasetState
from common.ledger._keys import keys_of
from common.rejects import read_rejects
from tests.conftest import PATIENCE_SECONDS, wait_until
from tests.faults.harness import DATASET, Job, Simulator

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


def test_a_sample_that_kills_its_worker_is_rejected_and_what_flew_with_it_is_answered(make_job: Make) -> None:
    """The test is what kills: it does so whenever the ledger says that this sample is in flight."""
    poison, rows = 18, 30
    job, server = make_job(rows=rows, pace=("--latency-mean", "0.6", "--latency-cv", "0.1"))
    job.configure(allowed_failures=0.1)
    # Whoever has it is killed before it is answered, and the first two times before any is.
    server.hold(ids=job.rows[poison][:2])
    server.tell("/pause_generation", mode="in_place")
    run = job.start()
    job.wait_for("samples are in flight", lambda state: state.in_flight)
    attempts: set[bytes] = set()
    for _ in range(2):
        _kill_what_has(job, poison, attempts, rows - 2)
    server.tell("/continue_generation")
    _kill_what_has(job, poison, attempts, 0)
    job.finish(run)
    assert len(attempts) == 3
    rejected = read_rejects(job.output, DATASET).rows
    assert {index: row.reason for index, row in rejected.items() if index not in job.bad} == {poison: "worker_lost"}
    job.bad.add(poison)
    assert len(job.check()) == rows - len(job.bad)


def _kill_what_has(job: Job, index: int, attempts: set[bytes], beside: int) -> None:
    """Wait for another attempt at sample `index` than these, with so many in flight beside it, and kill its worker."""
    keys = keys_of(DATASET)
    with redis.Redis(unix_socket_path=str(job.settings.redis_socket), socket_timeout=5) as client:

        def attempt() -> bytes:
            return cast("bytes", client.getrange(keys.attempts, index * 6, index * 6 + 5))

        def flies() -> bool:
            return attempt() not in attempts | {b""} and client.zcard(keys.leases) > beside

        wait_until(f"a worker has sample {index}, and {beside} beside", flies)
        job.signal("worker", signal.SIGKILL)
        attempts.add(attempt())
        assert client.zscore(keys.leases, str(index)) is not None


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
    wait_until("only Valkey is left", lambda: {one.role for one in job.processes()} == {"valkey"})
    wait_until("the server is idle", lambda: server.at_work() == 0)

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
    job.gone(PATIENCE_SECONDS)
    wait_until("the server is idle", lambda: server.at_work() == 0)
    job.finish(job.start())
    job.check()


def test_a_model_server_that_dies_costs_nothing(make_job: Make) -> None:
    job, server = make_job(rows=300, hold_after=120)
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
    job, server = make_job(
        rows=200, hold_after=80, lease_seconds=8, pace=("--latency-mean", "1", "--latency-cv", "0.5")
    )
    job.configure(cap_tokens)
    run = job.start()
    worker, valkey = job.pid("worker"), job.pid("valkey")
    if cap_tokens is None:
        job.wait_for_done(50)
    else:
        job.wait_for("the last answers under the cap are in flight", _last_answers_fly)
    os.kill(valkey, signal.SIGSTOP)
    server.release()
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
