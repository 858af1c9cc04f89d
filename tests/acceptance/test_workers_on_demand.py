"""Workers on demand and steering, as a person types them, with real processes, a real Valkey and a simulated server."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from common.events import all_events
from common.ledger import Ledger
from common.parent import DISMISSED
from common.settings import Settings, load_settings
from producer.crew import workers_of
from producer.detached import detached, living_here
from producer.embedded import answers
from producer.status import snapshot
from tests.acceptance.commands import EXAMPLE_IDS, TOKENMILL, environment, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO, wait_until

pytestmark = pytest.mark.timeout(300)
ROWS = 2000


class Job:
    """A configuration with datasets A and B, and the processes that were started on it."""

    def __init__(self, folder: Path, redis_url: str, server: str) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.processes: list[subprocess.Popen[bytes]] = []
        for name, first in (("A", 100), ("B", 2000)):
            lines = (json.dumps({"id": f"{name}{index}", "input_ids": [first + index, 7]}) for index in range(ROWS))
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / "tokenmill.toml").write_text(
            f'output = "out"\nredis = "{redis_url}"\n[server]\nurls = ["{server}"]\n'
            f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 128\n'
            '[gates]\naction = "none"\n[control]\nmetrics = ""\n[worker]\nconcurrency = 4\ndrain_seconds = 1\n'
            '[[datasets]]\nname = "A"\npath = "A.jsonl"\ncap_tokens = 50000\n'
            '[[datasets]]\nname = "B"\npath = "B.jsonl"\n'
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [*TOKENMILL, *arguments], cwd=self.folder, env=environment(self.folder), stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def command(self, *arguments: str, code: int = 0) -> str:
        done = tokenmill(*arguments, folder=self.folder)
        assert done.returncode == code, f"{done.stderr}\n{self.logs()}"
        return done.stderr if not done.stdout else done.stdout

    @property
    def settings(self) -> Settings:
        return load_settings(self.folder / "tokenmill.toml")

    def workers(self) -> dict[str, dict[str, Any]]:
        """What `workers list` shows, by the name in front of the @; read here, as it is asked for again and again."""
        with closing(Ledger.connect(self.settings.redis_url)) as ledger:
            return {worker["name"].partition("@")[0]: worker for worker in workers_of(self.settings, ledger)}

    def dataset(self, name: str) -> dict[str, Any]:
        """What `status` shows of one dataset."""
        with closing(Ledger.connect(self.settings.redis_url)) as ledger:
            return next(dataset for dataset in snapshot(ledger)["datasets"] if dataset["name"] == name)

    def told(self) -> list[str]:
        return [event.what for event in all_events(self.output)]

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.output.glob("logs/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)

    def end(self) -> None:
        for worker in living_here(self.output):
            worker.kill()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)


@pytest.fixture
def job(tmp_path: Path, valkey: str, ledger: Ledger, simulate: Simulate) -> Iterator[Job]:
    server = simulate("--latency-mean", "0.3", "--mean-tokens", "40", *EXAMPLE_IDS)
    job = Job(tmp_path, valkey, server)
    yield job
    job.end()


def test_workers_are_added_drained_stopped_and_scaled(job: Job, ledger: Ledger) -> None:
    job.start("control")
    named = job.start("worker", "--name", "w3")
    wait_until("it is heard of", lambda: "w3" in job.workers())
    assert job.workers()["w3"]["state"] == "waiting"
    job.command("enqueue")
    wait_until("it works", lambda: job.workers()["w3"]["state"] == "working")

    # w1 is what `run` would call its own, and w3 is there.
    added = job.command("workers", "add", "2", "--concurrency", "2").splitlines()
    assert sorted(line.split("@")[0] for line in added) == ["w2", "w4"]
    listed = json.loads(job.command("workers", "list", "--json"))["workers"]
    seen = {worker["name"].partition("@")[0]: worker for worker in listed}
    assert set(seen) == {"w2", "w3", "w4"}
    row = rf"w4@{seen['w4']['host']} +working +\d+ +\d+ +{seen['w4']['pid']} "
    assert any(re.match(row, line) for line in job.command("workers", "list").splitlines())
    assert (seen["w2"]["concurrency"], seen["w3"]["concurrency"]) == (2, 4)
    assert [Path(seen[name]["log"]).name for name in ("w2", "w4")] == ["w2.log", "w4.log"]
    assert all(os.getsid(seen[name]["pid"]) == seen[name]["pid"] for name in ("w2", "w4"))
    wait_until("all have answers in flight", lambda: all(one["in_flight"] for one in job.workers().values()))

    # A worker that this machine did not add ends by the ledger's word alone, and is not to be started again.
    assert "ends when what it has in flight has ended" in job.command("workers", "drain", "w3")
    assert named.wait(60) == DISMISSED
    assert job.command("workers", "stop", "w9", code=2).startswith(
        "tokenmill: no worker of this job is named 'w9'; did you mean w"
    )
    assert "ends within 1 s" in job.command("workers", "stop", "w4")
    wait_until("it has ended", lambda: set(job.workers()) == {"w2"})
    assert [worker.name for worker in detached(job.output)] == ["w2"]

    job.command("workers", "scale", "3")
    assert set(job.workers()) == {"w2", "w3", "w4"}
    assert job.command("workers", "scale", "3") == "there are 3 already\n"
    job.command("workers", "scale", "1")
    # Those that came last.
    wait_until("two have ended", lambda: set(job.workers()) == {"w2"})

    # One that was killed leaves its pid file, and nothing is ever sent to its pid.
    pid = job.workers()["w2"]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until("it is dead", lambda: job.workers()["w2"]["state"] == "dead")
    listing = "".join(job.command("workers", "list").split())  # as it is folded to the width of a terminal
    assert f"isdead;itslog:{job.output}/logs/w2.log" in listing
    assert "its process had ended already" in job.command("workers", "stop", "w2")
    assert detached(job.output) == []
    what = job.told()
    wait_until("the keeper has told all", lambda: job.told().count("worker_drained") == 4)
    assert [what.count(word) for word in ("workers_added", "worker_draining", "worker_stopping")] == [2, 3, 1]
    assert job.told().count("worker_joined") == 5
    state = ledger.snapshot("A")
    assert state.rejected == ledger.snapshot("B").rejected == 0


def test_a_worker_that_cannot_begin_is_said_at_once(job: Job, ledger: Ledger) -> None:
    ledger.set_model({"vocab_size": "many"})
    said = job.command("workers", "add", "1", code=4)
    assert re.match(r"tokenmill: w2@\S+ has ended: this worker cannot begin: invalid literal .*'many'", said)
    assert detached(job.output) == []


def test_a_dataset_is_steered_while_it_runs_and_over_a_restart(job: Job) -> None:
    control, worker = job.start("control"), job.start("worker", "--name", "w1")
    job.command("enqueue")
    wait_until("both are made", lambda: job.dataset("A")["done"] and job.dataset("B")["done"])
    assert job.command("pause", "A").startswith("A: paused; ")
    shown = json.loads(job.command("status", "--json"))["datasets"]
    assert [dataset["state"] for dataset in shown] == ["paused", "open"]
    wait_until("what was in flight has ended", lambda: job.dataset("A")["in_flight"] == 0)
    done = job.dataset("A")["done"]
    made = job.dataset("B")["done"]
    wait_until("the other goes on", lambda: job.dataset("B")["done"] > made + 20)
    assert job.dataset("A")["done"] == done

    spent = job.dataset("A")["spent_tokens"]
    job.command("cap", "A", "40k")
    assert job.dataset("A")["cap_tokens"] == 40_000
    assert job.command("cap", "A", "1M", "--seen", "50000", code=2).startswith(
        "tokenmill: the cap of A is 40,000 tokens"
    )
    assert "are spent: what is there stays" not in job.command("cap", "A", str(spent - 1))
    job.command("resume", "A")
    wait_until("it is capped", lambda: job.dataset("A")["state"] == "capped")
    assert job.command("cap", "A", "--add", "1k").endswith("; it is open again\n")
    wait_until("it went on", lambda: job.dataset("A")["done"] > done)
    job.command("pause", "A", "B")

    for process in (worker, control):
        process.terminate()
        assert process.wait(60) == 0
    job.start("control")
    job.start("worker", "--name", "w1")
    said = job.command("enqueue")
    assert f"A: cap_tokens {spent + 999:,} was set by hand and holds, not 50,000 of the configuration" in said
    assert "go on with `tokenmill resume B`" in said
    assert (job.dataset("A")["state"], job.dataset("A")["cap_tokens"]) == ("paused", spent + 999)
    done = job.dataset("B")["done"]
    job.command("resume", "B")
    wait_until("it goes on", lambda: job.dataset("B")["done"] > done)
    assert "queued samples were withdrawn" in job.command("cancel", "-y", "B")
    wait_until("nothing is in flight", lambda: job.dataset("B")["in_flight"] == 0)
    assert job.dataset("B")["queued"] == 0
    ended = job.dataset("B")["done"]
    assert job.dataset("B")["state"] == "cancelled"
    job.command("enqueue")
    assert (job.dataset("B")["state"], job.dataset("B")["done"]) == ("cancelled", ended)
    assert "no dataset of this job is named 'C'" in job.command("pause", "C", code=2)


def test_workers_beside_run_end_with_it(tmp_path: Path, simulate: Simulate) -> None:
    server = simulate("--latency-mean", "0.3", "--mean-tokens", "40", *EXAMPLE_IDS)
    job = Job(tmp_path, "embedded", server)
    try:
        assert 'with redis = "embedded" start `tokenmill run` first' in job.command("workers", "add", "1", code=2)
        run = job.start("run")
        wait_until("its Redis is there", lambda: answers(job.settings.redis_socket))
        wait_until("its worker works", lambda: job.workers().get("w1", {}).get("state") == "working")
        job.command("workers", "add", "1")
        wait_until("both have answers in flight", lambda: all(one["in_flight"] for one in job.workers().values()))
        assert set(job.workers()) == {"w1", "w2"}
        # That of `run` is not started again.
        job.command("workers", "drain", "w1")
        wait_until("it has ended", lambda: set(job.workers()) == {"w2"})
        job.command("cancel", "-y", "A", "B")
        assert run.wait(90) == 0, job.logs()
        assert living_here(job.output) == []
        assert detached(job.output) == []
        assert job.told().count("worker_draining") == 1
    finally:
        job.end()
