"""How fast an audit reads, in MB/s by the clock and of CPU, and how much memory it takes, for files of two sizes.

    python -m tests.benchmarks.audit [--mb 100 400] [--tokenizer DIR]

Four kinds of rows are made first, in a folder that is removed: OpenAI answer objects with their messages, of some 6 kB
each as reasoning models write them; rows of ids with a loss mask, as SpecForge has them, of some 11 kB; and of some 350
bytes, of which the time is that of rows and not of bytes, questions with answers, and ShareGPT's conversations of two
turns. Each audit is a command of its own, timed whole, with the processes that it starts: CPU is that of all, and
memory the most that one of them had resident, which is the command itself.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_WORDS = [
    "the", "number", "of", "steps", "is", "bounded", "by", "a", "constant", "so", "we", "add", "x^2", "and", "take",
    "limits;", "na\u00efve", "def", "f(x):", "return", "x", "+", "1\n", "therefore", "wait,", "let", "me", "check",
]  # fmt: skip


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def answer_object(rng: random.Random, index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": _words(rng, 300), "reasoning_content": _words(rng, 800)}
    return {
        "id": f"row-{index}",
        "messages": [{"role": "user", "content": _words(rng, 60)}],
        "response": {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 80, "completion_tokens": rng.randrange(900, 1500)},
        },
    }


def ids(rng: random.Random, index: int) -> dict[str, Any]:
    prompt, answer = 300, rng.randrange(900, 1100)
    return {
        "id": f"A/{index}",
        "input_ids": [rng.randrange(160_000) for _ in range(prompt + answer)],
        "loss_mask": [0] * prompt + [1] * answer,
    }


def short(rng: random.Random, index: int) -> dict[str, Any]:
    return {"id": index, "question": _words(rng, 25), "answer": _words(rng, 40)}


def conversation(rng: random.Random, index: int) -> dict[str, Any]:
    return {"id": index, "conversations": [{"from": role, "value": _words(rng, 25)} for role in ("human", "gpt")]}


KINDS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "answer objects": answer_object,
    "ids": ids,
    "short rows": short,
    "conversations": conversation,
}


def make(path: Path, make_row: Callable[[random.Random, int], dict[str, Any]], size: int) -> int:
    """Write `size` bytes of rows; answers how many rows. A thousand different ones are made, and numbered anew."""
    rng = random.Random(size)
    some = [make_row(rng, index) for index in range(1_000)]
    rows = written = 0
    with path.open("wb", buffering=1 << 20) as file:
        while written < size:
            one = some[rows % 1_000]
            one["id"] = f"row-{rows}"
            written += file.write(msgspec.json.encode(one) + b"\n")
            rows += 1
    return rows


def audited(path: Path, more: list[str]) -> tuple[float, float, float]:
    """Wall and CPU seconds, and the MB that were resident at most."""
    before = time.perf_counter()
    command = [sys.executable, "-m", "producer.cli.main", "audit", "--json", *more, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in {0, 3}:
        sys.exit("the audit failed")
    return time.perf_counter() - before, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Audit files of four kinds of rows, in two sizes each.")
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    more = ["--tokenizer", str(options.tokenizer)] if options.tokenizer else []
    sys.stdout.write(f"{'rows of':<16}{'MB':>6}{'rows':>10}{'MB/s':>8}{'MB/s of CPU':>13}{'resident MB':>13}\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, make_row in KINDS.items():
            for size in options.mb:
                path = Path(folder) / "rows.jsonl"
                rows = make(path, make_row, size * 1_000_000)
                wall, cpu, resident = audited(path, more)
                speed = f"{size / wall:>8.0f}{size / cpu:>13.0f}{resident:>13.0f}"
                sys.stdout.write(f"{name:<16}{size:>6}{rows:>10,}{speed}\n")


if __name__ == "__main__":
    main()
