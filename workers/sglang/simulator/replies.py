"""Answers of POST /generate as SGLang 0.5.23 writes them, field by field, with its metrics on."""

from dataclasses import dataclass
from typing import Any

import msgspec

TEXT = "simulated"  # nothing may rely on the text: the ids are the answer
ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}


class Span(msgspec.Struct):
    """Which weights made the ids from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    """`meta_info` of a request that has run. Times ending in _ts or _time are Unix time, others seconds."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    weight_version: str
    num_retractions: int
    storage_prefetch_wait: float
    storage_staging_wait: float
    forward_entry_time: float
    prefill_finished_time: float
    queue_time: float
    reasoning_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_versions: list[Span]
    cached_tokens_details: None
    dp_rank: None
    e2e_latency: float
    request_received_ts: float
    first_token_latency: float
    api_server_dispatch_finish_ts: float
    request_finished_ts: float
    response_sent_to_client_ts: float
    decode_throughput: float | msgspec.UnsetType = msgspec.UNSET


class WaitingMetaInfo(msgspec.Struct):
    """`meta_info` of a request that was aborted before it ran: no `prompt_tokens`, among others."""

    id: str
    finish_reason: dict[str, Any]
    weight_version: str
    e2e_latency: float
    weight_versions: list[Span]
    completion_tokens: int
    response_sent_to_client_ts: float


class Reply(msgspec.Struct):
    """The body of an answer."""

    text: str
    output_ids: msgspec.Raw
    meta_info: MetaInfo | WaitingMetaInfo


@dataclass(frozen=True, slots=True)
class Times:
    """When a request passed each stage, in Unix time."""

    received: float
    admitted: float
    first_token: float
    finished: float


_encoder = msgspec.json.Encoder()


def reply(
    rid: str,
    *,
    prompt_tokens: int,
    output_ids: bytes,
    completion_tokens: int,
    finish_reason: dict[str, Any],
    weight_version: str,
    times: Times,
) -> bytes:
    """The body for a request that has run, to its end or until it was aborted. `output_ids` is JSON already."""
    meta_info = MetaInfo(
        id=rid,
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        weight_version=weight_version,
        num_retractions=0,
        storage_prefetch_wait=0.0,
        storage_staging_wait=0.0,
        forward_entry_time=times.admitted,
        prefill_finished_time=times.first_token,
        queue_time=times.admitted - times.received,
        reasoning_tokens=0,
        completion_tokens=completion_tokens,
        cached_tokens=0,
        weight_versions=[Span(weight_version, 0, completion_tokens)],
        cached_tokens_details=None,
        dp_rank=None,
        e2e_latency=times.finished - times.received,
        request_received_ts=times.received,
        first_token_latency=times.first_token - times.received,
        api_server_dispatch_finish_ts=times.received,
        request_finished_ts=times.finished,
        response_sent_to_client_ts=times.finished,
    )
    if completion_tokens > 1:
        seconds = times.finished - times.first_token
        meta_info.decode_throughput = (completion_tokens - 1) / seconds if seconds > 0 else 0.0
    text = TEXT if completion_tokens else ""
    return _encoder.encode(Reply(text, msgspec.Raw(output_ids), meta_info))


def aborted_waiting(rid: str, *, weight_version: str, received: float, finished: float) -> bytes:
    """The body for a request that was aborted in the queue."""
    meta_info = WaitingMetaInfo(
        id=rid,
        finish_reason=ABORTED_WAITING,
        weight_version=weight_version,
        e2e_latency=finished - received,
        weight_versions=[Span(weight_version, 0, 0)],
        completion_tokens=0,
        response_sent_to_client_ts=finished,
    )
    return _encoder.encode(Reply("", msgspec.Raw(b"[]"), meta_info))
