"""Which prompts were fed, and by which sample first: for datasets that reject the others (producer/dedupe.py)."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import cast

import redis

from common.ledger import _keys, _scripts
from common.ledger._processes import Processes
from common.ledger._state import parts

_CALL = 500
# Bits that lie no further apart than this are read with all that is between them.
_NEAR_BYTES = 4


def set_among(client: redis.Redis, key: str, indices: Iterable[int]) -> set[int]:
    """Those of `indices` whose bit is set in the bitmap at `key`."""
    wanted = [*indices]
    if not wanted:
        return set()
    start, last = min(wanted) // 8, max(wanted)
    if last // 8 - start < _NEAR_BYTES * len(wanted):
        # The rows of a feed stand side by side, and most often none of them is done.
        raw = cast("bytes", client.getrange(key, start, last // 8))
        near = [index for index in wanted if index // 8 - start < len(raw)] if raw.strip(b"\0") else []
        return {index for index in near if raw[index // 8 - start] >> (7 - index % 8) & 1}
    found = set[int]()
    for part in parts(wanted, _CALL):
        bits = client.bitfield_ro(key, "u1", str(part[0]), [("u1", str(index)) for index in part[1:]])
        found.update(itertools.compress(part, bits))
    return found


class Prompts(Processes):
    """A part of the ledger (__init__.py). Methods raise redis.RedisError where Redis cannot be reached."""

    def remember(
        self, dataset: str, prompts: Sequence[tuple[int, bytes]], *, shared: bool
    ) -> dict[int, tuple[str, int]]:
        """Note (index, digest) of prompts in the order in which they are fed; answers whose prompt another sample has.

        Of these the dataset and the index of that sample. `shared` compares with those of all datasets that share.
        """
        others: dict[int, tuple[str, int]] = {}
        for part in parts(prompts, _CALL):
            firsts = _scripts.remember(
                self.redis, _keys.keys_of(dataset), dataset=dataset, shared=shared, samples=[*itertools.chain(*part)]
            )
            for (index, _), first in zip(part, firsts, strict=True):
                name, _, known = first.partition(" ")
                if (name, int(known)) != (dataset, index):
                    others[index] = name, int(known)
        return others

    def untold(self, dataset: str, indices: Collection[int]) -> set[int]:
        """Those of `indices` that `remember` was never told of."""
        return set(indices) - set_among(self.redis, _keys.keys_of(dataset).told, indices)

    def queued_payloads(self, dataset: str) -> Iterator[tuple[int, bytes]]:
        """The payloads of all samples that have not ended; one may come twice."""
        for index, payload in self.redis.hscan_iter(_keys.keys_of(dataset).payloads, count=100):
            yield int(index), cast("bytes", payload)

    def forget_prompts(self, dataset: str) -> None:
        """Take those of `dataset` from the prompts that are shared; its own go with its other keys."""
        own = f"{dataset} ".encode()
        shared = self.redis.hscan_iter(_keys.SHARED_PROMPTS, count=_CALL)
        for part in parts((digest for digest, first in shared if first.startswith(own)), _CALL):
            self.redis.hdel(_keys.SHARED_PROMPTS, *part)
