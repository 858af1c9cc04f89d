"""Parts that stand still for longer than they are trusted for, and come back: what they held has gone to others."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import redis

from common.ledger import Ledger
from common.ledger._keys import keys_of
from common.segments import count
from tests.conftest import PATIENCE_SECONDS, wait_until
from tests.faults.harness import DATASET, LEASE_SECONDS, TOKENMILL, Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]
# A message that a frozen worker holds unclaimed is offered to the others after 10 s.
FREEZE_SECONDS = 4 * LEASE_SECONDS
# Far more than one message: hundreds of the ledger's last transitions.
CUT_BYTES = 100_000


def two_workers(job: Job) -> None:
    text = job.config.read_text()
    assert "[run]\n" in text
    job.config.write_text(text.replace("[run]\n", "[run]\nworkers = 2\n"))


def in_flight_of(job: Job, pid: int) -> set[int]:
    """The samples that a worker has claimed and not settled."""
    with redis.Redis(unix_socket_path=str(job.settings.redis_socket)) as client:
        owners = cast("dict[bytes, bytes]", client.hgetall(keys_of(DATASET).owners))
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    name = words[words.index(b"--name") + 1]
    return {int(index) for index, owner in owners.items() if owner.startswith(name + b"@")}


def done(job: Job) -> set[int]:
    with redis.Redis(unix_socket_path=str(job.settings.redis_socket)) as client:
        return Ledger(client).done_among(DATASET, range(len(job.rows)))


def test_a_worker_that_comes_back_after_its_leases_went_to_another(make_job: Make) -> None:
    """Its answers come late: each either counts, because nobody had the sample yet, or is voided."""
    job, _ = make_job(rows=400, hold_after=200, pace=("--latency-mean", "0.5", "--latency-cv", "0.5"))
    two_workers(job)
    run = job.start()
    job.wait_for_done(60)
    frozen = job.pids("worker")[0]
    os.kill(frozen, signal.SIGSTOP)
    lost = in_flight_of(job, frozen)
    job.wait_for("its samples were taken back", lambda state: state.expired > 0)
    time.sleep(FREEZE_SECONDS)  # what is tested is a freeze of some length
    job.release()
    wait_until("the other has answered one of them", lambda: lost & done(job))
    os.kill(frozen, signal.SIGCONT)
    job.finish(run)
    kept = job.check()
    superseded = count(job.output, DATASET).superseded
    assert superseded > 0
    assert len(job.written()) == len(kept) + superseded


def test_parts_of_control_that_stand_still_hold_nothing_up_for_long(make_job: Make) -> None:
    job, _ = make_job(rows=300)
    run = job.start()
    job.wait_for_done(60)
    frozen = [job.pid("keeper"), job.pid("feeder")]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_SECONDS)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    job.finish(run)
    job.check()


def test_a_second_control_does_no_harm(make_job: Make) -> None:
    job, _ = make_job(rows=400, lease_seconds=60)
    run = job.start()
    job.wait_for_done(50)
    environment = os.environ | {"TOKENMILL_CONFIG": str(job.config)}
    with (job.output / "logs" / "second.log").open("ab") as log:
        second = subprocess.Popen(
            [*TOKENMILL, "control", "-c", str(job.config)], env=environment, stdout=log, stderr=log
        )
    job.wait_for_done(150)
    wait_until("two keepers and two feeders run", lambda: len(job.pids("keeper")) == len(job.pids("feeder")) == 2)
    os.kill(job.pids("keeper")[0], signal.SIGKILL)
    job.wait_for_done(250)
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_SECONDS) == 0
    job.finish(run)
    kept = job.check()
    assert len(job.written()) == len(kept)


def test_an_append_only_file_that_was_cut_short_costs_no_record(make_job: Make) -> None:
    """Redis has forgotten the end of what it knew, as after a power cut; the files have not."""
    job, _ = make_job(rows=300, lease_seconds=8)  # that it outlasts a busy machine, and is waited for
    run = job.start()
    job.wait_for_done(120)
    job.signal("run", signal.SIGSTOP)  # that it starts nothing again meanwhile
    for role in ("worker", "valkey", "run"):
        job.signal(role, signal.SIGKILL)
    run.wait(PATIENCE_SECONDS)
    job.gone(PATIENCE_SECONDS)
    written = job.written()
    (newest,) = sorted((job.settings.redis_dir / "appendonlydir").glob("*.incr.aof"))[-1:]
    size = newest.stat().st_size
    assert size > CUT_BYTES
    os.truncate(newest, size - CUT_BYTES)
    job.finish(job.start())
    kept = job.check()
    assert written <= job.written()
    # Nothing that stood in the files was made again.
    assert {(record.index, record.attempt) for record in kept.values()} >= written
