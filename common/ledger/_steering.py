"""What people ask for while a job runs: of a dataset, and of a worker."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec

from common.ledger import _keys, _scripts
from common.ledger._processes import Processes
from common.ledger._state import DatasetState
from common.sections import DatasetSettings

# drain: end when what is in flight has ended, however long that takes; stop: as at TERM, within [worker] drain_seconds.
Order = Literal["drain", "stop"]


class Steering(Processes):
    """A part of the ledger (__init__.py). Methods raise redis.RedisError where Redis cannot be reached."""

    def transition(self, dataset: str, target: str, sources: Sequence[str], reason: str = "") -> str:
        """Move `dataset` to `target` if it is in one of `sources`; answers the state it was in."""
        return _scripts.transition(self.redis, _keys.keys_of(dataset), target=target, reason=reason, sources=sources)

    def retune(self, seen: DatasetState, dataset: DatasetSettings) -> str:
        """Give the dataset that was `seen` the cap and weight of `dataset`, if nobody has changed these since.

        Answers `moved` if somebody has, `cancelled` if it is so, `reopened`, or the state that it is in.
        """
        return _scripts.retune(
            self.redis,
            _keys.keys_of(seen.name),
            seen_cap_tokens=seen.cap_tokens or 0,
            seen_weight=seen.weight,
            spec=msgspec.json.encode(dataset.model_dump(mode="json")).decode(),
            cap_tokens=dataset.cap_tokens or 0,
            weight=dataset.weight,
        )

    def cancel(self, dataset: str, reason: str) -> tuple[str, int]:
        """End `dataset` for good; answers the state it was in, and how many queued samples were withdrawn."""
        return _scripts.cancel(self.redis, _keys.keys_of(dataset), reason=reason)

    def order(self, worker: str, order: Order | None) -> None:
        """Tell a worker, wherever it runs, to end; it looks once a second. None: take that back, if it is not done."""
        if order is None:
            self.redis.hdel(_keys.ORDERS, worker)
        else:
            self.redis.hset(_keys.ORDERS, worker, order)

    def order_for(self, worker: str) -> Order | None:
        """What `worker` was told."""
        order = cast("bytes | None", self.redis.hget(_keys.ORDERS, worker))
        return None if order is None else cast("Order", order.decode())

    def orders(self) -> Mapping[str, Order]:
        """What workers were told and have not done yet."""
        orders = cast("dict[bytes, bytes]", self.redis.hgetall(_keys.ORDERS))
        return {worker.decode(): cast("Order", order.decode()) for worker, order in orders.items()}
