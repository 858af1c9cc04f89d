"""Answers of POST /generate as SGLang 0.5.23 writes them, field by field, with its metrics on; and as older ones do."""

from dataclasses import dataclass
from typing import Any

import msgspec

from workers.sglang.simulator.profiles import Profile

TEXT = "simulated"  # nothing may rely on the text: the ids are the answer
ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
QUEUE_FULL: dict[str, Any] = {"type": "abort", "status_code": 503, "message": "The request queue is full."}


class Span(msgspec.Struct):
    """Which weights made the ids from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


class CachedTokens(msgspec.Struct):
    """Where the cached prompt tokens were."""

    device: int
    host: int = 0


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
    cached_tokens_details: CachedTokens | None
    dp_rank: None
    e2e_latency: float
    request_received_ts: float
    first_token_latency: float
    api_server_dispatch_finish_ts: float
    request_finished_ts: float
    response_sent_to_client_ts: float
    decode_throughput: float | msgspec.UnsetType = msgspec.UNSET


class ProgressMetaInfo(msgspec.Struct, kw_only=True):
    """`meta_info` of a streamed answer before its last event."""

    id: str
    finish_reason: None = None
    prompt_tokens: int
    weight_version: str
    num_retractions: int
    storage_prefetch_wait: float = 0.0
    storage_staging_wait: float = 0.0
    forward_entry_time: float
    prefill_finished_time: float
    queue_time: float
    reasoning_tokens: int = 0
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedTokens | None
    dp_rank: None = None
    response_sent_to_client_ts: float | msgspec.UnsetType = msgspec.UNSET


class WaitingMetaInfo(msgspec.Struct):
    """`meta_info` of a request that was aborted in the queue: no `prompt_tokens`, among others."""

    id: str
    finish_reason: dict[str, Any]
    weight_version: str
    e2e_latency: float
    weight_versions: list[Span]
    completion_tokens: int
    response_sent_to_client_ts: float


class Reply(msgspec.Struct):
    """The body of an answer."""

    text: str | msgspec.UnsetType  # a server without its tokenizer has none
    output_ids: msgspec.Raw | msgspec.UnsetType
    meta_info: MetaInfo | ProgressMetaInfo | WaitingMetaInfo | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """When a request passed each stage, in Unix time."""

    received: float
    admitted: float
    first_token: float
    finished: float


@dataclass(slots=True)
class Draft:
    """What is to be said of a request: of one that goes on, has come to its end, or was aborted.

    `output_ids` is JSON already. A fault changes a draft before it is written; `output_ids` of None is an answer
    without them.
    """

    rid: str
    prompt_tokens: int
    output_ids: bytes | None
    completion_tokens: int
    finish_reason: dict[str, Any]
    weight_version: str
    times: Times
    cached_tokens: int = 0
    num_retractions: int = 0


class Writer:
    """Writes answers in the shape of one release."""

    def __init__(self, profile: Profile, *, with_text: bool) -> None:
        self._profile = profile
        self._with_text = with_text
        self._encoder = msgspec.json.Encoder()

    def reply(self, draft: Draft, *, with_text: bool = True) -> bytes:
        """The body for a request that has run; `with_text` is false where the text was sent before."""
        times, tokens = draft.times, draft.completion_tokens
        cached = draft.cached_tokens
        meta_info = MetaInfo(
            id=draft.rid,
            finish_reason=draft.finish_reason,
            prompt_tokens=draft.prompt_tokens,
            weight_version=draft.weight_version,
            num_retractions=draft.num_retractions,
            storage_prefetch_wait=0.0,
            storage_staging_wait=0.0,
            forward_entry_time=times.admitted,
            prefill_finished_time=times.first_token,
            queue_time=times.admitted - times.received,
            reasoning_tokens=0,
            completion_tokens=tokens,
            cached_tokens=cached,
            weight_versions=[Span(draft.weight_version, 0, tokens)],
            cached_tokens_details=CachedTokens(cached) if cached else None,
            dp_rank=None,
            e2e_latency=times.finished - times.received,
            request_received_ts=times.received,
            first_token_latency=times.first_token - times.received,
            api_server_dispatch_finish_ts=times.received,
            request_finished_ts=times.finished,
            response_sent_to_client_ts=times.finished,
        )
        if tokens > 1:
            seconds = times.finished - times.first_token
            meta_info.decode_throughput = (tokens - 1) / seconds if seconds > 0 else 0.0
        return self._write(meta_info, draft.output_ids, TEXT if tokens and with_text else "")

    def progress(self, draft: Draft, *, first: bool, with_text: bool = True) -> bytes:
        """An event for a request that goes on."""
        times, cached = draft.times, draft.cached_tokens
        meta_info = ProgressMetaInfo(
            id=draft.rid,
            prompt_tokens=draft.prompt_tokens,
            weight_version=draft.weight_version,
            num_retractions=draft.num_retractions,
            forward_entry_time=times.admitted,
            prefill_finished_time=times.first_token,
            queue_time=times.admitted - times.received,
            completion_tokens=draft.completion_tokens,
            cached_tokens=cached,
            cached_tokens_details=CachedTokens(cached) if cached else None,
        )
        if first:
            meta_info.response_sent_to_client_ts = times.first_token
        return self._write(meta_info, draft.output_ids, TEXT if with_text else "")

    def aborted_waiting(self, draft: Draft, *, deltas: bool = False) -> bytes:
        """The body for a request that was aborted in the queue; it has ids if it was retracted into it.

        With `deltas` the last id is sent a second time.
        """
        times, tokens, ids = draft.times, draft.completion_tokens, draft.output_ids
        if self._profile.queued_abort_ids == "none":
            zeros = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
            return self._encoder.encode(
                {"text": "", "meta_info": {"id": draft.rid, "finish_reason": draft.finish_reason, **zeros}}
            )
        if ids is not None and (deltas or self._profile.queued_abort_ids == "last"):
            ids = b"[" + ids.strip(b"[]").rpartition(b",")[2] + b"]"
        meta_info = WaitingMetaInfo(
            id=draft.rid,
            finish_reason=draft.finish_reason,
            weight_version=draft.weight_version,
            e2e_latency=times.finished - times.received,
            weight_versions=[Span(draft.weight_version, 0, tokens)],
            completion_tokens=tokens,
            response_sent_to_client_ts=times.finished,
        )
        # This one has a text even from a server without its tokenizer.
        return self._write(meta_info, ids, TEXT if tokens and self._with_text else "", always_text=True)

    def _write(
        self,
        meta_info: MetaInfo | ProgressMetaInfo | WaitingMetaInfo,
        ids: bytes | None,
        text: str,
        *,
        always_text: bool = False,
    ) -> bytes:
        shaped = meta_info if self._profile.newest else self._as_then(meta_info)
        raw = msgspec.UNSET if ids is None else msgspec.Raw(ids)
        return self._encoder.encode(Reply(text if self._with_text or always_text else msgspec.UNSET, raw, shaped))

    def _as_then(self, meta_info: MetaInfo | ProgressMetaInfo | WaitingMetaInfo) -> dict[str, Any]:
        """The fields that the release had, under its names."""
        fields = msgspec.to_builtins(meta_info)
        retractions = fields.pop("num_retractions", None)
        if retractions is not None and self._profile.retractions_field is not None:
            fields[self._profile.retractions_field] = retractions
        return {name: value for name, value in fields.items() if name not in self._profile.missing_fields}
