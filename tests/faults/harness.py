"""A whole job in real processes, and the books that must balance after whatever was done to it.

`Job` is one configuration with its output folder: `start` runs `tokenmill run` on it, `check` asserts conservation.
Processes are found by what only this job's can have: its configuration in their environment, or its folder as their
own. Nothing else is ever signalled.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
import redis

from common.ledger import DatasetState, Ledger
from common.records import Record
from common.rejects import read_rejects
from common.segments import count, records
from common.settings import Settings, load_settings
from tests.conftest import PATIENCE_SECONDS, REPO, wait_until
from tests.forked import run_forked

DATASET = "A"
_MODULE = b"producer.cli.main"
TOKENMILL = (sys.executable, "-m", _MODULE.decode())
# Every 50th row is bad, so that rejects take part in whatever happens.
BAD_EVERY = 50
FIRST_BAD = 7
# The ids of the tokenizer in examples/; answers of some 40 tokens that take a few 100 ms.
SIMULATOR = (
    "--vocab-size",
    "4096",
    "--last-id",
    "4087",
    "--end-token-id",
    "4090",
    "--mean-tokens",
    "40",
    "--cv",
    "0.5",
)
LATENCY = ("--latency-mean", "0.2", "--latency-cv", "1")
# Short answers by which the start of a job tries a server that it has; they are in no segment.
TRIED = 2
# How soon a worker's samples must come back where nothing else is said.
LEASE_SECONDS = 3.0


class Simulator:
    """A simulated server in a process of its own, on a port that it keeps when it is started again.

    After `hold_after` requests it holds all further ones until `release`: so that the job has not ended when the test
    comes to what it does in mid-run, however slow this machine is.
    """

    def __init__(self, folder: Path, *pace: str, name: str = "server", hold_after: int | None = None) -> None:
        self._folder = folder
        self._name = name
        self.pace = pace or LATENCY
        self.hold_after = hold_after
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> "Simulator":
        port_file = self._folder / f"{self._name}.port"
        port_file.unlink(missing_ok=True)
        hold = () if self.hold_after is None else ("--fault", f"hang:after={self.hold_after}")
        arguments = ("simulate", "--port", str(self.port), "--port-file", str(port_file), *SIMULATOR, *self.pace, *hold)
        log_path = self._folder / f"{self._name}.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen([*TOKENMILL, *arguments], cwd=REPO, stdout=log, stderr=log)
        process = self._process
        wait_until("the simulated server starts", lambda: port_file.exists() or process.poll() is not None)
        assert process.poll() is None, log_path.read_text()
        self.port = int(port_file.read_text())
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tell(self, path: str, **body: Any) -> None:
        """Steer it: `tell("/pause_generation", mode="in_place")`."""
        with urlopen(f"{self.url}{path}", data=msgspec.json.encode(body), timeout=PATIENCE_SECONDS) as response:
            assert response.status == 200

    def hold(self, after: int = 0, **fault: Any) -> None:
        """Hold requests, once so many more have passed; those that were held go on."""
        self.tell("/_sim/faults", hang={"after": after, **fault})

    def release(self) -> None:
        """Hold nothing any more."""
        self.hold_after = None
        if self.lives():
            self.tell("/_sim/faults", hang=None)

    def answered(self) -> int:
        """The requests that it has answered, in this life of its process."""
        with urlopen(f"{self.url}/metrics", timeout=PATIENCE_SECONDS) as response:
            (ended,) = re.findall(rb"^sglang:num_requests_total{.*} (\S+)$", response.read(), re.MULTILINE)
        return int(float(ended))

    def at_work(self) -> int:
        """The requests that run or wait at the server."""
        with urlopen(f"{self.url}/v1/loads", timeout=PATIENCE_SECONDS) as response:
            loads = msgspec.json.decode(response.read())["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@dataclass(frozen=True)
class Process:
    """One process of the job; `role` is its command (run, worker, control, keeper, feeder) or valkey."""

    pid: int
    parent: int
    role: str


class Job:
    """One configuration, its source of `rows` rows, and everything that runs on it."""

    def __init__(self, folder: Path, servers: Sequence[Simulator], *, rows: int, **worker: Any) -> None:
        self._folder = folder
        self.servers = list(servers)
        self._worker = {
            "concurrency": 32,
            "least_in_flight": 32,
            "lease_seconds": LEASE_SECONDS,
            "drain_seconds": 2.0,
        } | worker
        self._runs: list[subprocess.Popen[bytes]] = []
        self.rows = [_row(index) for index in range(rows)]
        self.bad = {index for index in range(rows) if index % BAD_EVERY == FIRST_BAD}
        self.output = folder / "out"
        self.config = folder / "tokenmill.toml"
        lines = (msgspec.json.encode({"id": f"row-{index}", "input_ids": ids}) for index, ids in enumerate(self.rows))
        (folder / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        self.configure()

    def configure(self, cap_tokens: int | None = None, allowed_failures: float = 0.05) -> None:
        """Write the configuration; without a cap the whole source is answered."""
        worker = "\n".join(f"{key} = {value}" for key, value in self._worker.items())
        cap = f"cap_tokens = {cap_tokens}" if cap_tokens else ""
        urls = ", ".join(f'"{server.url}"' for server in self.servers)
        self.config.write_text(
            f'output = "out"\n[server]\nurls = [{urls}]\n'
            f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n'
            '[gates]\naction = "none"\n'
            f"[sampling]\nmax_new_tokens = 256\n[worker]\n{worker}\n[run]\nallowed_failures = {allowed_failures}\n"
            f'[[datasets]]\nname = "{DATASET}"\npath = "rows.jsonl"\n{cap}\n'
        )
        self.settings: Settings = load_settings(self.config)

    # What runs

    def start(self) -> subprocess.Popen[bytes]:
        """Start `tokenmill run`; what it says is appended to run.log."""
        with (self._folder / "run.log").open("ab") as log:
            self._runs.append(
                subprocess.Popen(
                    [*TOKENMILL, "run", "-c", str(self.config)],
                    cwd=REPO,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return self._runs[-1]

    def command(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run another command on this job's configuration to its end."""
        given = [*arguments, "-c", str(self.config)]
        done = run_forked(given, REPO, self._environment(), None, PATIENCE_SECONDS)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())

    def said(self) -> str:
        """All that the runs have printed."""
        return (self._folder / "run.log").read_text()

    def _environment(self) -> dict[str, str]:
        return os.environ | {"TOKENMILL_CONFIG": str(self.config)}

    def processes(self, role: str | None = None) -> list[Process]:
        """This job's processes that live, of one role or of all."""
        found = [process for entry in Path("/proc").glob("[0-9]*") if (process := self._process(entry)) is not None]
        return [process for process in found if role in {None, process.role}]

    def _process(self, entry: Path) -> Process | None:
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            ours = f"TOKENMILL_CONFIG={self.config}".encode() in (entry / "environ").read_bytes().split(b"\0")
            # Valkey writes its title over its environment.
            if not ours and (entry / "cwd").readlink() != self.settings.redis_dir:
                return None
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ProcessLookupError):
            return None  # ended in the meantime, or not ours to look at
        if state == "Z":
            return None
        role = words[words.index(_MODULE) + 1].decode() if _MODULE in words else "valkey"
        return Process(int(entry.name), int(parent), role)

    def pid(self, role: str) -> int:
        """The process id of the one process of `role`; of a role that forks, that of the parent."""
        pids = self.pids(role)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(pids) != 1:
            if time.monotonic() > deadline:
                pytest.fail(f"there is not one {role}: {self.processes()}\n{self.logs()}")
            time.sleep(0.05)
            pids = self.pids(role)
        return pids[0]

    def pids(self, role: str) -> list[int]:
        """The process ids of `role` without those that one of them has forked."""
        found = self.processes(role)
        all_pids = {process.pid for process in found}
        return [process.pid for process in found if process.parent not in all_pids]

    def wait_for_another(self, role: str, pid: int) -> None:
        """Wait until there is one process of `role`, and it is not `pid`."""
        wait_until(f"another {role} runs", lambda: self.pids(role) not in ([], [pid]), PATIENCE_SECONDS)

    def signal(self, role: str, number: signal.Signals) -> int:
        """Signal the one process of `role`; answers its process id."""
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def end_all(self) -> None:
        """End what a failed test has left."""
        while processes := self.processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        for run in self._runs:
            run.wait()

    # What the ledger says

    def state(self) -> DatasetState | None:
        """The dataset as the running job's ledger has it; None while Redis does not answer or does not know it."""
        client = redis.Redis(unix_socket_path=str(self.settings.redis_socket), socket_timeout=5)
        try:
            state = Ledger(client).snapshot(DATASET)
        except redis.RedisError:
            return None
        finally:
            client.close()
        return state if state.state else None

    def wait_for(self, what: str, condition: Callable[[DatasetState], object]) -> DatasetState:
        """Wait until `condition` holds of the dataset's state; answers that state."""
        seen: list[DatasetState] = []

        def holds() -> bool:
            state = self.state()
            if state is None or not condition(state):
                return False
            seen.append(state)
            return True

        try:
            wait_until(what, holds, PATIENCE_SECONDS)
        except pytest.fail.Exception:
            pytest.fail(f"waited in vain until {what}; the state is {self.state()}\n{self.logs()}")
        return seen[0]

    def wait_for_done(self, samples: int) -> DatasetState:
        return self.wait_for(f"{samples} samples are done", lambda state: state.done >= samples)

    def logs(self) -> str:
        """The ends of all logs, for the message of a test that fails."""
        paths = [self._folder / "run.log", *(self.output / "logs").glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths if path.exists())

    def release(self) -> None:
        """Let the servers hold nothing any more."""
        for server in self.servers:
            server.release()

    # What must be true at the end

    def finish(self, run: subprocess.Popen[bytes], code: int = 0) -> None:
        """Let the servers answer all; wait for the end of `run`, and for its exit code."""
        self.release()
        try:
            found = run.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"run did not end; the state is {self.state()}\n{self.logs()}")
        assert found == code, self.logs()

    def gone(self, seconds: float = 0) -> None:
        """Assert that no process of this job is left, at the latest after `seconds`."""
        try:
            wait_until("all processes have ended", lambda: not self.processes(), seconds)
        except pytest.fail.Exception:
            pytest.fail(f"still there after {seconds} s: {self.processes()}\n{self.logs()}")

    def seen(self) -> dict[str, Any]:
        """What `status --json` says."""
        done = self.command("status", "--json")
        assert done.returncode == 0, done.stderr.decode()
        return dict(msgspec.json.decode(done.stdout))

    def status(self) -> dict[str, Any]:
        """The dataset in `status --json`."""
        datasets = self.seen()["datasets"]
        assert [dataset["name"] for dataset in datasets] == [DATASET]
        return dict(datasets[0])

    def check(self, state: str = "exhausted") -> dict[int, Record]:
        """Conservation, after the end: answers the records that count, by index.

        Each index of the source has exactly one record, or a reject (the bad rows), or, unless `state` is exhausted,
        is still to do; the ledger's sums are those of the files; nothing is left running, here or at the server.
        """
        self.gone()
        live = [server for server in self.servers if server.lives()]
        wait_until("the servers are idle", lambda: all(server.at_work() == 0 for server in live))
        counted = count(self.output, DATASET)
        assert counted.faults == []
        kept = {record.index: record for record in records(self.output, DATASET, counted)}
        rejected = read_rejects(self.output, DATASET)
        assert rejected.faults == []
        for index, record in kept.items():
            assert record.input_ids == self.rows[index]
        rejects = set(rejected.rows)
        assert not rejects & set(kept)
        assert rejects <= self.bad, {index: row for index, row in rejected.rows.items() if index not in self.bad}
        seen = self.status()
        assert seen["state"] == state
        assert seen["in_flight"] == 0
        assert (seen["done"], seen["rejected"]) == (len(kept), len(rejects)), self.logs()
        assert seen["spent_tokens"] == sum(record.completion_tokens for record in kept.values())
        assert seen["prompt_tokens"] == sum(record.prompt_tokens for record in kept.values())
        if state == "exhausted":
            assert set(kept) | rejects == set(range(len(self.rows)))
            assert rejects == self.bad
            assert seen["queued"] == 0
        verified = self.command("verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        self.gone()
        return kept

    def written(self) -> set[tuple[int, int]]:
        """(index, attempt) of every record that stands in a segment, whether it counts or not."""
        return {(line["index"], line["attempt"]) for line in self._lines() if "void" not in line}

    def written_by(self, url: str) -> set[tuple[int, int]]:
        """The same of one server."""
        return {(line["index"], line["attempt"]) for line in self._lines() if line.get("server") == url}

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in (self.output / DATASET).glob("*.jsonl"):
            if path.name != "rejects.jsonl":
                yield from map(msgspec.json.decode, path.read_bytes().splitlines())


def _row(index: int) -> Sequence[int]:
    """A prompt that no other row has; no ids at all where the row is to be rejected."""
    if index % BAD_EVERY == FIRST_BAD:
        return []
    return [3 + index // 1000, 3 + index % 1000, *range(100, 110 + index % 7)]
