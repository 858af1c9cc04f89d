"""Signals that end what a command is doing, as an exception where it happens to be."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def raising(error: type[BaseException], *numbers: signal.Signals) -> Iterator[None]:
    """Within the block each of these signals raises `error`; behind it they do what they did before.

    In a thread beside the main one nothing changes: Python gives signals to that one alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise error

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
