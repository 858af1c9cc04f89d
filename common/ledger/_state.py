"""What goes into and comes out of the ledger."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.ledger._lengths import percentile


@dataclass(frozen=True, slots=True)
class Claimed:
    """A sample handed to one attempt."""

    dataset: str
    index: int
    attempt: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """What the ledger counts of one durable record.

    Of a turn of a conversation `turns_left` are still to come; the next follows `answer` (common/turns.py), or none
    does, and these are counted as stopped. None: it is no such turn, or what becomes of the others is known.
    """

    index: int
    attempt: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    flags: tuple[str, ...]
    turns_left: int | None = None
    answer: bytes = b""
    clock: float = 0.0  # of its answer, in tokens; 0 where nobody told it


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A turn of a conversation to be queued: the sample `index` follows the answer of the sample `follows`.

    `follows` is None for the first turn of a row; `earlier` samples before it are of the same conversation.
    `conversation` is what the turns after this one need, `prompt_tokens` is 0 unless the budget counts them.
    """

    index: int
    payload: bytes
    conversation: bytes
    prompt_tokens: int = 0
    follows: int | None = None
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A conversation that ends with the answer of the sample `follows`: `turns` more are not made, for `reason`."""

    follows: int
    reason: str
    turns: int
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A sample whose attempt lost its lease: that attempt, and the worker that made it."""

    index: int
    attempt: int
    owner: str


@dataclass(frozen=True, slots=True)
class DatasetState:
    """One dataset at one instant. Tokens are counts of accepted answers; `room` is the claims still allowed.

    `starts` counts all claims so far; of the `queued` samples, `sent` are in messages. `fed_bytes` is what the prompts
    of all `fed` samples took in Redis. `answers` wait to be followed by the next turn of their conversation, `resumed`
    ones for their row to be read again before; `stopped` are turns that are not made, by reason. Of the `done` records
    `uncounted` do not count against the cap, and their tokens are among the sums. The gates look at answers that were
    claimed from `gates_since_ms` on; `recent` answers were ever put into their window.
    """

    name: str
    now_ms: int
    spec: Mapping[str, Any]
    state: str
    reason: str
    cap_tokens: int | None
    count: str
    weight: float
    cursor: str
    ended: bool
    room: int
    window: int
    starts: int
    fed: int
    fed_bytes: int
    tokens_per_second: float
    done: int
    rejected: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    squared_tokens: int
    max_tokens: int
    expired: int
    queued: int
    sent: int
    in_flight: int
    lengths: Mapping[int, int] = field(default_factory=dict)
    rejects: Mapping[str, int] = field(default_factory=dict)
    flags: Mapping[str, int] = field(default_factory=dict)
    stopped: Mapping[str, int] = field(default_factory=dict)
    answers: int = 0
    resumed: int = 0
    uncounted: int = 0
    uncounted_prompt_tokens: int = 0
    uncounted_completion_tokens: int = 0
    gates_since_ms: int = 0
    recent: int = 0

    @property
    def spent_tokens(self) -> int:
        """What counts against the cap: completion tokens, or all of them where `count` is total.

        Without those of records that a gate keeps from counting.
        """
        tokens = self.completion_tokens + (self.prompt_tokens if self.count == "total" else 0)
        return tokens - self.uncounted_tokens

    @property
    def uncounted_tokens(self) -> int:
        """What would count against the cap, too, if no gate kept it from that."""
        prompts = self.uncounted_prompt_tokens if self.count == "total" else 0
        return self.uncounted_completion_tokens + prompts

    def percentile(self, share: float) -> int:
        """The answer length that `share` of the answers do not exceed, within 8 %."""
        return percentile(self.lengths, share, self.max_tokens)


def parts(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    iterator = iter(items)
    while part := tuple(itertools.islice(iterator, size)):
        yield part


def _pairs(flat: Sequence[bytes]) -> dict[str, int]:
    return {key.decode(): int(value) for key, value in parts(flat, 2)}


def state_of(name: str, reply: Sequence[Any]) -> DatasetState:
    now_ms, flat, queued, sent, in_flight, lengths, rejects, flags, stopped, answers, resumed = reply
    fields = {key.decode(): value.decode() for key, value in parts(flat, 2)}
    number = {key: int(fields.get(key, "0")) for key in _NUMBERS}
    return DatasetState(
        name=name,
        now_ms=now_ms,
        spec=msgspec.json.decode(fields.get("spec", "{}")),
        state=fields.get("state", ""),
        reason=fields.get("reason", ""),
        cap_tokens=int(fields.get("cap_tokens", "0")) or None,
        count=fields.get("count", "completion"),
        weight=float(fields.get("weight", "1")),
        cursor=fields.get("cursor", ""),
        ended=fields.get("ended") == "1",
        tokens_per_second=float(fields.get("tokens_per_second", "0")),
        queued=queued,
        sent=sent,
        in_flight=in_flight,
        lengths={int(bucket): n for bucket, n in _pairs(lengths).items()},
        rejects=_pairs(rejects),
        flags=_pairs(flags),
        stopped=_pairs(stopped),
        answers=answers,
        resumed=resumed,
        **number,
    )


_NUMBERS = (
    "room",
    "window",
    "starts",
    "fed",
    "fed_bytes",
    "done",
    "rejected",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "squared_tokens",
    "max_tokens",
    "uncounted",
    "uncounted_prompt_tokens",
    "uncounted_completion_tokens",
    "gates_since_ms",
    "recent",
    "expired",
)
