"""Steps that the tests of the ledger share: one dataset, b1, fed, claimed and looked at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from common.ledger import Claimed, Ledger, Settled
from common.ledger._keys import keys_of
from common.sections import DatasetSettings
from workers.keeper import Keeper

KEYS = keys_of("b1")
HOUR = 3600.0
_LONG_MS = 1_800_000


def settings(name: str = "b1", **more: Any) -> DatasetSettings:
    return DatasetSettings(name=name, path=Path("b1.jsonl"), **more)


def record(sample: Claimed, tokens: int = 10, flags: Sequence[str] = ()) -> Settled:
    return Settled(sample.index, sample.attempt, 100, tokens, 60, tuple(flags))


def admit(ledger: Ledger, room: int = 1000) -> str:
    return ledger.admit("b1", room=room, window=64, tokens_per_second=12.5)


def feed(ledger: Ledger, samples: int, *, ended: bool = False) -> None:
    """Register b1, queue the samples 0 to `samples - 1`, and give it room."""
    ledger.register(settings(cap_tokens=1000))
    rows = [(index, b"prompt %d" % index) for index in range(samples)]
    ledger.feed("b1", before="", after=str(samples), ended=ended, rejected=[], samples=rows)
    admit(ledger)


def claim(ledger: Ledger, *indices: int, owner: str = "w1") -> list[Claimed]:
    claimed, refused = ledger.claim("b1", owner, HOUR, indices)
    assert refused == {}
    return claimed


def lapse(ledger: Ledger, *samples: Claimed) -> None:
    """Turn the clock for these leases: they ran out."""
    ledger.redis.zadd(KEYS.leases, {str(sample.index): 1 for sample in samples}, xx=True)


def pair(sample: Claimed) -> tuple[int, int]:
    return sample.index, sample.attempt


def given_back(ledger: Ledger, dataset: str = "b1") -> list[int]:
    """The samples that are to be sent before all others."""
    rows = cast(
        "list[bytes]",
        ledger.redis.zrange(keys_of(dataset).queued, cast("Any", "-inf"), cast("Any", "(0.5"), byscore=True),
    )
    return sorted(int(row) for row in rows)


def counts(ledger: Ledger) -> tuple[int, int, int, int]:
    """Queued, in flight, done, rejected."""
    now = ledger.snapshot("b1")
    return now.queued, now.in_flight, now.done, now.rejected


def every_key(ledger: Ledger) -> set[str]:
    """What Redis holds, by name."""
    return {key.decode() for key in ledger.redis.scan_iter()}


class PatientKeeper(Keeper):
    """A keeper that does not see how slow this machine is: its workers live, and no gap is between two ticks of a test.

    A worker that a test has made silent for an hour, and a gap as long, are seen.
    """

    def tick(self) -> bool:
        now_ms = self._ledger.heartbeat("keeper", {"kind": "keeper"})
        for name, (seen_ms, facts) in self._ledger.processes().items():
            if facts.get("kind") == "worker" and now_ms - seen_ms < _LONG_MS:
                self._ledger.heartbeat(name, facts)
        if self._tick_ms is not None and 0 <= now_ms - self._tick_ms < _LONG_MS:
            self._tick_ms = now_ms
        return super().tick()


def lapse_all(ledger: Ledger, dataset: str) -> None:
    """Turn the clock for every lease of `dataset`: they ran out."""
    key = keys_of(dataset).leases
    leased = cast("list[bytes]", ledger.redis.zrange(key, 0, -1))
    ledger.redis.zadd(key, {index.decode(): 1 for index in leased}, xx=True)
