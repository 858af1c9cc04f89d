"""What the simulated server tells of itself: its settings, its load, its metrics, in the words of SGLang 0.5.23.

The real /server_info has 556 keys. Those below are the ones that a client can use, with the real names and types.
"""

import functools
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import Load
from workers.sglang.simulator.profiles import PROFILES


@dataclass(slots=True)
class Totals:
    """What the server has done since it started.

    Every request that is taken ends once: `finished`, `aborted`, or `refused` (which counts broken connections too).
    """

    taken: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def server_info(config: SimulatorConfig, port: int, max_req_input_len: int, load: Load) -> dict[str, Any]:
    """The body of /server_info. As on the real server it holds the API key in clear."""
    arguments = _arguments(config, port)
    internal_state = arguments | {
        "effective_max_running_requests_per_dp": config.effective_max_running_requests,
        "last_gen_throughput": load.tokens_per_second,
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": config.max_total_tokens},
    }
    return arguments | {
        "status": "ready",
        "max_total_num_tokens": config.max_total_tokens,
        "max_req_input_len": max_req_input_len,
        "internal_states": [internal_state],
        "version": config.profile,
        "frontend": "python",
    }


def _arguments(config: SimulatorConfig, port: int) -> dict[str, Any]:
    """What the server was started with."""
    return {
        "model_path": config.model_path,
        "tokenizer_path": config.model_path,
        "served_model_name": config.model_path,
        "weight_version": config.weight_version,
        "host": config.host,
        "port": port,
        "api_key": config.api_key,
        "admin_api_key": None,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "context_length": config.context_length,
        "kv_cache_dtype": "auto",
        "mem_fraction_static": 0.88,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.max_total_tokens,
        "chunked_prefill_size": config.chunked_prefill_size,
        "max_prefill_tokens": config.max_prefill_tokens,
        "schedule_policy": "fcfs",
        "schedule_conservativeness": config.schedule_conservativeness,
        "enable_priority_scheduling": False,
        "page_size": 1,
        "disable_radix_cache": not config.prefix_cache,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "random_seed": config.seed,
        "allow_auto_truncate": config.allow_auto_truncate,
        "stream_interval": config.stream_interval,
        PROFILES[config.profile].stream_field: config.stream_output,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "sampling_defaults": "model",
        "preferred_sampling_params": None,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "hicache_size": 0,
        "hicache_ratio": 2.0,
        "enable_dp_attention": False,
        "nnodes": 1,
        "enable_metrics": True,
        "decode_log_interval": 40,
        "quantization": None,
        **dict(map(_said, config.says)),
    }


