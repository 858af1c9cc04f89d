"""What is not of one dataset: the processes that live, the servers, and what these serve."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import redis

from common.ledger import _keys, _scripts
from common.ledger._events import KEPT_EVENTS, Event
from common.ledger._overview import Overview, SampleState, read_overview, read_sample

ServerChange = Literal["added", "drained"]
# A process that was not heard of for so long is shown as silent, and its slots are not planned with.
SILENT_MS = 10_000


class Processes:
    """A part of the ledger (__init__.py). Methods raise redis.RedisError where Redis cannot be reached."""

    def __init__(self, client: redis.Redis) -> None:
        self.redis = client

    def now_ms(self) -> int:
        """Redis's time, by which all that the ledger keeps is dated."""
        seconds, microseconds = self.redis.time()
        return seconds * 1000 + microseconds // 1000

    def heartbeat(self, name: str, facts: Mapping[str, Any] | None) -> int:
        """Say that process `name` lives, with facts for status (None: it is gone). Answers Redis's time in ms."""
        text = "" if facts is None else msgspec.json.encode(facts).decode()
        return _scripts.heartbeat(self.redis, _keys.keys_of(""), name=name, facts=text)

    def forget_process(self, name: str) -> None:
        """Drop all that is known of a process that has ended, its clocks first; leases that it holds run out."""
        for dataset in cast("list[bytes]", self.redis.zrange(_keys.DATASETS, 0, -1)):
            _scripts.tell(self.redis, _keys.keys_of(dataset.decode()), owner=name, packed=b"")
        self.redis.hdel(_keys.ORDERS, name)
        self.heartbeat(name, None)

    def processes(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Every known process: when it was last seen (ms), and its facts."""
        known = {}
        for name, value in cast("dict[bytes, bytes]", self.redis.hgetall(_keys.WORKERS)).items():
            seen, _, facts = value.partition(b" ")
            known[name.decode()] = (int(seen), msgspec.json.decode(facts))
        return known

    def overview(self, events: int) -> Overview:
        """Every dataset, every process and the last `events` events, read at once."""
        return read_overview(self.redis, events)

    def sample(self, dataset: str, index: int) -> SampleState:
        """What is known of one sample."""
        return read_sample(self.redis, dataset, index)

    def expect_processes(self, seconds: int) -> None:
        """Say that control and workers are being started, and need not be missed for so long; 0: that is over."""
        if seconds:
            self.redis.set(_keys.EXPECTED, "1", ex=seconds)
        else:
            self.redis.delete(_keys.EXPECTED)

    def processes_expected(self) -> bool:
        """Whether somebody has said so."""
        return bool(self.redis.exists(_keys.EXPECTED))

    def live_workers(self) -> list[str]:
        """The workers that were heard of lately."""
        now_ms = self.now_ms()
        return [
            name
            for name, (seen_ms, facts) in self.processes().items()
            if facts.get("kind") == "worker" and abs(now_ms - seen_ms) <= SILENT_MS
        ]

    def set_model(self, facts: Mapping[str, Any]) -> None:
        """Keep what the servers serve; the feed and the workers read it."""
        self.redis.set(_keys.MODEL, msgspec.json.encode(facts))

    def model(self) -> dict[str, Any] | None:
        """What the servers serve, or None before a server was seen."""
        value = cast("bytes | None", self.redis.get(_keys.MODEL))
        return None if value is None else msgspec.json.decode(value)

    def change_server(self, url: str, change: ServerChange) -> None:
        """Add the server at `url` to the running job, or drain it; workers see that within seconds."""
        self.redis.hset(_keys.SERVERS, url.rstrip("/"), change)

    def server_changes(self) -> dict[str, ServerChange]:
        """What was last asked for, by url: see common.servers.urls_in_use."""
        changes = cast("dict[bytes, bytes]", self.redis.hgetall(_keys.SERVERS))
        return {url.decode(): cast("ServerChange", change.decode()) for url, change in changes.items()}

    def set_failed_attempts(self, process: str, reasons: Mapping[str, int]) -> None:
        """Note how often attempts have failed in one life of a process, by reason; `process` names that life."""
        self.redis.hset(_keys.FAILED_ATTEMPTS, process, msgspec.json.encode(reasons))

    def failed_attempts(self) -> dict[str, int]:
        """How often attempts have failed, by reason, over all processes that there were."""
        sums: Counter[str] = Counter()
        for counts in cast("list[bytes]", self.redis.hvals(_keys.FAILED_ATTEMPTS)):
            sums.update(msgspec.json.decode(counts, type=dict[str, int]))
        return dict(sums)

    def add_event(self, event: Event) -> None:
        """Keep `event` among the last 200; the file is written first (common/events.py: tell)."""
        self._push_events([event])

    def refill_events(self, events: Sequence[Event]) -> None:
        """Put the end of the file, the newest last, in the place of what Redis has of it."""
        self._push_events(events, anew=True)

    def _push_events(self, events: Sequence[Event], *, anew: bool = False) -> None:
        with self.redis.pipeline(transaction=True) as steps:
            if anew:
                steps.delete(_keys.EVENTS)
            if events:
                steps.rpush(_keys.EVENTS, *map(msgspec.json.encode, events))
            steps.ltrim(_keys.EVENTS, -KEPT_EVENTS, -1)
            steps.execute()

    def events(self, n: int = KEPT_EVENTS) -> list[Event]:
        """The last `n` that Redis has, the newest last."""
        lines = cast("list[bytes]", self.redis.lrange(_keys.EVENTS, -n, -1)) if n > 0 else []
        return [msgspec.json.decode(line, type=Event) for line in lines]
