"""Prompts of ready ids for a benchmark: rows that differ in their first ids only, and so cost nothing to make."""

import random
from pathlib import Path

_TAILS = 64


class Prompts:
    """Any number of prompts of `tokens` ids each below `vocab_size`, as JSON; no two are equal."""

    def __init__(self, tokens: int, vocab_size: int) -> None:
        draw = random.Random(1)
        self._vocab_size = vocab_size
        self._tails = [
            b",".join(b"%d" % draw.randrange(3, vocab_size) for _ in range(tokens - 2)) for _ in range(_TAILS)
        ]

    def input_ids(self, index: int) -> bytes:
        """The JSON array of prompt `index`."""
        first, second = divmod(index, self._vocab_size - 3)
        return b"[%d,%d,%b]" % (second + 3, first + 3, self._tails[index % _TAILS])

    def write(self, path: Path, rows: int) -> None:
        """A JSONL source of `rows` rows."""
        with path.open("wb", buffering=1 << 20) as file:
            for index in range(rows):
                file.write(b'{"id":"row-%d","input_ids":%b}\n' % (index, self.input_ids(index)))
