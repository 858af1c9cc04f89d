"""What the feed makes of the tokenizer's speed, and how much memory it takes.

    python -m tests.benchmarks.feed [--tokenizer FOLDER] [--rows 3000] [--runs 5] [--own-tools] [FILE ...]
    python -m tests.benchmarks.feed [--tokenizer FOLDER] --memory 10000 1000000

The feed task as it runs, from the rows of a source to payloads in a Valkey of its own, beside the tokenizer's bare
`encode_batch` of the same texts, rendered before. Each run has rows of its own, in which no text comes twice but system
prompts and the declarations of tools; with `--own-tools` these are different in each row, too. `encode_batch_fast` with
its ids taken out is shown beside them. CPU time is that of all threads of this process, and tells more where others use
the machine. FILEs are sources of any kind; by default the example prompts. `--memory` feeds so many short rows, each
count in a process of its own, and prints the largest resident memory.
"""

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer

from common.broker import make_celery
from common.chat_template import Tokenizer
from common.ledger import Ledger
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, Prompt, convert
from producer.embedded import EmbeddedRedis
from producer.feed import Feeder

_EXAMPLES = Path(__file__).parents[2] / "examples"
_FAR = 10**9  # no room and no window ends a turn


def _prompts_of(files: Sequence[Path]) -> list[Prompt]:
    """All conversations of the files."""
    prompts: list[Prompt] = []
    for file in files:
        source = DatasetSettings(name="A", path=file)
        for row in read_rows(file, Cursor()):
            with contextlib.suppress(BadRow):
                prompts.append(convert(row.value, source))
    return [prompt for prompt in prompts if prompt.messages]


