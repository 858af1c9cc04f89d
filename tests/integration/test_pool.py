"""A real worker process under Celery: what it tells, how it grows, how it ends, and what it makes of bad messages."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
from celery import Celery

from common.broker import FEED, GENERATE, KEEP, RESTORE, Sender, make_celery
from common.ledger import Ledger
from common.settings import load_settings
from tests.conftest import PATIENCE_SECONDS, REPO, wait_until
from tests.integration.ledger_steps import given_back
from tests.integration.worker_steps import VOCAB_SIZE, Server, fill

NAME = f"w1@{socket.gethostname()}"
ENDLESS = 1000.0
T = TypeVar("T")


class Served:
    """A simulated server in a thread of its own."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop

    def ask(self, question: Callable[[Server], T]) -> T:
        """Let the server's own thread answer."""

        async def answer() -> T:
            return question(self._server)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(PATIENCE_SECONDS)

    def running(self) -> int:
        return self.ask(lambda server: server.load().running)

    def now(self) -> int:
        """The requests that have come and are not answered yet."""
        return self.ask(lambda server: server.now)

    def pause(self) -> None:
        """Answer nothing until `go_on`: what is in flight stays there, however slow this machine is."""
        self.ask(lambda server: server.process.pause("in_place"))

    def go_on(self) -> None:
        self.ask(lambda server: server.process.unpause())


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = Server(**settings)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE_SECONDS)
    try:
        yield Served(server, loop)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Job:
    """A configuration, a worker process on it, and the queue to it."""

    def __init__(self, folder: Path, redis_url: str, ledger: Ledger) -> None:
        self.ledger = ledger
        self.config = folder / "tokenmill.toml"
        self.log = folder / "worker.log"
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, served: Served, *, drain_seconds: float = 0.0, concurrency: int = 4) -> None:
        """Start the worker and wait until it takes messages."""
        url = served.ask(lambda server: server.url)
        self.config.write_text(
            f'output = "out"\nredis = "{self._redis_url}"\n[server]\nurls = ["{url}"]\n[tokenizer]\npath = "none"\n'
            f"[sampling]\nmax_new_tokens = 64\n[worker]\ndrain_seconds = {drain_seconds}\n"
        )
        self.ledger.set_model({"vocab_size": VOCAB_SIZE, "weight_version": "default"})
        self.app: Celery = make_celery("tokenmill", load_settings(self.config))
        command = [sys.executable, "-m", "producer.cli.main", "worker", "-c", str(self.config), "--name", "w1"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--concurrency", str(concurrency)],
                cwd=REPO,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")},
            )
        wait_until("the worker is there", lambda: NAME in self.ledger.processes())

    def send(self, indices: Sequence[int], per_message: int) -> None:
        Sender(self.app).generate([("A", indices[at : at + per_message]) for at in range(0, len(indices), per_message)])

    def message(self, arguments: list[Any]) -> dict[str, Any]:
        """A message for generate as it lies in Redis, without its having been sent."""
        self.app.send_task(GENERATE, args=arguments, queue="control")
        return cast("dict[str, Any]", msgspec.json.decode(cast("bytes", self.ledger.redis.lpop("control"))))

    def held(self) -> tuple[int, int]:
        """Messages that the worker holds and has not acked, and messages in the queue."""
        return self.ledger.redis.hlen("unacked"), self.ledger.redis.llen("generate")

    def numbers(self) -> tuple[int, int, int]:
        """Samples queued, in flight, done."""
        state = self.ledger.snapshot("A")
        return state.queued, state.in_flight, state.done

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def end(self) -> int:
        """Wait for the process to end; answers its exit code."""
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.app.close()


@pytest.fixture
def job(tmp_path: Path, valkey: str, ledger: Ledger) -> Iterator[Job]:
    job = Job(tmp_path, valkey, ledger)
    yield job
    job.stop()


