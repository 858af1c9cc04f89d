"""The same job as parts that were started one by one: a Redis of its own, `control` and workers, and no `run`.

Nobody looks after them but they themselves; what a person would type is `command("enqueue")`.
"""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from common.ledger import Ledger
from producer.embedded import EmbeddedRedis
from tests.conftest import PATIENCE_SECONDS, REPO, wait_until
from tests.faults.harness import TOKENMILL, Job, Simulator


class Apart(Job):
    """One configuration on a Redis that the test has started, where `run` would have its embedded one."""

    def __init__(self, folder: Path, servers: Sequence[Simulator], *, rows: int, **worker: Any) -> None:
        self._parts: list[subprocess.Popen[bytes]] = []
        super().__init__(folder, servers, rows=rows, **worker)
        self.valkey = EmbeddedRedis(self.settings.redis_dir, self.settings.redis_socket)

    def configure(self, cap_tokens: int | None = None, allowed_failures: float = 0.05) -> None:
        super().configure(cap_tokens, allowed_failures)
        text = self.config.read_text()
        self.config.write_text(text.replace("[server]\n", f'redis = "unix://{self.settings.redis_socket}"\n[server]\n'))

    def begin(self, *parts: str, cap: int | None = None) -> None:
        """Start `parts` (control, worker), and enqueue the dataset."""
        self.valkey.start()
        for name in parts:
            self.start_part(name)
        self.enqueue(*(("--cap", str(cap)) if cap else ()))

    def start_part(
        self, name: str, environment: dict[str, str] | None = None, options: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start one process; what it says is appended to <output>/logs/<name>.log."""
        logs = self.output / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self._parts.append(
                subprocess.Popen(
                    [*TOKENMILL, name, *options, "-c", str(self.config)],
                    cwd=REPO,
                    env=self._environment() | (environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return self._parts[-1]

    def enqueue(self, *options: str) -> None:
        done = self.command("enqueue", *options)
        assert done.returncode == 0, done.stderr.decode()

    def log(self, name: str) -> str:
        """All that the processes of one name have said."""
        return (self.output / "logs" / f"{name}.log").read_text()

    def wait_for_keepers_ticks(self, ticks: int) -> None:
        """Wait until a keeper has said so many times more that it lives; it does so at each tick."""
        with redis.Redis(unix_socket_path=str(self.settings.redis_socket), socket_timeout=5) as client:
            for _ in range(ticks):
                before = self._keeper_seen(client)  # None: it has ended, and the next one begins
                wait_until("it ticks", lambda: self._keeper_seen(client) not in {None, before})  # noqa: B023

    @staticmethod
    def _keeper_seen(client: redis.Redis) -> int | None:
        keeper = Ledger(client).processes().get("keeper")
        return keeper and keeper[0]

    def end(self, state: str = "exhausted") -> None:
        """Wait until the dataset is in `state` and nothing is in flight, then TERM to all parts; Redis stays."""
        self.release()
        self.wait_for(f"it is {state}", lambda seen: seen.state == state and seen.in_flight == 0)
        self.stop_parts()
        wait_until("all but Redis have ended", lambda: {one.role for one in self.processes()} <= {"valkey"})

    def stop_parts(self) -> None:
        live = [part for part in self._parts if part.poll() is None]
        for part in live:
            part.send_signal(signal.SIGTERM)
        assert [part.wait(PATIENCE_SECONDS) for part in live] == [0] * len(live), self.logs()

    def gone(self, seconds: float = 0) -> None:
        """Assert that no process of this job is left but its Redis, at the latest after `seconds`."""
        wait_until(
            f"all but Redis have ended: {self.processes()}",
            lambda: {one.role for one in self.processes()} <= {"valkey"},
            seconds,
        )

    def end_all(self) -> None:
        super().end_all()
        for part in self._parts:
            part.wait()
        self.valkey.stop()
