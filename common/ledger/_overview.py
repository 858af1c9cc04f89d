"""All that the ledger knows, read at once: for status, top and the metrics."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import redis

from common.ledger import _keys, _scripts
from common.ledger._events import Event
from common.ledger._state import DatasetState, state_of

_SNAPSHOT = _scripts.text_of("snapshot")
_SNAPSHOT_KEYS = _scripts.header(_SNAPSHOT, "KEYS")


@dataclass(frozen=True, slots=True)
class Overview:
    """`datasets` in the order of their registration; `processes` with when they were last seen (ms) and their facts.

    `failed_attempts` are counts by reason, over all processes that there were; `events` the last ones, newest last.
    """

    now_ms: int
    datasets: list[DatasetState]
    processes: dict[str, tuple[int, dict[str, Any]]]
    failed_attempts: dict[str, int]
    events: list[Event]
    expected: bool = False  # control and workers are being started


def read_overview(client: redis.Redis, events: int) -> Overview:
    """One Lua call a dataset, all in one batch: the way to Redis and back is paid three times, however many there are.

    Raises redis.RedisError.
    """
    names = [name.decode() for name in cast("list[bytes]", client.zrange(_keys.DATASETS, 0, -1))]
    with client.pipeline(transaction=False) as batch:
        for name in names:
            keys = _keys.keys_of(name)
            _script(client)(keys=[getattr(keys, key) for key in _SNAPSHOT_KEYS], client=batch)
        batch.time()
        batch.hgetall(_keys.WORKERS)
        batch.hvals(_keys.FAILED_ATTEMPTS)
        batch.lrange(_keys.EVENTS, -events, -1)
        batch.exists(_keys.EXPECTED)
        *replies, (seconds, microseconds), processes, failed, lines, expected = batch.execute()
    return Overview(
        seconds * 1000 + microseconds // 1000,
        [state_of(name, reply) for name, reply in zip(names, replies, strict=True)],
        dict(_process(name, value) for name, value in processes.items()),
        dict(sum((Counter(msgspec.json.decode(one, type=dict[str, int])) for one in failed), Counter())),
        [msgspec.json.decode(line, type=Event) for line in lines],
        bool(expected),
    )


@functools.cache
def _script(client: redis.Redis) -> Any:
    return client.register_script(_SNAPSHOT)


def _process(name: bytes, value: bytes) -> tuple[str, tuple[int, dict[str, Any]]]:
    seen, _, facts = value.partition(b" ")
    return name.decode(), (int(seen), msgspec.json.decode(facts))


@dataclass(frozen=True, slots=True)
class SampleState:
    """What the ledger knows of one sample.

    `done`: a record or a reject exists. `attempt`: the last one, 0 if it was never claimed; mostly the time of its
    claim in ms. `queued`, `leased`: where it is, else in neither. `lost`: attempts lost so far, while it is not done.
    """

    done: bool
    attempt: int
    queued: bool
    leased: bool
    owner: str
    lost: int


def read_sample(client: redis.Redis, dataset: str, index: int) -> SampleState:
    """One sample, at one instant. Raises redis.RedisError."""
    keys = _keys.keys_of(dataset)
    with client.pipeline(transaction=True) as batch:
        batch.getbit(keys.done, index)
        batch.getrange(keys.attempts, 6 * index, 6 * index + 5)
        batch.zscore(keys.queued, str(index))
        batch.zscore(keys.leases, str(index))
        batch.hget(keys.owners, str(index))
        batch.hget(keys.tries, str(index))
        done, attempt, queued, lease, owner, lost = batch.execute()
    return SampleState(
        done=bool(done),
        attempt=int.from_bytes(attempt, "big"),
        queued=queued is not None,
        leased=lease is not None,
        owner=(owner or b"").decode(),
        lost=int(lost or 0),
    )
