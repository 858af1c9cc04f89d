"""Workers as processes of their own on this machine: started by `tokenmill workers add`, and alone from then on.

Each has a pid file in `<output>/logs`, which it removes at its end. The file says when the process began, by the
kernel's clock: a pid that was given to another process since is never taken for it, and never signalled.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from common.durable import make_folder, replace_file
from common.logs import last_words
from common.parent import PARENT
from common.processes import began

_LOCK = ".workers"
_POLL_SECONDS = 0.05


class Detached(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker that was started here or on another machine; `began` tells its process from later ones of its pid."""

    name: str
    host: str
    pid: int
    began: str
    since: float  # seconds since the epoch
    logs: str = ""  # the folder of its two files; not written into them

    @property
    def path(self) -> Path:
        """Its pid file."""
        return Path(self.logs) / f"{self.label}.pid"

    @property
    def log_file(self) -> Path:
        """Where its output goes."""
        return Path(self.logs) / f"{self.name}.log"

    @property
    def label(self) -> str:
        """Its name in the ledger."""
        return f"{self.name}@{self.host}"

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether its process is there; to be asked on its own machine."""
        return began(self.pid) == self.began

    def terminate(self) -> None:
        """Ask it to end, as a signal does: it drains for [worker] drain_seconds."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; answers whether it came."""
        deadline = time.monotonic() + seconds
        while self.lives:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def forget(self) -> None:
        """Remove the pid file of one that is dead."""
        self.path.unlink(missing_ok=True)

    def last_words(self) -> str:
        """What its log says of why it ended."""
        with contextlib.suppress(OSError):
            return last_words(self.log_file.read_text(encoding="utf-8", errors="replace"))
        return ""


@contextlib.contextmanager
def changing(output: Path) -> Iterator[None]:
    """Wait until nobody else adds or scales workers of `output`, and be the one who does. Raises OSError."""
    make_folder(output / "logs")
    with (output / "logs" / _LOCK).open("ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(output: Path, config: Path, name: str, concurrency: int | None) -> Detached:
    """Start a worker in a session of its own: it lives on when this process and its terminal end. Raises OSError."""
    logs = output / "logs"
    worker = Detached(name, socket.gethostname(), 0, "", time.time(), str(logs))
    limit = [] if concurrency is None else ["--concurrency", str(concurrency)]
    with worker.log_file.open("ab") as log:
        process = subprocess.Popen(
            # -P: a package named common or workers in the folder that we were called from is not ours.
            [
                *(sys.executable, "-P", "-m", "producer.cli.main", "worker", "--name", name),
                *("--pid-file", str(worker.path), *limit),
            ],
            env={k: v for k, v in os.environ.items() if k != PARENT} | {"TOKENMILL_CONFIG": str(config)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    worker = msgspec.structs.replace(worker, pid=process.pid, began=began(process.pid) or "")
    replace_file(worker.path, [msgspec.json.encode(msgspec.structs.replace(worker, logs="")), b"\n"])
    process.returncode = 0  # not waited for: it is nobody's child from now on
    return worker


def detached(output: Path) -> list[Detached]:
    """All that have a pid file, dead or alive, on whatever machine."""
    found = []
    for path in sorted((output / "logs").glob("*@*.pid")):
        with contextlib.suppress(msgspec.MsgspecError, FileNotFoundError):  # one that is gone, or no file of ours
            worker = msgspec.json.decode(path.read_bytes(), type=Detached)
            found.append(msgspec.structs.replace(worker, logs=str(path.parent)))
    return found


def living_here(output: Path) -> Sequence[Detached]:
    """Those that live on this machine."""
    return [worker for worker in detached(output) if worker.is_here and worker.lives]
