"""A worker that lives and takes no messages is noticed, says so, and is made to hear again."""

from collections.abc import Callable

from common.broker import GENERATE_QUEUE, make_celery
from tests.conftest import PATIENCE_SECONDS, wait_until
from tests.faults.harness import Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]


def test_a_worker_that_stops_consuming_is_started_again(make_job: Make) -> None:
    """Its consumer is cancelled from outside, which reconnecting does not undo."""
    job, _ = make_job(rows=300, hold_after=150)
    run = job.start()
    job.wait_for_done(60)
    deaf = job.pid("worker")
    with make_celery("test", job.settings) as app:
        replies = app.control.cancel_consumer(GENERATE_QUEUE, reply=True, limit=1, timeout=PATIENCE_SECONDS) or []
    assert any("ok" in answer for reply in replies for answer in reply.values())
    job.release()  # its slots become free, and messages wait
    log = job.output / "logs" / "w1.log"
    wait_until("it says that it connects anew", lambda: "connects to Redis anew" in log.read_text())
    wait_until("Celery does", lambda: "Trying to re-establish the connection" in log.read_text())
    job.wait_for_another("worker", deaf)
    job.finish(run)
    job.check()
