"""Redis is emptied, frozen or full in mid-run: the job goes on by itself, and the books balance at its end."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from tests.conftest import wait_until
from tests.faults.harness import LEASE_SECONDS, Job, Simulator

FREEZE_SECONDS = 2 * LEASE_SECONDS
Make = Callable[..., tuple[Job, Simulator]]


@contextmanager
def connected(job: Job) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(job.settings.redis_socket), socket_timeout=10)
    try:
        yield client
    finally:
        client.close()


def test_a_redis_that_someone_emptied_is_filled_again_from_the_files(make_job: Make) -> None:
    job, _ = make_job(rows=400, hold_after=380)  # after each flush some are asked for again
    run = job.start()
    for n in (1, 2, 3):
        job.wait_for_done(80 * n)
        with connected(job) as client:
            client.flushall()
    job.finish(run)
    job.check()
    assert "Redis has forgotten A" in job.said()


def test_a_redis_that_takes_no_writes_for_a_while_costs_nothing(make_job: Make) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(80)
    with connected(job) as client:
        client.config_set("maxmemory", "1")
        wait_until("a write is refused", lambda: _refused(client))
        time.sleep(FREEZE_SECONDS)  # no lease can be renewed meanwhile
        client.config_set("maxmemory", "0")
    job.finish(run)
    job.check()


def test_a_worker_that_dies_while_redis_takes_no_writes_is_started_again_and_waits(make_job: Make) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(80)
    with connected(job) as client:
        client.config_set("maxmemory", "1")
        wait_until("a write is refused", lambda: _refused(client))
        before = job.signal("worker", signal.SIGKILL)
        job.wait_for_another("worker", before)
        another = job.pid("worker")
        log = job.output / "logs" / "w1.log"
        wait_until("it waits", lambda: "nothing is consumed until it takes them" in log.read_text())
        time.sleep(FREEZE_SECONDS)
        assert len(client.client_list()) < 60
        assert job.pid("worker") == another
        client.config_set("maxmemory", "0")
    job.finish(run)
    job.check()


def test_a_redis_that_freezes_for_longer_than_the_leases_costs_no_sample(make_job: Make) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(80)
    pid = job.signal("valkey", signal.SIGSTOP)
    time.sleep(FREEZE_SECONDS)  # what is tested is a freeze of some length
    job.signal("valkey", signal.SIGCONT)
    assert job.pid("valkey") == pid
    job.finish(run)
    job.check()


def _refused(client: redis.Redis) -> bool:
    try:
        client.set("tests:probe", "x")
    except redis.exceptions.OutOfMemoryError:
        return True
    return False