def _numbered(
    prompt: Prompt, number: int, *, own_tools: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The conversation as a row that is no copy of another: a number is in all that it says but the system prompt.

    Ids of what was said before are kept by the encoder, so a benchmark may not say the same to it again. Tools are as
    they are, as in data sets that have some sets of them; with `own_tools` the number is in them, too.
    """
    messages: list[dict[str, Any]] = []
    for turn in prompt.messages:
        made = dict(turn)
        if turn["role"] != "system":
            made |= {key: f"{number}. {turn[key]}" for key in ("content", "reasoning_content") if turn.get(key)}
            if "tool_calls" in turn:
                made["tool_calls"] = [{**call, "id": f"{call['id']}-{number}"} for call in turn["tool_calls"]]
            if "tool_call_id" in turn:
                made["tool_call_id"] = f"{turn['tool_call_id']}-{number}"
        messages.append(made)
    tools = None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
    if tools and own_tools:
        tools[0] = {**tools[0], "function": {**tools[0]["function"], "description": f"Number {number}."}}
    return messages, tools


def _rows_of(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, numbers: range, *, own_tools: bool = False
) -> tuple[list[str], list[str]]:
    """Lines of a JSONL source, one for each number, and the texts of their prompts."""
    lines: list[str] = []
    texts: list[str] = []
    for number in numbers:
        messages, tools = _numbered(prompts[number % len(prompts)], number, own_tools=own_tools)
        texts.append(str(tokenizer.render(messages, tools)))
        lines.append(json.dumps({"messages": messages, "tools": tools}))
    return lines, texts


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of all cores."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


class _Bench:
    """A feeder with sources and a Valkey of its own."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder = folder
        self._server = EmbeddedRedis(folder, folder / "s").start()
        url = f"unix://{folder / 's'}"
        settings = Settings(tokenizer=TokenizerSettings(path=tokenizer), output=folder / "out", redis=url)
        self._app = make_celery("bench", settings)
        self._ledger = Ledger.connect(url)
        self.feeder = Feeder(settings, self._app, self._ledger)

    def source(self, name: str) -> Path:
        """The file of a dataset."""
        return self._folder / f"{name}.jsonl"

    def feed(self, name: str) -> int:
        """All of a source; answers how many were queued."""
        self._ledger.redis.flushall()
        self._ledger.set_model({"vocab_size": 2**20, "context_length": None})
        self._ledger.register(DatasetSettings(name=name, path=self.source(name)))
        self._ledger.admit(name, room=_FAR, window=_FAR, tokens_per_second=0)
        queued = 0
        while not self._ledger.snapshot(name).ended:
            queued += self.feeder.feed(name)
        return queued

    def close(self) -> None:
        """Stop everything."""
        self._ledger.close()
        self._app.close()
        self._server.stop()


def _rates(bench: _Bench, tokenizer: Path, files: Sequence[Path], rows: int, runs: int, *, own_tools: bool) -> None:
    own = Tokenizer(TokenizerSettings(path=tokenizer))
    backend = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).backend_tokenizer
    prompts = _prompts_of(files)
    took: dict[str, list[tuple[float, float]]] = {}
    tokens = 0
    for run in range(runs + 1):  # the first loads what is loaded once, and is not counted
        lines, texts = _rows_of(prompts, own, range(run * rows, (run + 1) * rows), own_tools=own_tools)
        name = f"R{run}"
        bench.source(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

        def bare(texts: list[str] = texts) -> None:
            backend.encode_batch(texts, add_special_tokens=False)

        def fast(texts: list[str] = texts) -> list[list[int]]:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

        def feed(name: str = name) -> None:
            assert bench.feed(name) == rows

        ways: dict[str, Callable[[], object]] = {
            "encode_batch": bare,
            "encode_batch_fast, ids": fast,
            "the feed task": feed,
        }
        for way, work in ways.items():
            took.setdefault(way, []).append(_seconds(work))
        tokens = sum(map(len, fast()))
    print(f"{rows:,} rows of {tokens / rows:,.0f} tokens, median of {runs} runs")
    _print({way: seconds[1:] for way, seconds in took.items()}, rows, tokens)


def _print(took: Mapping[str, Sequence[tuple[float, float]]], rows: int, tokens: int) -> None:
    base = took["encode_batch"]
    for name, seconds in took.items():
        median = statistics.median(clock for clock, _ in seconds)
        pairs = list(zip(base, seconds, strict=True))
        share = statistics.median(one / other for (one, _), (other, _) in pairs)
        of_cpu = statistics.median(one / other for (_, one), (_, other) in pairs)
        rates = f"{rows / median:10,.0f} rows/s{tokens / median / 1e6:8.2f} M tokens/s"
        print(f"{name:24}{rates}{share:8.0%} by the clock{of_cpu:8.0%} by CPU time", flush=True)


def _memory(tokenizer: Path, rows: int) -> None:
    with TemporaryDirectory(prefix="tm-") as name, closing(_Bench(Path(name), tokenizer)) as bench:
        with bench.source("A").open("w", encoding="utf-8") as file:
            for index in range(rows):
                file.write(f'{{"id": {index}, "prompt": "What is {index} and one?"}}\n')
        seconds, _ = _seconds(lambda: bench.feed("A"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{rows:>12,} rows: {peak:8.1f} MiB at most, {rows / seconds:8,.0f} rows/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--tokenizer", type=Path, default=_EXAMPLES / "tokenizer")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--own-tools", action="store_true", help="each row has tools of its own")
    parser.add_argument("--memory", type=int, nargs="*")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.memory_of is not None:
        _memory(given.tokenizer, given.memory_of)
        return
    if given.memory is not None:
        for rows in given.memory or (10_000, 1_000_000):
            command = [sys.executable, "-m", "tests.benchmarks.feed", "--tokenizer", str(given.tokenizer)]
            subprocess.run([*command, "--memory-of", str(rows)], check=True)
        return
    files = given.files or sorted((_EXAMPLES / "prompts").glob("*.jsonl"))
    with TemporaryDirectory(prefix="tm-") as folder, closing(_Bench(Path(folder), given.tokenizer)) as bench:
        _rates(bench, given.tokenizer, files, given.rows, given.runs, own_tools=given.own_tools)


if __name__ == "__main__":
    main()
