"""The parts by themselves on a shared Redis: control, a worker, and jobs that come while they run."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common.ledger import Ledger
from common.segments import records
from tests.acceptance.commands import EXAMPLE_IDS, TOKENMILL, environment, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import PATIENCE_SECONDS, REPO, wait_until

pytestmark = pytest.mark.timeout(900)
ROWS = 300


class Site:
    """A configuration with datasets A and B on a shared Redis, and the processes that were started on it."""

    def __init__(self, folder: Path, redis_url: str, server: str) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, first in (("A", 100), ("B", 2000)):
            lines = (json.dumps({"id": f"{name}{index}", "input_ids": [first + index, 7]}) for index in range(ROWS))
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / "tokenmill.toml").write_text(
            f'output = "out"\nredis = "{redis_url}"\n[server]\nurls = ["{server}"]\n'
            '[gates]\naction = "none"\n'
            f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 128\n'
            "[worker]\nconcurrency = 8\n"
            '[[datasets]]\nname = "A"\npath = "A.jsonl"\ncap_tokens = 2000\n'
            '[[datasets]]\nname = "B"\npath = "B.jsonl"\n'
        )

    def start(self, *arguments: str) -> None:
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            self.processes[arguments[0]] = subprocess.Popen(
                [*TOKENMILL, *arguments], cwd=self.folder, env=environment(self.folder), stdout=log, stderr=log
            )

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = tokenmill(*arguments, folder=self.folder)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done

    def status(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return seen

    def datasets(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.status()["datasets"]}

    def stop(self, name: str) -> int:
        """TERM to one process; answers its exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(PATIENCE_SECONDS)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture
def site(tmp_path: Path, valkey: str, ledger: Ledger, simulate: Simulate) -> Iterator[Site]:
    server = simulate("--latency-mean", "0.02", "--mean-tokens", "40", *EXAMPLE_IDS)
    site = Site(tmp_path, valkey, server)
    with ExitStack() as stack:
        site.start("control")
        site.start("worker", "--name", "w1", "--concurrency", "6")
        for process in site.processes.values():
            stack.callback(process.wait, PATIENCE_SECONDS)
            stack.callback(process.kill)
        yield site


def test_jobs_are_enqueued_while_control_and_worker_run(site: Site) -> None:
    done = site.command("enqueue", "A", "A", "--wait")
    assert done.stdout == ""
    assert "A: new, layout input_ids" in done.stderr.splitlines()
    first = site.datasets()
    assert set(first) == {"A"}
    assert first["A"]["state"] == "capped"
    assert first["A"]["done"] < ROWS

    # A cap from the command line, above the one in the file; and a second dataset.
    done = site.command("enqueue", "A", "--cap", "4000", "--wait")
    assert "A: goes on, open again, layout input_ids" in done.stderr.splitlines()
    assert "B: new, layout input_ids" in site.command("enqueue", "B", "--wait").stderr.splitlines()
    # A worker tells of itself every 2 s.
    wait_until("the worker has nothing in flight", lambda: site.status()["workers"][0]["in_flight"] == 0)
    seen = site.status()
    (worker,) = seen["workers"]
    assert worker["name"].startswith("w1@")
    assert (worker["concurrency"], worker["in_flight"]) == (6, 0)
    a, b = seen["datasets"]
    assert (a["state"], a["cap_tokens"], b["state"]) == ("capped", 4000, "exhausted")
    assert a["spent_tokens"] > first["A"]["spent_tokens"] > 1000
    assert (b["done"], b["rejected"]) == (ROWS, 0)
    for state in (a, b):
        kept = {record.index: record for record in records(site.output, state["name"])}
        assert len(kept) == state["done"]
        assert sum(len(record.output_ids) for record in kept.values()) == state["spent_tokens"]
        assert all(record.meta["id"] == f"{state['name']}{index}" for index, record in kept.items())

    # Both end on TERM, say goodbye, and leave a ledger that can be built anew at once.
    assert [site.stop("worker"), site.stop("control")] == [0, 0], site.logs()
    assert site.status()["workers"] == []
    site.command("recover")
    report = json.loads(site.command("verify", "--json").stdout)
    assert (report["ledger_compared"], report["faults"], report["differences"]) == (True, [], [])
    assert {one["name"]: one["samples"] for one in report["datasets"]} == {"A": a["done"], "B": ROWS}
