"""A disk that fails: single system calls of one thread are refused, cut short or interrupted, as the test says.

The seam is the kernel's: a seccomp filter of the thread hands chosen calls to a second thread (seccomp_unotify(2)),
which lets each through or answers in its place. Nothing of Python or of the code under test is replaced. What runs
under it must not import a module of C for the first time: dlopen holds the interpreter's lock, which the second thread
needs.
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
NUMBERS = {
    "x86_64": {
        "write": 1, "close": 3, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "rename": 82, "mkdir": 83, "link": 86,
        "unlink": 87, "openat": 257,
    },
    "aarch64": {
        "write": 64, "close": 57, "fsync": 82, "fdatasync": 83, "ftruncate": 46, "rename": 38, "mkdir": 34, "link": 37,
        "unlink": 35, "openat": 56,
    },
}  # fmt: skip
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NOTIFICATION, _ANSWER = "=QIIiIQ6Q", "=QqiI"  # struct seccomp_notif, struct seccomp_notif_resp
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # _IOWR('!', 0, 80 bytes), _IOWR('!', 1, 24 bytes)
_CONTINUE = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that is about to happen. `file` is what its descriptor stands for, or the path that it names."""

    name: str
    arguments: tuple[int, ...]

    @property
    def file(self) -> str:
        if self.name in {"write", "close", "fsync", "fdatasync", "ftruncate"}:
            return str(Path(f"/proc/self/fd/{self.arguments[0]}").readlink())
        at = self.name == "openat" or platform.machine() == "aarch64"
        return os.fsdecode(ctypes.string_at(self.arguments[1 if at else 0]))

    @property
    def creates(self) -> bool:
        """Whether a file is opened that may not exist yet."""
        return self.name == "openat" and bool(self.arguments[2] & os.O_CREAT)


class Short(int):
    """A write takes so many bytes of what it was given."""


Judge = Callable[[Call], "int | Short | None"]  # an errno; how much of a write is done; None: let it through


def under(judge: Judge, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, each of whose file calls `judge` sees first; skips where that cannot be."""
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        pytest.skip(f"the numbers of the system calls of {platform.machine()} are not known here")
    listener: list[int] = []
    ready = threading.Event()
    outcome: list[T] = []
    raised: list[BaseException] = []

    def filtered() -> None:
        try:
            listener.append(_listen(numbers))
            ready.set()
            if listener[0] >= 0:
                outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=filtered)
    thread.start()
    ready.wait()
    try:
        if listener and listener[0] >= 0:
            _answer_all(listener[0], {number: name for name, number in numbers.items()}, judge)
    finally:
        for descriptor in listener:
            if descriptor >= 0:
                os.close(descriptor)  # a call that nobody answers any more fails with ENOSYS
        thread.join()
    if raised:
        raise raised[0]
    if not outcome:
        pytest.skip("this kernel, or this container, lets no process watch its own system calls")
    return outcome[0]


def _listen(numbers: dict[str, int]) -> int:
    """Install the filter for this thread; answers the descriptor on which its calls come, or -1."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = [(0x20, 0, 0, 0)]  # load the number of the call
    for at, number in enumerate(numbers.values()):
        program.append((0x15, len(numbers) - at, 0, number))  # if it is this one: to the last line
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)]  # allow; ask the listener
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS, without which only root may filter
        return -1
    # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
    return int(libc.syscall(_SECCOMP[platform.machine()], 1, 8, header))


def _answer_all(listener: int, names: dict[int, str], judge: Judge) -> None:
    """Answer the thread's calls until it has ended."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not (poll.poll()[0][1] & select.POLLHUP):
        buffer = bytearray(struct.calcsize(_NOTIFICATION))
        fcntl.ioctl(listener, _RECEIVE, buffer)
        identity, _pid, _flags, number, _arch, _address, *arguments = struct.unpack(_NOTIFICATION, buffer)
        call = Call(names[number], tuple(arguments))
        value, error, flags = 0, 0, 0
        try:
            verdict = judge(call)
        except BaseException:
            fcntl.ioctl(listener, _SEND, struct.pack(_ANSWER, identity, 0, -errno.ENOTRECOVERABLE, 0))
            raise
        if verdict is None:
            flags = _CONTINUE
        elif isinstance(verdict, Short):
            value = os.write(call.arguments[0], ctypes.string_at(call.arguments[1], verdict))
        else:
            error = -verdict
        fcntl.ioctl(listener, _SEND, struct.pack(_ANSWER, identity, value, error, flags))


def failing(name: str, error: int, *, only: int | None = None, seen: list[Call] | None = None) -> Judge:
    """A judge that refuses the calls of this name, or, counted from 0, `only` one of them."""
    count = 0

    def judge(call: Call) -> int | None:
        nonlocal count
        if seen is not None:
            seen.append(call)
        if call.name != name:
            return None
        count += 1
        return error if only in {None, count - 1} else None

    return judge
