"""Rows with a prompt that was fed before: the first to be fed wins, the others are rejected as `duplicate`.

A prompt is known by 16 bytes of BLAKE2b of its ids, so that two of a billion prompts are mixed up with a chance of one
in 10^20. The ledger notes for each the sample that was fed first: in Redis, where that takes some 60 bytes. After
Redis was lost the records tell, which hold the ids. Of what was queued and not answered nothing is known then, and it
is fed again. What a worker that went on has answered since is noted when its row is read again: of all other rows of
its dataset that is in time, and of another dataset it is if that has not come to the same prompt before.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

from common.ledger import Ledger
from common.payload import Packer
from common.records import sample_id
from common.rejects import Reject
from common.sections import DatasetSettings
from common.segments import Counted, prompts

if TYPE_CHECKING:
    from producer.prepare import Chunk

_BATCH = 500


def without_duplicates(
    chunk: "Chunk", dataset: DatasetSettings, ledger: Ledger, packer: Packer, done: Collection[int] = ()
) -> "Chunk":
    """`chunk` with the samples as rejects whose prompt another sample has, by what `dataset.dedupe` compares with.

    Its other prompts are noted before its samples are queued: a feed that is killed in between finds that they are its
    own when it is made again. Rows that are `done` are left out once their prompts are noted. Raises redis.RedisError.
    """
    asked = {index: packer.unpack(payload) for index, payload in chunk.samples}
    digests = [(index, _digest(payload.input_ids)) for index, payload in asked.items()]
    before = ledger.remember(dataset.name, digests, shared=dataset.dedupe == "all")
    rejects = [
        Reject(
            index=index,
            reason="duplicate",
            detail=f"its prompt is that of {sample_id(*first)}",
            id=asked[index].meta.get("id"),
        )
        for index, first in before.items()
    ]
    samples = [(index, payload) for index, payload in chunk.samples if index not in before and index not in done]
    rejects = [reject for reject in (*chunk.rejects, *rejects) if reject.index not in done]
    return dataclasses.replace(chunk, samples=samples, rejects=rejects)


def remember_answered(dataset: DatasetSettings, counted: Counted, ledger: Ledger) -> None:
    """Note the prompts of the records in the dataset's books. Raises OSError, redis.RedisError."""
    _remember(dataset, prompts(counted), ledger)


def remember_queued(dataset: DatasetSettings, ledger: Ledger) -> None:
    """Note the prompts of all samples that were fed and have not ended. Raises redis.RedisError."""
    packer = Packer()
    queued = ledger.queued_payloads(dataset.name)
    _remember(dataset, ((index, packer.unpack(payload).input_ids) for index, payload in queued), ledger)


def _remember(dataset: DatasetSettings, asked: Iterable[tuple[int, bytes]], ledger: Ledger) -> None:
    digests = ((index, _digest(input_ids)) for index, input_ids in asked)
    while batch := list(itertools.islice(digests, _BATCH)):
        ledger.remember(dataset.name, batch, shared=dataset.dedupe == "all")


def _digest(input_ids: bytes) -> bytes:
    """Of the JSON of the ids, however it is spaced."""
    return blake2b(input_ids.translate(None, b" \t\r\n"), digest_size=16).digest()
