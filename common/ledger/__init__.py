"""The ledger: which samples are queued, in flight, done or rejected, and what each dataset has spent.

Every change is one Lua script (scripts/), atomic and idempotent; times come from Redis. A `Ledger` is one connection
for one thread at a time. Redis is a cache: the segments are the truth, and `tokenmill recover` builds the ledger anew.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from struct import unpack
from typing import Any, cast

import msgspec
import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.lock import Lock
from redis.retry import Retry

from common.errors import RedisUnavailable
from common.ledger import _keys, _scripts
from common.ledger._conversations import Conversations
from common.ledger._events import KEPT_EVENTS, Event
from common.ledger._lengths import bucket_of
from common.ledger._outcomes import KEPT_OUTCOMES, LOST, Ended, InFlight, Progress, pack_in_flight, pack_outcomes
from common.ledger._overview import SampleState
from common.ledger._processes import SILENT_MS, ServerChange
from common.ledger._prompts import Prompts, set_among
from common.ledger._recent import Recent, pack_recent
from common.ledger._state import Claimed, DatasetState, Ending, Lapsed, NextTurn, Settled, parts, state_of
from common.ledger._steering import Order, Steering
from common.sections import DatasetSettings

# A call carries at most this many samples: Lua can unpack some 8,000 values, and 500 take Redis about 5 ms.
_CALL = 500
# A sample that lost so many workers is a suspect: a worker gets one at a time. With 128 in flight at each death, the
# other 127 would end with the one that kills.
SUSPECT_AFTER = 2
# A suspect is not what kills a worker that lives for so long after it claimed it.
_ALONE_MS = 10_000
# A frozen Redis is waited for: the socket gives up after 30 s, and the call is made again (scripts are idempotent).
_SOCKET_SECONDS = 30
__all__ = [
    "ENDED_STATES",
    "KEPT_EVENTS",
    "LOST",
    "OPEN_STATES",
    "SILENT_MS",
    "SUSPECT_AFTER",
    "Claimed",
    "DatasetState",
    "Ended",
    "Ending",
    "Event",
    "InFlight",
    "Lapsed",
    "Ledger",
    "NextTurn",
    "Order",
    "Progress",
    "SampleState",
    "ServerChange",
    "Settled",
    "pack_in_flight",
]

OPEN_STATES = ("open", "closing")
ENDED_STATES = ("capped", "exhausted", "halted", "failed", "cancelled")


class Ledger(Conversations, Prompts, Recent, Steering):
    """The ledger's transitions. Methods raise redis.RedisError where Redis cannot be reached."""

    @classmethod
    def connect(cls, url: str, *, attempts: int = 3) -> "Ledger":
        """A ledger on the server at `url`; raises RedisUnavailable if it does not answer."""
        retry = Retry(ExponentialWithJitterBackoff(base=0.1, cap=2), attempts)
        try:
            client = redis.Redis.from_url(
                url, socket_timeout=_SOCKET_SECONDS, socket_connect_timeout=5, health_check_interval=25, retry=retry
            )
            client.ping()
        except (redis.RedisError, ValueError) as error:  # ValueError: an address that cannot be read
            raise RedisUnavailable(
                f"Redis at {_without_password(url)} does not answer ({error}); "
                "start it, or correct `redis` in the configuration"
            ) from error
        return cls(client)

    def close(self) -> None:
        """Close the connection."""
        self.redis.close()

    # Datasets

    def register(self, dataset: DatasetSettings) -> str:
        """Make `dataset` known, or take over its changed settings; answers `new`, `known` or `reopened`."""
        spec = msgspec.json.encode(dataset.model_dump(mode="json")).decode()
        return _scripts.register(
            self.redis,
            _keys.keys_of(dataset.name),
            name=dataset.name,
            spec=spec,
            cap_tokens=dataset.cap_tokens or 0,
            count=dataset.count,
            weight=dataset.weight,
        )

    def datasets(self) -> list[str]:
        """The names, in the order of registration."""
        return [name.decode() for name in cast("list[bytes]", self.redis.zrange(_keys.DATASETS, 0, -1))]

    def spec(self, dataset: str) -> bytes:
        """The settings that `dataset` was last registered with, as JSON; empty if it is not known."""
        return cast("bytes | None", self.redis.hget(_keys.keys_of(dataset).state, "spec")) or b""

    def snapshot(self, dataset: str) -> DatasetState:
        """`dataset` at this instant."""
        reply = _scripts.snapshot(self.redis, _keys.keys_of(dataset))
        return state_of(dataset, reply)

    def admit(
        self, dataset: str, *, room: int, window: int, tokens_per_second: float, starts: int | None = None
    ) -> str:
        """Set how many samples may still be claimed; answers the state that follows.

        `starts` is what the snapshot had seen that `room` was made from: claims after it have taken of that room.
        """
        return _scripts.admit(
            self.redis,
            _keys.keys_of(dataset),
            room=room,
            starts="" if starts is None else starts,
            window=window,
            tokens_per_second=tokens_per_second,
        )

    def progress(self, dataset: str) -> Progress:
        """What of `dataset` is in flight, how far it has come, and how its last attempts ended."""
        now_ms, leases, clocks, outcomes, prompts, lost = _scripts.progress(self.redis, _keys.keys_of(dataset))
        return Progress(
            now_ms,
            {int(index): int(float(until)) for index, until in parts(leases, 2)},
            {owner.decode(): (unpack(">d", packed[:8])[0], packed[8:]) for owner, packed in parts(clocks, 2)},
            outcomes,
            {int(index): int(tokens) for index, tokens in parts(prompts, 2)},
            {int(index): float(clock) for index, clock in parts(lost, 2)},
        )

    def observe(self, dataset: str, ended: Sequence[Ended]) -> None:
        """Keep how attempts ended; the estimate of lengths is made from the last some thousand."""
        packed = pack_outcomes(ended)
        lost = [value for one in ended if one.tokens < 0 for value in (one.index, one.clock)]
        keys, size = _keys.keys_of(dataset), len(packed) // len(ended)
        _scripts.observe(self.redis, keys, kept=KEPT_OUTCOMES, size=size, packed=packed, lost=lost)

    def tell(self, dataset: str, owner: str, packed: bytes) -> None:
        """Say how far the answers of `owner` in flight have come (pack_in_flight); empty: it has none."""
        _scripts.tell(self.redis, _keys.keys_of(dataset), owner=owner, packed=packed)

    # The way in

    def feed(
        self,
        dataset: str,
        *,
        before: str,
        after: str,
        ended: bool,
        rejected: Sequence[tuple[int, str]],
        samples: Sequence[tuple[int, bytes]],
        prompts: Mapping[int, int] | None = None,
    ) -> int | None:
        """Queue (index, payload) pairs, count (index, reason) rejects, move the cursor.

        `prompts` gives their prompt tokens by index, where the budget counts these.
        Answers how many samples were queued, or None if another feed has moved the cursor from `before`.
        """
        rows: list[_scripts.Argument] = []
        for index, reason in rejected:
            rows += (index, reason)
        for index, payload in samples:
            rows += (index, payload, prompts.get(index, 0) if prompts else 0)
        queued = _scripts.feed(
            self.redis,
            _keys.keys_of(dataset),
            before=before,
            after=after,
            ended=ended,
            rejected=len(rejected),
            rows=rows,
        )
        return None if queued < 0 else queued

    def done_among(self, dataset: str, indices: Iterable[int]) -> set[int]:
        """Those of `indices` that have a record or a reject."""
        return set_among(self.redis, _keys.keys_of(dataset).done, indices)

    def feeding(self, dataset: str, seconds: float) -> Lock:
        """A lock that keeps a second feed of `dataset` from doing the same rows' work twice."""
        return cast("Lock", self.redis.lock(_keys.keys_of(dataset).feeding, timeout=seconds, blocking=False))

    # The life of a sample

    def claim(
        self, dataset: str, owner: str, lease_seconds: float, indices: Sequence[int]
    ) -> tuple[list[Claimed], dict[int, str]]:
        """Claim queued samples; answers those handed over, and for the others the word that says why not."""
        claimed: list[Claimed] = []
        refused: dict[int, str] = {}
        for part in parts(indices, _CALL):
            words, payloads = _scripts.claim(
                self.redis,
                _keys.keys_of(dataset),
                owner=owner,
                lease_ms=round(lease_seconds * 1000),
                suspect_after=SUSPECT_AFTER,
                alone_ms=_ALONE_MS,
                indices=part,
            )
            for index, word, payload in zip(part, words, payloads, strict=True):
                if isinstance(word, int):
                    claimed.append(Claimed(dataset, index, word, payload))
                else:
                    refused[index] = word
        return claimed, refused

    def renew(self, dataset: str, owner: str, lease_seconds: float, samples: Sequence[tuple[int, int]]) -> list[int]:
        """Prolong the leases of (index, attempt) pairs; answers the indices that another attempt has by now."""
        lost: list[int] = []
        for part in parts(samples, _CALL):
            lost += _scripts.renew(
                self.redis,
                _keys.keys_of(dataset),
                owner=owner,
                lease_ms=round(lease_seconds * 1000),
                samples=[*itertools.chain(*part)],
            )
        return lost

    def settle(
        self,
        dataset: str,
        records: Sequence[Settled],
        *,
        segment: str = "",
        committed_bytes: int = 0,
        rebuild: bool = False,
    ) -> list[bool]:
        """Count records that are durable in `segment` up to `committed_bytes`; answers which of them count.

        A record that does not count was superseded by another attempt: the caller voids it, and then calls
        set_committed, which this call leaves undone in that case.
        `rebuild` counts a record whatever the current attempt is: a recovery adds each sample's best record.
        """
        counted: list[bool] = []
        for part in parts(records, _CALL) if records else [()]:
            samples: list[_scripts.Argument] = []
            for r in part:
                tokens = (r.prompt_tokens, r.completion_tokens, r.cached_tokens, bucket_of(r.completion_tokens))
                left = "" if r.turns_left is None else r.turns_left
                recent = b"" if rebuild else pack_recent(r)
                samples += (r.index, r.attempt, *tokens, ",".join(r.flags), left, r.answer, recent)
            # The file counts as settled up to its new length only when all parts are.
            last = len(counted) + len(part) == len(records) and all(counted)
            answers = _scripts.settle(
                self.redis,
                _keys.keys_of(dataset),
                segment=segment if last else "",
                committed_bytes=committed_bytes,
                rebuild=rebuild,
                samples=samples,
            )
            counted += [answer == 1 for answer in answers]
        return counted

    def release(self, dataset: str, samples: Sequence[tuple[int, int]], *, failed: bool) -> int:
        """Give (index, attempt) pairs back to the queue; `failed` counts against their tries. Answers how many."""
        return sum(
            _scripts.release(self.redis, _keys.keys_of(dataset), failed=failed, samples=[*itertools.chain(*part)])
            for part in parts(samples, _CALL)
        )

    def reject(
        self,
        dataset: str,
        samples: Sequence[tuple[int, int, str]],
        *,
        turns_left: Mapping[int, int] | None = None,
        rebuild: bool = False,
    ) -> list[bool]:
        """End (index, attempt, reason) samples that get no record; answers which this call ended.

        `turns_left` says by index how many turns of a conversation end with it.
        """
        ended: list[bool] = []
        left = turns_left or {}
        for part in parts(samples, _CALL):
            rows = [value for one in part for value in (*one, left.get(one[0], 0))]
            answers = _scripts.reject(self.redis, _keys.keys_of(dataset), rebuild=rebuild, samples=rows)
            ended += [answer == 1 for answer in answers]
        return ended

    # What the keeper does

    def expire(self, dataset: str, *, max_tries: int, hold_seconds: float = 60) -> tuple[list[Lapsed], list[Lapsed]]:
        """Take back samples whose lease ran out; answers those queued again, and those that are to be rejected.

        These lost `max_tries` workers, or one that had no other suspect when it was last heard of.
        """
        back, ended = _scripts.expire(
            self.redis, _keys.keys_of(dataset), max_tries=max_tries, limit=_CALL, hold_ms=round(hold_seconds * 1000)
        )
        return (
            [Lapsed(index, attempt, owner.decode()) for index, attempt, owner in parts(back, 3)],
            [Lapsed(index, attempt, owner.decode()) for index, attempt, owner in parts(ended, 3)],
        )

    def lapsed(self, dataset: str) -> int:
        """How many leases have run out."""
        return self.redis.zcount(_keys.keys_of(dataset).leases, "-inf", self.now_ms())

    def pull_back(self, dataset: str, now_ms: int, lease_seconds: float) -> None:
        """After Redis's clock was set back: no message was sent later than now, no lease lasts longer than a new one.

        Else the samples of what died or was lost before that would wait for the old time to come again.
        """
        keys = _keys.keys_of(dataset)
        for key, latest_ms in ((keys.queued, now_ms), (keys.leases, now_ms + round(lease_seconds * 1000))):
            late = cast("list[bytes]", self.redis.zrange(key, cast("Any", f"({latest_ms}"), "+inf", byscore=True))
            if late:
                # Only what is still there, and only down: a claim or a renewal in the meantime stays.
                self.redis.zadd(key, dict.fromkeys(late, latest_ms), xx=True, lt=True)

    def due(self, dataset: str, before_ms: int, limit: int = 10 * _CALL) -> list[int]:
        """Queued samples whose message was sent at or before `before_ms`, and is not heard of since."""
        return self._queued(dataset, 1, before_ms, limit)

    def unsent(self, dataset: str, limit: int) -> list[int]:
        """The next queued samples that are in no message: first those given back, then in the order they were fed."""
        return self._queued(dataset, "-inf", "(1", limit)

    def suspects(self, dataset: str) -> list[int]:
        """The queued samples in no message that lost SUSPECT_AFTER workers, in order: a worker gets one at a time."""
        keys = _keys.keys_of(dataset)
        tries = cast("dict[bytes, bytes]", self.redis.hgetall(keys.tries))
        suspects = sorted(int(index) for index, lost in tries.items() if int(lost) >= SUSPECT_AFTER)
        scores = [
            score for part in parts(suspects, _CALL) for score in self.redis.zmscore(keys.queued, [*map(str, part)])
        ]
        return [index for index, score in zip(suspects, scores, strict=True) if score is not None and score < 1]

    def _queued(self, dataset: str, lowest: int | str, highest: int | str, limit: int) -> list[int]:
        key = _keys.keys_of(dataset).queued
        rows = self.redis.zrange(key, cast("Any", lowest), cast("Any", highest), byscore=True, offset=0, num=limit)
        return [int(row) for row in cast("list[bytes]", rows)]

    def resend(self, dataset: str, before_ms: int, indices: Sequence[int]) -> list[int]:
        """Mark samples last sent before `before_ms`, or never, as sent now; answers those the caller must send."""
        return [
            index
            for part in parts(indices, _CALL)
            for index in _scripts.resend(self.redis, _keys.keys_of(dataset), before_ms=before_ms, indices=part)
        ]

    def keeping(self, seconds: float) -> Lock:
        """The keeper's lock: one tick at a time, whoever runs it."""
        return cast("Lock", self.redis.lock(_keys.KEEPER, timeout=seconds, blocking=False))

    # Files

    def committed(self) -> dict[str, int]:
        """For each segment (`dataset/file`) the bytes up to which its records are settled."""
        sizes = cast("dict[bytes, bytes]", self.redis.hgetall(_keys.SEGMENTS))
        return {name.decode(): int(size) for name, size in sizes.items()}

    def forget(self, dataset: str) -> None:
        """Drop what the ledger holds of `dataset`, before it is built anew."""
        ours = [name for name in self.committed() if name.startswith(f"{dataset}/")]
        if ours:
            self.redis.hdel(_keys.SEGMENTS, *ours)
        leases = _keys.keys_of(dataset).leases.encode()
        noted = cast("list[bytes]", self.redis.hkeys(_keys.SUSPECTS))
        if suspects := [name for name in noted if name.rpartition(b" ")[0] == leases]:
            self.redis.hdel(_keys.SUSPECTS, *suspects)
        self.forget_prompts(dataset)
        self.redis.zrem(_keys.DATASETS, dataset)
        self.redis.delete(*_keys.dataset_keys(dataset))

    def set_committed(self, segment: str, size: int) -> None:
        """Note that `segment` is settled up to `size` bytes: all its records count or are voided."""
        self.redis.hset(_keys.SEGMENTS, segment, size)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    # A password stands before the @, or in the query of a unix:// address.
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]
