"""Faults that a simulated server can be told to have, at its start (`--fault`) or while it runs (`/_sim/faults`).

A fault of a request strikes all requests, a `share` of them, or the `next` so many, once `after` others have passed;
with `ids` only those whose prompts hold them.
At most one strikes a request: the first that is due, in the order in which they were set. A fault of the server holds
until it is taken back. All strike streams, too; see streams.py.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from common.errors import UsageError

# What each does to a request.
OF_REQUESTS = MappingProxyType(
    {
        "status": "refused with `status` (503), before it runs",
        "reset": "connection reset before it runs",
        "hang": "not run, and not answered, until the fault is taken back",
        "html": "an HTML page with 200",
        "redirect": "302 to another path",
        "endless": "a body without end",
        "gzip_bomb": "`megabytes` of blanks in a small gzip body",
        "cut": "generated, then cut in the middle of the body; a stream in the middle of an event, half-way",
        "late_reset": "generated, then reset before the first byte; a stream before its last event",
        "garbled": "generated, and half of the body sent as if it were all; of a stream half of its events",
        "wrong_type": "a good answer that calls itself text/html",
        "clipped": "max_new_tokens halved without a word",
        "truncated_prompt": "the prompt cut in half without a word",
        "nan": "ends with 'NaN happened'",
        "abort": "aborted half-way, inside a 200",
        "wrong_rid": "carries the id of another request",
        "weight_version": "made by other weights",
        "no_output_ids": "text alone",
        "prompt_leak": "the last 5 prompt ids stand before the output ids",
        "lost_id": "one output id is missing, and completion_tokens still counts it",
        "bad_output_id": "one output id is outside the vocabulary",
        "die": "kills the server when it arrives",
        "poison": "kills the server if its prompt holds `ids`, one after the other",
    }
)
# What each makes of an answer; it is whole, and a client that looks at it alone takes it.
OF_THE_MODEL = MappingProxyType(
    {
        "no_think_end": "the mark at the end of the thinking never comes",
        "no_thinking": "the thinking ends before it has begun",
        "loop": "from half-way on the last 20 ids again and again, up to max_new_tokens",
        "other_model": "answers of another model, `factor` (3) times as long",
    }
)
ALL_OF_REQUESTS = MappingProxyType({**OF_REQUESTS, **OF_THE_MODEL})
# And these are of the server.
OF_THE_SERVER = MappingProxyType(
    {
        "false_health": "/health answers 503 after `seconds`, though all is well",
        "stale_loads": "/v1/loads and /metrics stay as they are",
        "frozen": "the scheduler hangs: nothing is answered, /health is 503 after 20 s, the figures stay as they are",
    }
)


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """One fault's settings; `struck` counts what it did."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    next: Annotated[int, msgspec.Meta(ge=0)] | None = None
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    factor: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    megabytes: Annotated[int, msgspec.Meta(ge=1)] = 1024
    ids: tuple[int, ...] = ()
    struck: int = 0


class Faults:
    """The faults of one server, over all its lives."""

    def __init__(self, seed: int) -> None:
        self.active: dict[str, Fault] = {}
        self._changed = asyncio.Event()  # a new one after each change
        self._random = random.Random(seed)

    def set(self, changes: Mapping[str, Fault | None]) -> None:
        """Set faults by name, or take them back with None. Raises `ValueError` for a name that there is not."""
        for name, fault in changes.items():
            _check(name, fault)
        for name, fault in changes.items():
            self.active.pop(name, None)
            if fault is not None:
                self.active[name] = fault
        self._tell()

    def clear(self) -> None:
        """Take all back."""
        self.active.clear()
        self._tell()

    async def taken_back(self, name: str, fault: Fault) -> None:
        """Wait until this fault is taken back, or another takes its place."""
        while self.active.get(name) is fault:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def strike(self, input_ids: Sequence[int]) -> tuple[str, Fault] | None:
        """The fault that strikes this request."""
        for name, fault in self.active.items():
            if name in OF_THE_SERVER or (fault.ids and not _holds(input_ids, fault.ids)):
                continue
            if fault.after:
                fault.after -= 1
            elif self._due(fault):
                fault.struck += 1
                return name, fault
        return None

    def _due(self, fault: Fault) -> bool:
        if fault.next is not None:
            due = fault.next > 0
            fault.next -= due
            return due
        return fault.share is None or self._random.random() < fault.share


def parse(text: str) -> tuple[str, Fault]:
    """`NAME` or `NAME:KEY=VALUE,…`, with ids as `5+6+7`. Raises `UsageError` if there is no such fault or key."""
    name, _, settings = text.partition(":")
    values: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        values[key] = value.split("+") if key == "ids" else value
    try:
        fault = msgspec.convert(values, Fault, strict=False)
        _check(name, fault)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(
            f"The simulator cannot have the fault {text} ({error}); see `tokenmill simulate --help`."
        ) from None
    return name, fault


def _check(name: str, fault: Fault | None) -> None:
    if name not in ALL_OF_REQUESTS and name not in OF_THE_SERVER:
        raise ValueError(f"there is no fault {name}, only {', '.join([*ALL_OF_REQUESTS, *OF_THE_SERVER])}")
    if name == "poison" and fault is not None and not fault.ids:
        raise ValueError("poison needs ids")


def _holds(input_ids: Sequence[int], ids: Sequence[int]) -> bool:
    first, length = ids[0], len(ids)
    wanted = tuple(ids)
    return any(token == first and tuple(input_ids[at : at + length]) == wanted for at, token in enumerate(input_ids))
