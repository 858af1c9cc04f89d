"""Children of `tokenmill run` and `tokenmill control` end when their parent does, however it ended."""

import os
import signal
import threading
import time

PARENT = "TOKENMILL_PARENT"
# What a worker leaves with that a person has told to end: it is not to be started again.
DISMISSED = 10
_CHECK_SECONDS = 0.5


def end_with_parent(parent: int | None = None) -> None:
    """Send this process TERM once `parent` (by default the one named in the environment, if any) is gone."""
    if parent is None:
        named = os.environ.get(PARENT)
        if not named:
            return
        parent = int(named)
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    # The kernel gives an orphan another parent at once, so this can not mistake a new process for the old one.
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
