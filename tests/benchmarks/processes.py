"""The processes of a benchmark: started, measured from /proc (with their children), ended. Linux only."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_STOP_SECONDS = 30.0


@contextmanager
def started(module: str, arguments: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module arguments` for the length of the block; what it says on standard error goes to `log`."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{module} {arguments[0]} did not end; killed", file=sys.stderr)
            process.kill()
            process.wait()


def wait_for(what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until `condition` holds; leave the benchmark with a sentence if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.05)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time so far of these processes and of the children they have waited for."""
    total = 0
    for pid in pids:
        # After the name in brackets: state is field 3, utime to cstime are fields 14 to 17 (proc_pid_stat(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / _TICKS


def busy_seconds() -> float:
    """What all processors together have worked so far, for whomever."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def rss_mb(pids: Sequence[int]) -> float:
    """Resident memory of these processes, in MB."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def tree(pid: int) -> list[int]:
    """A process and all that live below it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def child_named(pid: int, word: str) -> int:
    """The child of `pid` that has `word` among its arguments."""
    for child in children(pid):
        if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return child
    raise SystemExit(f"process {pid} has no child {word!r}")
