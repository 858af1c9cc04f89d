"""Redis is emptied, or comes back empty, while only `control` and a worker run: the keeper sees it, and has it mended.

With `run` at work test_redis has the same.
"""

import signal
from collections.abc import Callable
from shutil import rmtree

from tests.conftest import wait_until
from tests.faults.apart import Apart
from tests.faults.harness import DATASET
from tests.faults.test_redis import connected

MakeApart = Callable[..., Apart]


def test_a_redis_that_someone_emptied_is_filled_again_while_no_run_is_there(make_apart: MakeApart) -> None:
    job = make_apart(rows=300)
    job.begin("control", "worker")
    for n in (1, 2):
        job.wait_for_done(80 * n)
        with connected(job) as client:
            client.flushall()
    # Whoever builds the books may die of it.
    job.signal("feeder", signal.SIGKILL)
    built = "Redis had forgotten it; its books were built anew at "
    seen = job.wait_for("its books are there again", lambda state: state.reason.startswith(built))
    job.end()
    job.check()
    assert job.status()["reason"] == seen.reason
    assert "Redis has forgotten A: it was emptied" in job.log("control")


def test_parts_that_start_on_an_empty_redis_find_in_the_files_what_is_to_be_done(make_apart: MakeApart) -> None:
    job = make_apart(rows=300)
    job.begin("control", "worker", cap=5_000)
    job.wait_for_done(50)
    job.stop_parts()
    job.valkey.stop()
    written = job.written()
    rmtree(job.settings.redis_dir)
    job.valkey.start()
    said = job.command("status")
    assert b"Redis has forgotten A; the books are built anew" in b" ".join(said.stdout.split())
    for name in ("control", "worker"):
        job.start_part(name)
    job.end("capped")
    kept = job.check("capped")
    # Nothing is made a second time, and the cap is still the command line's: the configuration has none.
    assert written <= {(index, record.attempt) for index, record in kept.items()}
    assert 4_500 < sum(record.completion_tokens for record in kept.values()) < 6_000


def test_nothing_is_made_by_a_configuration_that_has_changed_since(make_apart: MakeApart) -> None:
    job = make_apart(rows=120)
    job.begin("control", "worker")
    job.wait_for_done(20)
    job.stop_parts()
    job.config.write_text(job.config.read_text().replace("max_new_tokens = 256", "max_new_tokens = 128"))
    with connected(job) as client:
        client.flushall()
    job.start_part("control")
    wait_until("control says so", lambda: "the books cannot be built anew" in job.log("control"))
    assert "sampling_params was" in job.log("control")
    assert job.state() is None
    # A person who wants to begin anew removes the files, too.
    rmtree(job.output / DATASET)
    (job.output / "run.json").unlink()
    job.start_part("worker")
    job.enqueue()
    job.end()
    job.check()