@contextmanager
def events_of(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Collect what workers tell, as Flower does."""
    events: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": events.append})
        thread = threading.Thread(target=receiver.capture)
        thread.start()
        try:
            yield events
        finally:
            receiver.should_stop = True
            thread.join()


def test_task_events_say_which_samples_a_message_had_and_how_they_ended(job: Job, ledger: Ledger) -> None:
    fill(ledger, "A", 8, _5=[5, 5000])
    with serving(speed=0.0, cv=0.0) as served:
        job.start(served)
        with events_of(job.app) as events:
            wait_until("events come", lambda: events)  # heartbeats, every two seconds
            job.send(range(8), per_message=4)
            wait_until("all are done", lambda: job.numbers() == (0, 0, 7))
            wait_until("all is told", lambda: sum(one["type"] == "task-succeeded" for one in events) == 2)
        told: dict[str, dict[str, Any]] = {}
        for event in events:
            if event["type"].startswith("task-"):
                told.setdefault(event["uuid"], {})[event["type"]] = event
        assert [sorted(one) for one in told.values()] == [["task-received", "task-started", "task-succeeded"]] * 2
        first, second = sorted(told.values(), key=lambda one: str(one["task-received"]["args"]))
        assert [one["task-received"]["args"] for one in (first, second)] == ["A 0-3", "A 4-7"]
        assert {one["task-received"]["name"] for one in (first, second)} == {GENERATE}
        assert (
            first["task-succeeded"]["result"]
            == f"80 tokens: 4 stop; {served.ask(lambda server: server.url).removeprefix('http://')}"
        )
        assert second["task-succeeded"]["result"].startswith("60 tokens: 3 stop, 1 id_out_of_range; ")


def test_the_pool_grows_and_shrinks_while_it_works(job: Job, ledger: Ledger) -> None:
    fill(ledger, "A", 400)
    told: dict[str, Any] = {"destination": [NAME], "reply": True, "timeout": PATIENCE_SECONDS}
    with serving(latency_mean_seconds=0.3) as served:
        job.start(served)
        served.pause()
        job.send(range(400), per_message=2)
        wait_until("four are in flight", lambda: served.now() == 4)
        assert job.app.control.pool_grow(3, **told) == [{NAME: {"ok": "pool will grow"}}]
        wait_until("seven are in flight", lambda: served.now() == 7)
        job.app.control.pool_shrink(5, **told)
        served.go_on()
        wait_until("no more than two are in flight", lambda: served.now() <= 2)
        served.pause()
        wait_until("two are in flight", lambda: served.now() == 2)
        inspect = job.app.control.inspect([NAME], timeout=PATIENCE_SECONDS)
        stats = cast("Any", inspect.stats())[NAME]
        assert stats["pool"]["max-concurrency"] == 2
        assert stats["prefetch_count"] == 2
        assert served.ask(lambda server: server.most) == 7
        assert inspect.registered() == {NAME: [GENERATE, KEEP]}


def test_messages_are_acked_at_the_claim_and_term_gives_everything_back(job: Job, ledger: Ledger) -> None:
    fill(ledger, "A", 20)
    with serving(latency_mean_seconds=ENDLESS) as served:
        job.start(served)
        job.send(range(4), per_message=4)
        wait_until("four are generated", lambda: served.running() == 4)
        wait_until("their message is acked", lambda: job.held() == (0, 0))
        job.send(range(4, 20), per_message=4)
        wait_until("two messages are held for the next slots", lambda: job.held() == (2, 2))
        assert job.numbers() == (16, 4, 0)
        job.signal(signal.SIGTERM)
        assert job.end() == 0
        wait_until("all are aborted", lambda: served.ask(lambda server: server.totals.aborted) == 4)
        assert served.running() == 0
    assert job.held() == (0, 4)
    assert job.numbers() == (20, 0, 0)
    assert given_back(ledger, "A") == [0, 1, 2, 3]
    assert ledger.processes() == {}


def test_term_lets_answers_in_flight_end_first(job: Job, ledger: Ledger) -> None:
    fill(ledger, "A", 8)
    with serving(latency_mean_seconds=0.3) as served:
        job.start(served, drain_seconds=ENDLESS)
        served.pause()
        job.send(range(8), per_message=4)
        wait_until("four are in flight", lambda: served.now() == 4)
        job.signal(signal.SIGTERM)
        wait_until("it drains", lambda: job.says("waiting up to"))
        served.go_on()
        assert job.end() == 0
        assert served.ask(lambda server: server.totals.aborted) == 0
    assert job.numbers() == (4, 0, 4)
    assert job.held() == (0, 1)
    assert ledger.processes() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_drain(job: Job, ledger: Ledger, number: signal.Signals) -> None:
    fill(ledger, "A", 4)
    with serving(latency_mean_seconds=ENDLESS) as served:
        job.start(served, drain_seconds=ENDLESS)
        job.send(range(4), per_message=4)
        wait_until("four are generated", lambda: served.running() == 4)
        job.signal(number)
        wait_until("it drains", lambda: job.says("waiting up to"))
        assert served.running() == 4
        job.signal(number)
        job.end()
        wait_until("nothing runs", lambda: served.running() == 0)
    assert job.numbers() == (4, 0, 0)
    assert given_back(ledger, "A") == [0, 1, 2, 3]


def test_bad_messages_are_dropped_and_the_worker_lives(job: Job, ledger: Ledger) -> None:
    fill(ledger, "A", 3)
    with serving(speed=0.0) as served:
        job.start(served)
        job.app.send_task("nonsense", args=["A", [0]], queue="generate")
        job.app.send_task(KEEP, queue="generate")
        for arguments in (
            [],
            ["A"],
            ["A", 0],
            ["A", ["0"]],
            ["A", [-1]],
            ["A", [2**40]],
            [["A"], [0]],
            ["nobody", [0]],
        ):
            job.app.send_task(GENERATE, args=arguments)
        job.app.send_task(GENERATE, kwargs={"dataset": "A", "indices": [0]})
        good = job.message(["A", [0]])
        for changes in ({"body": "bm90IGpzb24="}, {"content-type": "application/x-python-serialize"}):
            ledger.redis.lpush("generate", msgspec.json.encode(good | changes))
        job.send(range(3), per_message=1)
        wait_until("the good ones are done", lambda: job.numbers() == (0, 0, 3))
        wait_until("nothing is left", lambda: job.held() == (0, 0))
        assert served.ask(lambda server: server.totals.taken) == 3
        job.signal(signal.SIGTERM)
        assert job.end() == 0


def test_the_producers_tasks_have_the_names_that_messages_are_sent_to(tmp_path: Path) -> None:
    config = tmp_path / "tokenmill.toml"
    config.write_text('redis = "unix:///none"\n[tokenizer]\npath = "none"\n')
    script = (
        "import producer.app; print(*sorted(name for name in producer.app.app.tasks if not name.startswith('celery.')))"
    )
    environment = os.environ | {"TOKENMILL_CONFIG": str(config)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [FEED, RESTORE]
