"""A shared installation as real processes: Valkey, two model servers, two controls, three workers, one output.

Each process is a `Part`, started again a moment after it has ended, as a supervisor would. Nothing but the parts, and
what they have started, is ever signalled.
"""

import os
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import cast

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.ledger import ENDED_STATES, DatasetState, Ledger
from common.ledger._keys import keys_of
from common.settings import Settings, load_settings
from producer.embedded import EmbeddedRedis
from tests.benchmarks.processes import children
from tests.conftest import REPO
from tests.faults.harness import SIMULATOR, TOKENMILL

LEASE_SECONDS = 5.0
MEAN_TOKENS = 40  # of SIMULATOR
CONCURRENCY = 12
WORKERS = ("w1", "w2", "w3")
CONTROLS = ("c1", "c2")
SERVERS = ("s1", "s2")
VALKEY = "valkey"
# So long a supervisor waits before it starts again what has ended.
_PAUSE_SECONDS = 1.5
# A worker says every 1.25 s that it lives: a quarter of its lease.
_HEARD_SECONDS = 3.0
# A part that was told to stop drains for 2 s, aborts for 5 s at most, and commits for 10 s at most.
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Dataset:
    """One source: its prompts by index, why a row of it is rejected, and its cap in tokens."""

    name: str
    rows: Sequence[Sequence[int]]
    bad: Mapping[int, str]
    cap_tokens: int | None = None

    def lines(self) -> list[bytes]:
        """The source file's lines; those of bad rows are what their reasons say."""
        bad = {"bad_input_ids": b'{"input_ids": [5, "x"]}', "id_out_of_range": b'{"input_ids": [4096]}'}
        return [
            bad.get(self.bad[index], b"{")
            if index in self.bad
            else msgspec.json.encode({"id": f"{self.name}-{index}", "input_ids": ids})
            for index, ids in enumerate(self.rows)
        ]


def datasets(samples: int) -> list[Dataset]:
    """Two sources that are answered whole, one of them with bad rows, and one with a cap at some 60 % of its rows."""
    plain, capped = samples * 2 // 5, samples // 5
    reasons = ("bad_input_ids", "not_json", "id_out_of_range")
    bad = {index: reasons[index % 3] for index in range(plain) if index % 50 == 7}
    cap_tokens = capped * MEAN_TOKENS * 3 // 5
    return [
        Dataset("plain", _prompts(1, plain), {}),
        Dataset("with-bad-rows", _prompts(2, plain), bad),
        Dataset("capped", _prompts(3, capped), {}, cap_tokens),
    ]


