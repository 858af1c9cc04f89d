"""A command in a terminal of its own: what it writes there is kept, and keys can be typed. Linux and macOS."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78cM]|\][^\x07\x1b]*(?:\x07|\x1b\\)|P[^\x1b]*\x1b\\)"
)


class Terminal:
    """A process whose terminal we hold the other end of; `written` is all that it wrote."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str], width: int = 80, height: int = 24
    ) -> None:
        self.written = b""
        self._master, slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # So that Ctrl-Z and the size are the process's own.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no thread is there yet
        )

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size; the process hears of it as from any terminal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def read(self, seconds: float = 0.05) -> None:
        """Take in what is written until nothing comes for so long, or for ten times that if it never ends."""
        deadline = time.monotonic() + 10 * seconds
        while time.monotonic() < deadline and select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self.written += data

    def wait_for(self, what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Read until `condition` holds; AssertionError with what was written if it does not in time."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if condition():
                return
            assert time.monotonic() < deadline, f"waited in vain until {what}; it wrote {self.text()[-3000:]!r}"

    def text(self, since: int = 0) -> str:
        """What was written from byte `since` on, without what steers the terminal."""
        return _SEQUENCE.sub(" ", self.written[since:].decode(errors="replace"))

    def is_restored(self) -> bool:
        """Whether the terminal's own settings are as they were before the process began."""
        return termios.tcgetattr(self._slave) == self.before

    def end(self, seconds: float = 30.0) -> int:
        """Wait for the process, reading on, and answer its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        self.read()
        return self.process.wait(1)

    def close(self) -> None:
        """Kill what still runs, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        os.close(self._master)
