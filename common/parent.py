"""Children of `tokenmill run` and `tokenmill control` end when their parent does, however it ended."""

import os
import signal
import threading
import time

PARENT = "TOKENMILL_PARENT"
_CHECK_SECONDS = 1.0


def end_with_parent() -> None:
    """If a parent is named in the environment, send this process TERM once that is gone."""
    parent = os.environ.get(PARENT)
    if parent:
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
