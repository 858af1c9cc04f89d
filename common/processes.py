"""Which process of this machine is meant by a pid, now and later: whether a worker that is not heard of is dead."""

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def began(pid: int) -> str | None:
    """When the process `pid` began, as text that no other process of this machine shares with it; None if it is gone.

    From /proc/<pid>/stat (proc(5): field 3 is the state, field 22 the start in ticks since the boot), else from ps.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return None if _BOOT.exists() else _began_by_ps(pid)
    except ProcessLookupError:
        return None
    return None if fields[0] in "ZX" else f"{_BOOT.read_text(encoding='ascii').strip()} {fields[19]}"


def _began_by_ps(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Whether a worker's process is proved to be gone: it ran here, and its pid is nobody's or another's now.

    `facts` are what it told of itself (host, pid, began). To be asked of one that is not heard of: containers may share
    a host's name, and each has pids of its own.
    """
    pid, told = facts.get("pid"), facts.get("began")
    if facts.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    now = began(pid)
    return now is None or (told is not None and now != told)
