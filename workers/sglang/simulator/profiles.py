"""How releases of SGLang differ on the wire: one profile for each release that the simulator can play.

From the source of the published packages (the protocol's description, sections 1 to 3); only 0.5.23 was also observed.
Not played: a last request that does not fit the pool, which kills 0.5.9 and is a 500 from 0.5.10 on (prompts and
max_new_tokens are clamped so that one request always fits), and an event before the last of a cumulative stream whose
ids are more than its completion_tokens, as 0.5.13 and later can have it.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

# Fields of meta_info by the release that brought them, where it is later than 0.5.2.
_REQUEST_TIMES = frozenset(
    {
        "queue_time",
        "forward_entry_time",
        "prefill_finished_time",
        "request_received_ts",
        "first_token_latency",
        "api_server_dispatch_finish_ts",
        "request_finished_ts",
        "response_sent_to_client_ts",
        "decode_throughput",
    }
)
_SINCE_0_5_10 = frozenset({"reasoning_tokens", "dp_rank", "cached_tokens_details"})
_SINCE_0_5_20 = frozenset({"storage_prefetch_wait", "storage_staging_wait", "weight_versions"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One release; the defaults are those of 0.5.23."""

    version: str
    leaks_prompt_tail: bool = False  # up to 5 prompt ids stand before the output ids, unless skip_tokenizer_init
    has_short_info_names: bool = True  # /server_info beside /get_server_info
    has_get_load: bool = False
    has_v1_loads: bool = True
    has_ready: bool = True
    has_pause_modes: bool = True
    has_schema_gate: bool = True  # an unknown sampling parameter is a 400; before, a plain 500
    refuses_duplicate_rids: bool = True
    keeps_refused_rids: bool = False  # the rid of an over-long prompt counts as in flight for ever
    dies_of_late_aborts: bool = False  # an abort that meets the request's last step
    queued_abort_ids: Literal["all", "last", "none"] = "all"  # of a request that is aborted in the queue
    retractions_field: str | None = "num_retractions"
    missing_fields: frozenset[str] = frozenset()  # of meta_info
    # Of streams; see streams.py.
    stream_field: str = "incremental_streaming_output"  # of /server_info: whether ids come as deltas
    always_streams_deltas: bool = False  # unless skip_tokenizer_init
    streams_text_deltas: bool = True  # where ids are deltas; before, text is cumulative in every mode
    loses_deltas: bool = False  # of several events that wait to be sent only the newest is
    has_abort_events: bool = True  # a full queue is an event; before, the stream breaks
    has_error_types: bool = True  # type, code and retryable beside the message of an error event
    leave_seconds: float | None = 2.0  # from a caller's leaving to the abort; None: a ghost, it runs on

    @property
    def newest(self) -> bool:
        """True if answers need no change of shape."""
        return not self.missing_fields


PROFILES = MappingProxyType(
    {
        profile.version: profile
        for profile in (
            Profile(
                version="0.5.2",
                leaks_prompt_tail=True,
                has_short_info_names=False,
                has_get_load=True,
                has_v1_loads=False,
                has_ready=False,
                has_pause_modes=False,
                has_schema_gate=False,
                refuses_duplicate_rids=False,
                dies_of_late_aborts=True,
                queued_abort_ids="none",
                retractions_field=None,
                missing_fields=_REQUEST_TIMES | _SINCE_0_5_10 | _SINCE_0_5_20,
                stream_field="stream_output",
                always_streams_deltas=True,
                streams_text_deltas=False,
                loses_deltas=True,
                has_abort_events=False,
                has_error_types=False,
            ),
            Profile(
                version="0.5.9",
                has_get_load=True,
                has_ready=False,
                has_schema_gate=False,
                refuses_duplicate_rids=False,
                dies_of_late_aborts=True,
                queued_abort_ids="last",
                retractions_field="total_retractions",
                missing_fields=_SINCE_0_5_10 | _SINCE_0_5_20,
                stream_field="stream_output",
                streams_text_deltas=False,
                loses_deltas=True,
                has_error_types=False,
            ),
            Profile(
                version="0.5.13",
                has_get_load=True,
                has_ready=False,
                has_schema_gate=False,
                keeps_refused_rids=True,
                dies_of_late_aborts=True,
                queued_abort_ids="last",
                missing_fields=_SINCE_0_5_20,
                has_error_types=False,
            ),
            Profile(
                version="0.5.19",
                has_get_load=True,
                has_ready=False,
                has_schema_gate=False,
                queued_abort_ids="last",
                missing_fields=_SINCE_0_5_20,
                has_error_types=False,
                leave_seconds=None,
            ),
            Profile(version="0.5.23", leave_seconds=0.1),  # as observed; its source waits 2 s
        )
    }
)
