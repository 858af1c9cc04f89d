"""Processes that read stretches of a file for an audit, and what they have seen, in the order of the stretches."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Self

from common.errors import TokenmillError
from common.parent import PARENT
from producer.audit.part import Part
from producer.audit.stretches import Wanted

# Each process has a stretch in work and one that waits; what was seen is held until all before it is there.
_IN_WORK = 2
_AHEAD = 4
_END_SECONDS = 10.0  # from the end of its connection to its own


class _Reader:
    """One process, and the numbers of the stretches that it was sent."""

    def __init__(self) -> None:
        self.ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P as for other children. Equal texts must have equal hashes in all of them.
                [sys.executable, "-P", "-m", "producer.audit.reader", str(theirs.fileno())],
                env=os.environ | {"PYTHONHASHSEED": "0", PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for us, and we end it
            )
        self.numbers: deque[int] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.ours.close()
        self._process.kill()
        self._process.wait()

    def send(self, number: int, wanted: Wanted) -> None:
        """Have a stretch read."""
        try:
            self.ours.send(wanted)
        except OSError:
            raise self._died() from None
        self.numbers.append(number)

    def receive(self) -> tuple[int, Part | OSError]:
        """What was seen of the stretch that was sent first, and its number."""
        try:
            return self.numbers.popleft(), self.ours.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> TokenmillError:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return TokenmillError("a process that read for the audit does not answer; start the audit again")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = "; most likely memory was short: see the kernel's log" if code == -signal.SIGKILL else ""
        return TokenmillError(f"a process that read for the audit ended {how}{hint}; start the audit again")


def parts_by(processes: int, wanted: Iterator[Wanted]) -> Generator[Part, None, None]:
    """What is seen of each stretch that is wanted, in their order, read by so many processes.

    A stretch is taken from `wanted` when it is sent. Raises OSError as part_of does, and TokenmillError if a process
    dies; all of them end with the iterator.
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(_Reader()) for _ in range(processes)]
        seen: dict[int, Part | OSError] = {}
        sent = given = 0
        while True:
            while sent - given < _AHEAD * processes and (free := _free(readers)) and (one := next(wanted, None)):
                free.send(sent, one)
                sent += 1
            if given in seen:
                part = seen.pop(given)
                if isinstance(part, OSError):
                    raise part
                yield part
                given += 1
            elif given < sent:
                seen |= _received(readers)
            else:
                return


def _free(readers: Sequence[_Reader]) -> _Reader | None:
    """The one with the least work, if it has room for more."""
    least = min(readers, key=lambda one: len(one.numbers))
    return least if len(least.numbers) < _IN_WORK else None


def _received(readers: Sequence[_Reader]) -> dict[int, Part | OSError]:
    """What the next that are done have seen; waits for one."""
    working = {one.ours.fileno(): one for one in readers if one.numbers}
    return dict(working[ready].receive() for ready in wait(list(working)) if isinstance(ready, int))