def _said(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, with a value in JSON, else a text."""
    key, _, value = text.partition("=")
    try:
        return key, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return key, value


def model_info(config: SimulatorConfig, weight_version: str) -> dict[str, Any]:
    """The body of /model_info: neither the length of the context nor the size of the vocabulary is in it."""
    return {
        "model_path": config.model_path,
        "served_model_name": config.model_path,
        "tokenizer_path": config.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "simulated",
        "architectures": ["SimulatedForCausalLM"],
    }


def models(config: SimulatorConfig) -> dict[str, Any]:
    """The body of /v1/models, the one place that gives the length of the context."""
    model = {
        "id": config.model_path,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": config.model_path,
        "parent": None,
        "max_model_len": config.context_length,
    }
    return {"object": "list", "data": [model]}


class _Text(msgspec.Struct):
    prompt: str
    add_special_tokens: bool = True


@functools.lru_cache(maxsize=2)
def _tokenizer(folder: str) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415 - few simulated servers have one

    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def tokenized(config: SimulatorConfig, body: bytes) -> dict[str, Any]:
    """The body of /tokenize for one text."""
    asked = msgspec.json.decode(body, type=_Text)
    ids = _tokenizer(config.tokenizer or "").encode(asked.prompt, add_special_tokens=asked.add_special_tokens).ids
    return {"tokens": ids, "count": len(ids), "max_model_len": config.context_length}


def loads(config: SimulatorConfig, load: Load) -> dict[str, Any]:
    """The body of /v1/loads."""
    now = datetime.now(UTC)
    rank = {
        "timestamp": now.timestamp(),
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.waiting_tokens,
        "max_total_num_tokens": config.max_total_tokens,
        "max_running_requests": config.effective_max_running_requests,
        "token_usage": load.used_tokens / config.max_total_tokens,
        "gen_throughput": load.tokens_per_second,
        "cache_hit_rate": load.cache_hit_rate,
        "utilization": load.running / config.effective_max_running_requests,
        **_decode_moments(config, load),
        "queues": {
            "waiting": load.waiting,
            "grammar": 0,
            "paused": 0,
            "retracted": load.retracted,
            "prealloc_ready": 0,
        },
    }
    return {
        "timestamp": now.isoformat(),
        "version": config.profile,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [rank],
    }


def _decode_moments(config: SimulatorConfig, load: Load) -> dict[str, Any]:
    """Sums over decode steps: 1, the batch, its us, and the products; the last is of tokens. The times are not kept.

    The real server leaves out the steps next to a prefill.
    """
    if not PROFILES[config.profile].newest:
        return {}
    sums = [load.decode_steps, load.decoded_tokens, 0, 0, 0, load.decoded_tokens]
    return {"decode_moments": [float(each) for each in sums] if load.decode_steps else None}


def get_load(load: Load) -> list[dict[str, Any]]:
    """The body of /get_load, which 0.5.23 no longer has."""
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.running + load.waiting,
            "num_waiting_reqs": load.waiting,
            "num_tokens": load.used_tokens + load.waiting_tokens,
            "ts_tic": time.monotonic(),
        }
    ]


def metrics(config: SimulatorConfig, load: Load, totals: Totals) -> str:
    """The text of /metrics. The real gauges are up to 40 decode steps old; these are of now."""
    name = config.model_path.replace("\\", "\\\\").replace('"', '\\"')
    model = f'engine_type="unified",model_name="{name}"'
    requests = f'engine_type="unified",is_streaming="false",model_name="{name}"'
    scheduler = f'{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    free = config.max_total_tokens - load.used_tokens - load.cached_tokens
    ended = totals.finished + totals.aborted
    rows = [
        ("num_running_reqs", "gauge", "The number of running requests.", scheduler, load.running),
        ("num_queue_reqs", "gauge", "The number of requests in the waiting queue.", scheduler, load.waiting),
        ("gen_throughput", "gauge", "The generation throughput (token/s).", scheduler, load.tokens_per_second),
        ("cache_hit_rate", "gauge", "The prefix cache hit rate.", scheduler, load.cache_hit_rate),
        ("token_usage", "gauge", "The token usage.", scheduler, load.used_tokens / config.max_total_tokens),
        ("num_used_tokens", "gauge", "The number of used tokens.", scheduler, load.used_tokens),
        ("kv_available_tokens", "gauge", "The number of free KV tokens.", scheduler, free),
        ("kv_evictable_tokens", "gauge", "The number of evictable KV tokens.", scheduler, load.cached_tokens),
        ("new_token_ratio", "gauge", "The new token ratio.", scheduler, load.new_token_ratio),
        ("max_total_num_tokens", "gauge", "The size of the KV pool.", scheduler, config.max_total_tokens),
        ("context_len", "gauge", "The length of the context.", scheduler, config.context_length),
        ("num_retracted_reqs", "gauge", "The number of retracted requests.", scheduler, load.retracted),
        ("num_paused_reqs", "gauge", "The number of paused requests.", scheduler, 0),
        ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", requests, totals.prompt_tokens),
        ("generation_tokens_total", "counter", "Number of tokens generated.", requests, totals.completion_tokens),
        ("num_requests_total", "counter", "Number of requests processed.", requests, ended),
        ("num_aborted_requests_total", "counter", "Number of requests aborted.", model, totals.aborted),
    ]
    if load.decode_steps:  # the other models of time have none
        decoded = f'{scheduler},mode="decode"'
        rows.append(("realtime_tokens_total", "counter", "Tokens by mode.", decoded, load.decoded_tokens))
    return "".join(
        f"# HELP sglang:{metric} {about}\n# TYPE sglang:{metric} {kind}\nsglang:{metric}{{{labels}}} {float(value)}\n"
        for metric, kind, about, labels, value in rows
    )
