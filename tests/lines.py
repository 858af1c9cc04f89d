"""Lines of segments as a worker writes them, for the tests of what reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.records import Void, Voided, encode_line


def record_line(
    index: int, attempt: int = 1, *, prompt: Sequence[int] = (5, 6, 7), answer: Sequence[int] = (8, 9), **changes: Any
) -> bytes:
    """A good record of dataset "A", newline included; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "dataset": "A",
        "index": index,
        "sample_id": f"A/{index}",
        "attempt": attempt,
        "input_ids": list(prompt),
        "output_ids": list(answer),
        "finish_reason": "stop",
        "prompt_tokens": len(prompt),
        "completion_tokens": len(answer),
        "cached_tokens": 1,
        "latency_seconds": 0.5,
        "server": "http://127.0.0.1:30000",
        "created_at": "2026-01-31T12:00:00.000Z",
        "flags": [],
        "meta": {},
    }
    return json.dumps(fields | changes, ensure_ascii=False).encode() + b"\n"


def void_line(index: int, attempt: int = 1) -> bytes:
    """A line that takes back the record of `index` that `attempt` made."""
    return encode_line(Void(Voided(index, attempt)))


def write_segment(output: Path, name: str, *lines: bytes, dataset: str = "A") -> Path:
    """`<output>/<dataset>/<name>` with `lines` in it."""
    path = output / dataset / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    return path


def write_config(folder: Path, redis: str = "embedded", datasets: Sequence[str] = ("A",)) -> Path:
    """A configuration with output folder `out` beside it."""
    text = f'output = "out"\nredis = "{redis}"\n[tokenizer]\npath = "tokenizer"\n'
    for name in datasets:
        text += f'[[datasets]]\nname = "{name}"\npath = "{name}.jsonl"\n'
    path = folder / "tokenmill.toml"
    path.write_text(text)
    return path
