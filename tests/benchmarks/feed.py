"""What the feed makes of the tokenizer's speed, and how much memory it takes.

    python -m tests.benchmarks.feed [--tokenizer FOLDER] [--rows 3000] [--runs 5] [--memory 10000 1000000] [FILE ...]

The feed task as it runs, from the rows of a source to payloads in a Valkey of its own, beside the tokenizer's bare
`encode_batch` of the same texts, rendered before; runs alternate. `encode_batch_fast` with its ids taken out is what
the feed itself calls. CPU time is that of all threads of this process, and tells more where others use the machine.
FILEs are sources of any kind; by default the example prompts. `--memory` feeds so many short rows, each count in a
process of its own, and prints the largest resident memory.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from common.broker import make_celery
from common.chat_template import Tokenizer
from common.ledger import Ledger
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, convert
from producer.embedded import EmbeddedRedis
from producer.feed import Feeder

_EXAMPLES = Path(__file__).parents[2] / "examples"
_FAR = 10**9  # no room and no window ends a turn


def _rows_of(files: Sequence[Path], tokenizer: Tokenizer, wanted: int) -> tuple[list[str], list[str]]:
    """Lines of a JSONL source that all become prompts, repeated up to `wanted`, and the texts of these prompts."""
    lines: list[str] = []
    texts: list[str] = []
    for file in files:
        source = DatasetSettings(name="A", path=file)
        for row in read_rows(file, Cursor()):
            try:
                prompt = convert(row.value, source)
            except BadRow:
                continue
            if prompt.messages:
                texts.append(str(tokenizer.render(prompt.messages, prompt.tools)))
                lines.append(json.dumps({"messages": prompt.messages, "tools": prompt.tools}))
    pairs = list(itertools.islice(itertools.cycle(zip(lines, texts, strict=True)), wanted))
    return [line for line, _ in pairs], [text for _, text in pairs]


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Of the clock, and of all cores."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


class _Bench:
    """A feeder with a source A and a Valkey of its own."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.source = folder / "a.jsonl"
        self._server = EmbeddedRedis(folder, folder / "s").start()
        url = f"unix://{folder / 's'}"
        settings = Settings(tokenizer=TokenizerSettings(path=tokenizer), output=folder / "out", redis=url)
        self._app = make_celery("bench", settings)
        self._ledger = Ledger.connect(url)
        self.feeder = Feeder(settings, self._app, self._ledger)

    def feed(self) -> int:
        """All of the source; answers how many were queued."""
        self._ledger.redis.flushall()
        self._ledger.set_model({"vocab_size": 2**20, "context_length": None})
        self._ledger.register(DatasetSettings(name="A", path=self.source))
        self._ledger.admit("A", room=_FAR, window=_FAR, tokens_per_second=0)
        queued = 0
        while not self._ledger.snapshot("A").ended:
            queued += self.feeder.feed("A")
        return queued

    def close(self) -> None:
        """Stop everything."""
        self._ledger.close()
        self._app.close()
        self._server.stop()


def _rates(folder: Path, tokenizer: Path, files: Sequence[Path], rows: int, runs: int) -> None:
    own = Tokenizer(TokenizerSettings(path=tokenizer))
    backend = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).backend_tokenizer
    lines, texts = _rows_of(files, own, rows)
    tokens = sum(map(len, own.encode(texts)))
    with closing(_Bench(folder, tokenizer)) as bench:
        bench.source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        assert bench.feed() == rows

        def bare() -> None:
            backend.encode_batch(texts, add_special_tokens=False)

        def fast() -> None:
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
                _ = encoding.ids

        ways: dict[str, Callable[[], object]] = {
            "encode_batch": bare,
            "encode_batch_fast, ids": fast,
            "the feed task": bench.feed,
        }
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, way in ways.items():
                took[name].append(_seconds(way))
    print(f"{rows:,} rows of {tokens / rows:,.0f} tokens, median of {runs} runs")
    base = took["encode_batch"]
    for name, seconds in took.items():
        median = statistics.median(clock for clock, _ in seconds)
        pairs = list(zip(base, seconds, strict=True))
        share = statistics.median(one / other for (one, _), (other, _) in pairs)
        of_cpu = statistics.median(one / other for (_, one), (_, other) in pairs)
        rates = f"{rows / median:10,.0f} rows/s{tokens / median / 1e6:8.2f} M tokens/s"
        print(f"{name:24}{rates}{share:8.0%} by the clock{of_cpu:8.0%} by CPU time")


def _memory(tokenizer: Path, rows: int) -> None:
    with TemporaryDirectory(prefix="tm-") as name, closing(_Bench(Path(name), tokenizer)) as bench:
        with bench.source.open("w", encoding="utf-8") as file:
            for index in range(rows):
                file.write(f'{{"id": {index}, "prompt": "What is {index} and one?"}}\n')
        seconds, _ = _seconds(bench.feed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{rows:>12,} rows: {peak:8.1f} MiB at most, {rows / seconds:8,.0f} rows/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--tokenizer", type=Path, default=_EXAMPLES / "tokenizer")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--runs", type=int, default=5)
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
    with TemporaryDirectory(prefix="tm-") as folder:
        _rates(Path(folder), given.tokenizer, files, given.rows, given.runs)


if __name__ == "__main__":
    main()
