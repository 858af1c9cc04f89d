"""Child processes of `run` and `control`: started, restarted when they die, stopped together."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.errors import TokenmillError
from common.logs import last_words
from common.parent import DISMISSED, PARENT

log = logging.getLogger(__name__)
# A child that dies at once is started again after a doubling pause, so that a broken one does not spin.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_HEALTHY_SECONDS = 60.0
# A child that failed so often in a row will fail again: what is wrong is not transient.
_MOST_FAILURES = 6


class Stoppable(Protocol):
    """A process that can be ended: a child, or a worker that was started by another command."""

    @property
    def label(self) -> str: ...
    def terminate(self) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def kill(self) -> None: ...


class Child:
    """One process of ours, in a session of its own: Ctrl-C in the terminal is for the parent alone."""

    def __init__(self, name: str, arguments: Sequence[str], config: Path, log_file: Path | None) -> None:
        """`arguments` follow `tokenmill`; output goes to `log_file`, or to our own standard error."""
        self.name = name
        # -P: a package named common or workers in the folder that we were called from is not ours.
        self._arguments = [sys.executable, "-P", "-m", "producer.cli.main", *arguments]
        self._environment = _environment(config)
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = _FIRST_PAUSE
        self._retry_at = 0.0
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """The process id, while there is one."""
        return self._process.pid if self._process else None

    @property
    def label(self) -> str:
        """What it is called in the log."""
        return self.name

    def start(self) -> None:
        """Start the process."""
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(self._log_file.open("ab")) if self._log_file else None
            self._process = subprocess.Popen(
                self._arguments,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=target or sys.stderr,
                stderr=target or sys.stderr,
                start_new_session=True,
            )
        self._started = time.monotonic()

    def look_after(self) -> None:
        """Start the process again if it has died; raises TokenmillError once it does nothing but die."""
        now = time.monotonic()
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                if now - self._started > _HEALTHY_SECONDS:
                    self._pause, self._failures = _FIRST_PAUSE, 0
                return
            if code == DISMISSED:
                return
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise TokenmillError(
                    f"{self.name} ended {self._failures} times in a row, {_how(code)}{self.last_words()}"
                )
            log.warning("%s ended (%s); starting it again", self.name, _how(code))
            self._process = None
            self._retry_at = now + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        if now >= self._retry_at:
            self.start()

    def last_words(self) -> str:
        """What its log file says of why it ended, as the end of a sentence."""
        if self._log_file is None:
            return ""
        text = self._log_file.read_text(encoding="utf-8", errors="replace")
        if words := last_words(text):
            return f"; the end of {self._log_file} says: {words}"
        return f"; {self._log_file} {'does not say why' if text.strip() else 'is empty'}"

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; answers whether it came."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process, and what it started, at once."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def stop_all(children: Sequence[Stoppable], seconds: float) -> None:
    """TERM to all, wait up to `seconds` in all, kill what is left."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            log.warning(
                "%s did not end within %.0f s and is killed; its samples come back by themselves", child.label, seconds
            )
            child.kill()


def _environment(config: Path) -> Mapping[str, str]:
    return os.environ | {"TOKENMILL_CONFIG": str(config), PARENT: str(os.getpid())}


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
