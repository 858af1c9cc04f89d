"""How a sample ends: with the line of its record and what the ledger counts of it, or with a reject."""

import time
from typing import Any

import msgspec

from common.ledger import Settled
from common.payload import Payload
from common.records import Written, encode_line, sample_id, timestamp
from common.rejects import Reject
from common.turns import to_follow
from workers.marking import with_cut
from workers.samples import Outcome, Sample
from workers.sglang.answer import Answer


def recorded(sample: Sample, payload: Payload, answer: Answer, server: str, seconds: float, clock: float) -> Outcome:
    """With a record; `clock` is the answer's, in tokens."""
    claimed = sample.claimed
    details: dict[str, Any] = {}
    if sample.marker is None:
        flags = with_cut(payload, answer)
    else:
        flags, details = sample.marker.mark(claimed.index, payload, answer)
    line = encode_line(
        Written(
            dataset=claimed.dataset,
            index=claimed.index,
            sample_id=sample_id(claimed.dataset, claimed.index),
            attempt=claimed.attempt,
            input_ids=msgspec.Raw(payload.input_ids),
            output_ids=answer.output_ids,
            finish_reason=answer.finish_reason,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            latency_seconds=round(seconds, 3),
            server=server,
            created_at=timestamp(time.time()),
            flags=flags,
            meta=payload.meta,
            flag_details=details or msgspec.UNSET,
            parent=claimed.index - 1 if payload.turn else msgspec.UNSET,
            turn=msgspec.UNSET if payload.turn is None else payload.turn,
            turns=msgspec.UNSET if payload.turns is None else payload.turns,
        )
    )
    settled = Settled(
        claimed.index,
        claimed.attempt,
        answer.prompt_tokens,
        answer.completion_tokens,
        answer.cached_tokens,
        flags,
        payload.turns_left,
        to_follow(payload.turns_left, flags, payload.input_ids, answer.output_ids),
        clock,
    )
    return Outcome(sample, line=line, settled=settled, end=answer.finish_reason, clock=clock)


def rejected(sample: Sample, payload: Payload | None, reason: str, detail: str) -> Outcome:
    """With a reject; `payload` is None where it cannot be read."""
    reject = Reject(index=sample.claimed.index, reason=reason, detail=detail)
    if payload:
        turns = msgspec.UNSET if payload.turns is None else payload.turns
        reject = msgspec.structs.replace(reject, id=payload.meta.get("id"), turns=turns)
    return Outcome(sample, reject=reject, end=reason)
