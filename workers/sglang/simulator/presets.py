"""Simulated servers by name: settings that belong together. An option given beside `--preset` overrules it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Answers take no time, and nothing ever runs or waits: for whoever measures a client.
        "instant": {"speed": 0.0},
        # The size of the small real server that the contract runs against: a CPU and a model of random weights.
        "tiny": {
            "vocab_size": 1024,
            "context_length": 2048,
            "max_total_tokens": 4096,
            "max_running_requests": 8,
            "step_base_seconds": 0.005,
            "prefill_base_seconds": 0.005,
        },
        # Eight GPUs with Kimi K2.5, as one real server was measured: 40 requests that hold 4,000 tokens each decode
        # at 17 tokens/s each, 150 short ones at 9 to 10. The times are the defaults; see SimulatorConfig.
        "kimi-k2.5-8x": {
            "model_path": "moonshotai/Kimi-K2.5",
            "vocab_size": 163_840,
            "context_length": 262_144,
            "max_total_tokens": 159_277,
            "max_running_requests": 2048,
            "first_id": 0,
            "last_id": 163_583,  # control tokens follow
            "end_token_id": 163_586,  # <|im_end|>
            "think_end_token_id": 163_607,  # </think>
            "mean_tokens": 3_800.0,
        },
    }
)
