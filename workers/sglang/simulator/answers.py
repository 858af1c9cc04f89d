"""What the simulated model says: a pure function of the prompt's ids and the seed.

Each prompt has one endless stream of ids. The sampling parameters only decide where it is cut, so that a shorter
`max_new_tokens` gives a prefix of the longer answer. The ids come from one table that is made, and written out as
JSON, at the start: an answer is a slice of it that begins where the prompt's hash says, which makes 256 ids cost
about as much as one.
"""

import functools
import hashlib
import math
import random
import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol

import msgspec

from workers.sglang.simulator.config import SimulatorConfig

TABLE_IDS = 1 << 16


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution by its mean and its coefficient of variation (standard deviation over mean)."""

    mean: float
    cv: float

    def at(self, share: float) -> float:
        """The value below which this share (above 0, below 1) of all draws lie."""
        variance = math.log1p(self.cv * self.cv)
        return self.mean * math.exp(math.sqrt(variance) * NormalDist().inv_cdf(share) - variance / 2)


class IdTable:
    """Pseudo-random ids in a ring, and the same ids written as JSON."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._json = b"".join(b"%d," % token for token in ids)
        self._starts = array("I", [0])
        for token in ids:
            self._starts.append(self._starts[-1] + len(str(token)) + 1)

    def json(self, start: int, count: int) -> bytes:
        """`count` ids from place `start` on, each followed by a comma."""
        start %= TABLE_IDS
        first = self._json[self._starts[start] : self._starts[min(start + count, TABLE_IDS)]]
        missing = start + count - TABLE_IDS
        return first if missing <= 0 else first + self.json(0, missing)


@functools.lru_cache(maxsize=4)
def _table(seed: int, first_id: int, last_id: int, special: frozenset[int]) -> IdTable:
    draw = random.Random(seed)
    span = last_id - first_id + 1
    ids: list[int] = []
    while len(ids) < TABLE_IDS:
        token = first_id + int(draw.random() * span)
        if token not in special:
            ids.append(token)
    return IdTable(ids)


class Ids(Protocol):
    """Ids without end."""

    def json(self, tokens: int) -> bytes:
        """The first `tokens` ids as a JSON array."""
        ...

    def ids(self, tokens: int) -> list[int]:
        """The first `tokens` ids."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """The endless ids that one prompt leads to: the table's from `start` on, save for the special ones.

    `special` holds (place, id) by place: the end of thinking, if the model thinks, and the end token last.
    """

    table: IdTable
    start: int
    special: tuple[tuple[int, int], ...]

    def json(self, tokens: int) -> bytes:
        """The first `tokens` ids as a JSON array."""
        parts = []
        at = 0
        for place, token in self.special:
            if place >= tokens:
                break
            parts.append(self.table.json(self.start + at, place - at))
            parts.append(b"%d," % token)
            at = place + 1
        parts.append(self.table.json(self.start + at, tokens - at))
        return b"[" + b"".join(parts)[:-1] + b"]"

    def ids(self, tokens: int) -> list[int]:
        """The first `tokens` ids."""
        return msgspec.json.decode(self.json(tokens), type=list[int])


@dataclass(frozen=True, slots=True)
class OneToken:
    """The same id again and again: what a bias beyond all logits leads to."""

    token: int

    def json(self, tokens: int) -> bytes:
        return b"[" + (b"%d," % self.token * tokens)[:-1] + b"]"

    def ids(self, tokens: int) -> list[int]:
        return [self.token] * tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer before it is generated: what it will be, how long it gets and why it ends.

    `finish_reason` is the server's: `{"type": "stop", "matched": id}` or `{"type": "length", "length": tokens}`.
    `latency_seconds` is 0 unless the model of time is a latency for each answer.
    """

    stream: Ids
    completion_tokens: int
    finish_reason: dict[str, Any]
    latency_seconds: float


class Answers:
    """All answers of one simulated model."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._end_token_id = config.end_token_id
        self._think_end_token_id = config.think_end_token_id
        self._lengths = Lognormal(config.mean_tokens, config.cv)
        self._latencies = (
            None if config.latency_mean_seconds is None else Lognormal(config.latency_mean_seconds, config.latency_cv)
        )
        self._salt = config.seed.to_bytes(8, "little", signed=True)
        special = {config.end_token_id}
        if config.think_end_token_id is not None:
            special.add(config.think_end_token_id)
        self._table = _table(config.seed, config.first_id, config.ordinary_last_id, frozenset(special))

    def answer(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
        forced_id: int | None = None,
    ) -> Answer:
        """The answer to a prompt, in which every id is `forced_id` if there is one.

        It ends with the end token after a lognormal number of tokens (the end token counted), with a token of
        `stop_token_ids` where one comes earlier, or at `max_new_tokens`. As on the real server `ignore_eos`
        switches both kinds of stop token off, and a stop token on the last allowed place counts as `length`.
        """
        start, length, thinking, latency = struct.unpack("<4Q", self._digest(input_ids))
        stream = Stream(self._table, start % TABLE_IDS, self._special(_share(length), _share(thinking)))
        latency_seconds = 0.0 if self._latencies is None else self._latencies.at(_share(latency))
        tokens, matched = max_new_tokens, None
        if forced_id is not None:
            return self._forced(forced_id, max_new_tokens, latency_seconds, ignore_eos, stop_token_ids)
        if not ignore_eos:
            tokens, matched = self._stop(stream, max_new_tokens, stop_token_ids)
        if tokens >= max_new_tokens:
            reason = {"type": "length", "length": max_new_tokens}
            return Answer(stream, max_new_tokens, reason, latency_seconds)
        return Answer(stream, tokens, {"type": "stop", "matched": matched}, latency_seconds)

    def _forced(
        self, token: int, max_new_tokens: int, latency_seconds: float, ignore_eos: bool, stop_token_ids: Collection[int]
    ) -> Answer:
        stops = not ignore_eos and (token == self._end_token_id or token in stop_token_ids)
        if stops and max_new_tokens > 1:
            return Answer(OneToken(token), 1, {"type": "stop", "matched": token}, latency_seconds)
        reason = {"type": "length", "length": max_new_tokens}
        return Answer(OneToken(token), max_new_tokens, reason, latency_seconds)

    def _digest(self, input_ids: Sequence[int]) -> bytes:
        return hashlib.blake2b(array("Q", input_ids), digest_size=32, salt=self._salt).digest()

    def _special(self, length_share: float, thinking_share: float) -> tuple[tuple[int, int], ...]:
        length = round(self._lengths.at(length_share))
        if self._think_end_token_id is None:
            return ((max(length, 1) - 1, self._end_token_id),)
        end = max(length, 2) - 1
        return ((int(thinking_share * end), self._think_end_token_id), (end, self._end_token_id))

    def _stop(self, stream: Stream, max_new_tokens: int, stop_token_ids: Collection[int]) -> tuple[int, int]:
        """How many tokens the answer has if nothing but a stop token ends it, and which token that is."""
        tokens = stream.special[-1][0] + 1
        wanted = set(stop_token_ids) - {self._end_token_id}
        if wanted:
            for place, token in enumerate(stream.ids(min(tokens, max_new_tokens))):
                if token in wanted:
                    return place + 1, token
        return tokens, self._end_token_id


def _share(word: int) -> float:
    """A 64-bit word as a share above 0 and below 1."""
    return ((word >> 12) + 0.5) / (1 << 52)