def _prompts(first: int, rows: int) -> list[list[int]]:
    """Prompts that are found in no other row, of 3 to 9 ids."""
    return [[first, 3 + index // 1000, 3 + index % 1000, *range(100, 100 + index % 7)] for index in range(rows)]


class Part:
    """One process of the site, started again when it ends."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._arguments = [*TOKENMILL, *arguments]
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self.ends: Counter[int] = Counter()  # exit code -> how often

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments,
                cwd=REPO,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The process id, while it lives."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def look_after(self) -> None:
        """Start it again if it ended a moment ago."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.ends[code] += 1
            self._process = None
            self._start_at = time.monotonic() + _PAUSE_SECONDS
        if self._process is None and time.monotonic() >= self._start_at:
            self.start()

    def finish(self) -> int | None:
        """Wait for its end after a TERM; None if it did not come, and it was killed."""
        if self._process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_STOP_SECONDS)
        self.kill()
        return None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Site:
    """The parts, their configuration, and what can be seen of them from outside."""

    def __init__(self, folder: Path, seed: int, samples: int, latency_seconds: float) -> None:
        self.folder = folder
        self.datasets = datasets(samples)
        self.socket = folder / "s"
        self.config = folder / "tokenmill.toml"
        self._ports = dict(zip(SERVERS, _free_ports(len(SERVERS)), strict=True))
        self._configure()
        self.settings: Settings = load_settings(self.config)
        self._environment = os.environ | {"TOKENMILL_CONFIG": str(self.config)}
        self._valkey = EmbeddedRedis(folder / "valkey", self.socket)
        self._valkey_start_at: float | None = None
        pace = (*SIMULATOR, "--latency-mean", str(latency_seconds), "--latency-cv", "0.8", "--seed", str(seed))
        arguments: dict[str, tuple[str, ...]] = {
            **{name: ("simulate", "--port", str(port), *pace) for name, port in self._ports.items()},
            **dict.fromkeys(CONTROLS, ("control",)),
            # The last one has a new name with each start.
            **{name: ("worker", "--name", name) for name in WORKERS[:-1]},
            WORKERS[-1]: ("worker",),
        }
        self.parts = {name: self._part(name, words) for name, words in arguments.items()}
        self._enqueues: list[tuple[tuple[str, ...], subprocess.Popen[bytes]]] = []
        self.enqueue_ends: Counter[int] = Counter()
        self._client = self.connection(5)

    def _configure(self) -> None:
        (self.folder / "data").mkdir()
        sections = []
        for dataset in self.datasets:
            source = self.folder / "data" / f"{dataset.name}.jsonl"
            source.write_bytes(b"\n".join(dataset.lines()) + b"\n")
            cap = f"cap_tokens = {dataset.cap_tokens}\n" if dataset.cap_tokens else ""
            sections.append(f'[[datasets]]\nname = "{dataset.name}"\npath = "{source}"\n{cap}')
        urls = ", ".join(f'"{self.url(name)}"' for name in SERVERS)
        # Few samples wait, so that what is given back is soon another's: that is how attempts come to be superseded.
        self.config.write_text(
            f'output = "out"\nredis = "unix://{self.socket}"\n[server]\nurls = [{urls}]\n'
            '[gates]\naction = "none"\n'
            f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 256\n'
            f"[worker]\nconcurrency = {CONCURRENCY}\nleast_in_flight = {CONCURRENCY}\n"
            f"lease_seconds = {LEASE_SECONDS}\ndrain_seconds = 2\n"
            f"[control]\nwindow = {2 * CONCURRENCY}\n" + "".join(sections)
        )

    def _part(self, name: str, arguments: tuple[str, ...]) -> Part:
        return Part(name, arguments, self.folder / f"{name}.log", self._environment)

    def say(self, text: str) -> None:
        """A line of chaos.log, in the form of the parts' own logs."""
        with (self.folder / "chaos.log").open("a") as log:
            log.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S,%f}"[:-3] + f" {text}\n")

    # Life

    def start(self) -> None:
        self._valkey.start()
        for part in self.parts.values():
            part.start()
        self.enqueue()

    def look_after(self) -> None:
        """Start again what has ended, as a supervisor does, and enqueue again what was refused, as a person does."""
        if self._valkey_start_at is None:
            if self.pid(VALKEY) is None:
                self._valkey_start_at = time.monotonic() + _PAUSE_SECONDS
        elif time.monotonic() >= self._valkey_start_at:
            self._valkey_start_at = None
            self._valkey.restart_if_dead()
        for part in self.parts.values():
            part.look_after()
        for names, process in list(self._enqueues):
            if (code := process.poll()) is not None:
                self._enqueues.remove((names, process))
                self.enqueue_ends[code] += 1
                if code:
                    self.enqueue(*names)

    def enqueue(self, *names: str) -> None:
        """`tokenmill enqueue`, again until it succeeds: servers and Redis may be away."""
        with (self.folder / "enqueue.log").open("ab") as log:
            process = subprocess.Popen(
                [*TOKENMILL, "enqueue", *names], cwd=REPO, env=self._environment, stdout=log, stderr=log
            )
        self._enqueues.append((names, process))

    @property
    def enqueuing(self) -> bool:
        """Whether an enqueue has not succeeded yet."""
        return bool(self._enqueues)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end."""
        return subprocess.run(
            [*TOKENMILL, *arguments], cwd=REPO, env=self._environment, capture_output=True, timeout=110, check=False
        )

    def stop(self) -> dict[str, int | None]:
        """TERM to workers and controls; answers their exit codes, None for one that had to be killed."""
        ours = [self.parts[name] for name in (*WORKERS, *CONTROLS)]
        for part in ours:
            if pid := part.pid:
                os.kill(pid, signal.SIGTERM)
        return {part.name: part.finish() for part in ours}

    def end_all(self) -> None:
        """Kill whatever is left."""
        for part in self.parts.values():
            part.kill()
        for _, process in self._enqueues:
            process.kill()
            process.wait()
        within(20, lambda: not self._kill_left())
        if pid := self.pid(VALKEY):
            os.kill(pid, signal.SIGKILL)
        self._valkey.stop()
        self._client.close()

    def _kill_left(self) -> list[int]:
        left = self.left()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def left(self) -> list[int]:
        """The processes of this site that live; save Valkey, which is not ours by its environment."""
        ours = f"TOKENMILL_CONFIG={self.config}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                lives = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if lives and ours in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    # Who is who

    def pid(self, target: str) -> int | None:
        """The process id of a part, of `c1/keeper` or `c1/feeder`, or of Valkey; None while it does not live."""
        if target == VALKEY:
            pid = self._valkey.pid
            return pid if pid is not None and _lives(pid) else None
        name, _, role = target.partition("/")
        pid = self.parts[name].pid
        if pid is None or not role:
            return pid
        with suppress(OSError):  # it ended in the meantime
            for child in children(pid):
                if role.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    return child
        return None

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self._ports[server]}"

    def connection(self, seconds: float) -> redis.Redis:
        """A connection that gives up after `seconds`, at the first try."""
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=seconds, retry=Retry(NoBackoff(), 0))

    # What the ledger says

    def states(self) -> dict[str, DatasetState]:
        """The datasets as the ledger has them; none while Redis does not answer."""
        try:
            states = {one.name: Ledger(self._client).snapshot(one.name) for one in self.datasets}
        except redis.RedisError:
            return {}
        return {name: state for name, state in states.items() if state.state}

    def ended(self, states: Mapping[str, DatasetState]) -> bool:
        """Whether `states` are those of all datasets, and each has ended."""
        return len(states) == len(self.datasets) and all(state.state in ENDED_STATES for state in states.values())

    def workers(self) -> dict[str, int]:
        """How many samples each worker that lives has ended; none while Redis does not answer."""
        try:
            ledger = Ledger(self._client)
            seconds, _ = self._client.time()
            seen = ledger.processes().items()
        except redis.RedisError:
            return {}
        return {
            name: facts["ended"]
            for name, (seen_ms, facts) in seen
            if facts.get("kind") == "worker" and seconds - seen_ms / 1000 < _HEARD_SECONDS
        }

    def attempts(self) -> Iterator[tuple[str, dict[int, str], dict[int, int]]]:
        """By dataset, who has each sample in flight, and how many attempts each has lost. Raises redis.RedisError."""
        for dataset in self.datasets:
            keys = keys_of(dataset.name)
            owners = cast("dict[bytes, bytes]", self._client.hgetall(keys.owners))
            tries = cast("dict[bytes, bytes]", self._client.hgetall(keys.tries))
            yield (
                dataset.name,
                {int(index): owner.decode() for index, owner in owners.items()},
                {int(index): int(n) for index, n in tries.items()},
            )

    def logs(self, lines: int = 25) -> str:
        """The ends of all logs."""
        tails = (
            (path.name, path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.folder.glob("*.log"))
        )
        return "\n".join("\n".join((f"--- {name}", *tail)) for name, tail in tails)


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Wait until `condition` holds; answers whether it did within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Ports that a server can be started on again: below those that outgoing connections are given."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found
