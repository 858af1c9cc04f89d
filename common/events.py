"""What happened, and by whom: `<output>/events.jsonl`, one JSON object a line, and the last 200 in Redis.

    at       UTC, as in 2026-01-31T12:00:00.000Z
    who      user@host for what a person asked for; a worker's name or a server's url where that one came or went;
             `keeper` for a dataset that moved by itself
    what     a word of WHAT
    dataset  its name, or null
    detail   one sentence

What a person asks for is written by the command, what happens by itself by the keeper, each once. The file is the
truth: the list in Redis is filled again from its end.
"""

import contextlib
import fcntl
import getpass
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from common.durable import make_folder, write_all
from common.ledger import Event, Ledger, ServerChange
from common.records import timestamp

EVENTS = "events.jsonl"
# By a person.
ASKED = (
    "registered",
    "paused",
    "resumed",
    "cap",
    "weight",
    "cancelled",
    "workers_added",
    "worker_draining",
    "worker_stopping",
    "server_added",
    "server_drained",
)
# By themselves.
HAPPENED = (
    "capped",
    "exhausted",
    "halted",
    "failed",
    "reopened",
    "restored",
    "worker_joined",
    "worker_lost",
    "worker_drained",
    "server_down",
    "server_up",
)
WHAT = (*ASKED, *HAPPENED)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode
# The end of the file holds 200 events in so many bytes.
_TAIL_BYTES = 1024 * 1024


def operator() -> str:
    """Who runs this process: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def make_event(what: str, detail: str, dataset: str | None = None, who: str | None = None) -> Event:
    """An event of this moment; by default of the person who runs this process."""
    assert what in WHAT, what
    return Event(timestamp(time.time()), who or operator(), what, dataset, detail)


def tell(output: Path, ledger: Ledger, event: Event) -> None:
    """Write an event down, first in the file, then in Redis. Raises OSError, redis.RedisError."""
    append_event(output, event)
    ledger.add_event(event)


def append_event(output: Path, event: Event) -> None:
    """Append to `<output>/events.jsonl`; any number of processes may do so at once. Raises OSError."""
    make_folder(output)
    descriptor = os.open(output / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        # The torn line of a writer that died stays alone on its line.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        write_all(descriptor, (b"\n" if torn else b"") + _encode(event) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_events(output: Path, n: int) -> list[Event]:
    """The last `n` of the file, the newest last; none if there is no file. Raises OSError."""
    try:
        with (output / EVENTS).open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return list(decoded(lines[1:] if start else lines))[-n:] if n > 0 else []


def all_events(output: Path) -> Iterator[Event]:
    """The whole file, the oldest first. Raises OSError."""
    try:
        with (output / EVENTS).open("rb") as file:
            yield from decoded(file)
    except FileNotFoundError:
        return


def server_changes(output: Path) -> dict[str, ServerChange]:
    """Which servers were added and drained by hand, as the ledger has it. Raises OSError."""
    words: dict[str, ServerChange] = {"server_added": "added", "server_drained": "drained"}
    # The detail of these begins with the url.
    return {event.detail.split()[0]: words[event.what] for event in all_events(output) if event.what in words}


def decoded(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of `lines`, without the lines that are no event: a writer that died leaves a torn one."""
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield _decode(line)
