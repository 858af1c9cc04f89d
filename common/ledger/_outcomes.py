"""What the budget's estimate is made of: how far answers in flight have come, and how the last attempts ended.

Both are kept as packed numbers, since a keeper reads some thousands of them every second.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

# The rule forgets with a memory of some hundred starts; older outcomes would weigh nothing.
KEPT_OUTCOMES = 8192
_IN_FLIGHT = struct.Struct(">Idff")
_OUTCOME = struct.Struct(">dff")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A sample in flight: its clock in tokens, and how fast that goes."""

    index: int
    attempt: int
    clock: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that ended: its clock then, and the tokens charged (0: rejected; below 0: the attempt was lost)."""

    index: int
    attempt: int
    clock: float
    tokens: int


LOST = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """A dataset's answers in flight and the last that ended, as packed by the functions below."""

    now_ms: int
    leases: dict[int, int]  # index -> when its lease runs out (ms)
    clocks: dict[str, tuple[float, bytes]] = field(default_factory=dict)  # worker -> (told at, in ms; packed InFlight)
    outcomes: bytes = b""  # packed Ended, in no order
    prompts: dict[int, int] = field(default_factory=dict)  # index -> prompt tokens; empty unless the budget counts them
    lost: dict[int, float] = field(default_factory=dict)  # index -> furthest clock of its lost attempts


def pack_in_flight(samples: Iterable[InFlight]) -> bytes:
    """20 bytes each, big-endian: index (unsigned, 4), and as floats attempt (8), clock (4), tokens per second (4)."""
    return b"".join(_IN_FLIGHT.pack(one.index, one.attempt, one.clock, one.tokens_per_second) for one in samples)


def pack_outcomes(ended: Iterable[Ended]) -> bytes:
    """16 bytes each, big-endian: attempt (8, float), clock (4, float), tokens (4, float)."""
    return b"".join(_OUTCOME.pack(one.attempt, one.clock, one.tokens) for one in ended)
