"""Reconstructed rows as a file: the layout `ids` of an export, with columns that say how sure each row is.

A server counts the end token in all of its answers, or in none. A row that is one token off looks as if it were from a
server of the other kind. So the rows of a source are kept in a temporary file until all of them are seen, and those
stay that count as most of them do; in memory are two numbers.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.chat_template import Tokenizer
from common.durable import replace_file
from producer.audit.batches import Unpaired, paired, rows_in
from producer.audit.counts import EXAMPLES
from producer.audit.reconstruct import Allowed, Made, Refused, reconstruct
from producer.audit.sources import Source
from producer.datasets.containers import MAX_ROW_BYTES, Cursor, Row
from producer.export.writers import columns

_encode = msgspec.json.Encoder().encode
_EQUAL, _LESS = "equal", "end_not_counted"


class Reconstructed:
    """What became of all rows: those that were made by how sure they are, and those refused by their reason."""

    def __init__(self) -> None:
        self.rows = self.made = self.tokens = self.trained_tokens = self.longest = 0
        self.sure: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}  # of those refused

    def refuse(self, reason: str, told: str) -> None:
        """Count a row that is in doubt."""
        self.refused[reason] += 1
        if self.refused[reason] <= EXAMPLES:
            self.examples.setdefault(reason, []).append(told)


class _Line(msgspec.Struct):
    """What counts of a row that was made."""

    index: int
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    claimed_tokens: int
    sure_tokens: str
    sure_whitespace: str
    sure_end: str


_decode = msgspec.json.Decoder(_Line).decode


def write(
    sources: Sequence[Source], path: Path, tokenizer: Tokenizer, allowed: Allowed, max_row_bytes: int = MAX_ROW_BYTES
) -> Reconstructed:
    """Write all rows of `sources` that are sure to `path`, which stands there whole or not at all.

    Raises OSError, and DataError where a source is damaged.
    """
    done = Reconstructed()
    replace_file(path, _lines(done, sources, path.parent, tokenizer, allowed, max_row_bytes))
    return done


def _lines(
    done: Reconstructed, sources: Sequence[Source], place: Path, tokenizer: Tokenizer, allowed: Allowed, limit: int
) -> Iterator[bytes]:
    for source in sources:
        with tempfile.TemporaryFile(dir=place) as kept:
            counted = _made(done, source, kept, tokenizer, allowed, limit)
            kept.seek(0)
            yield from _as_most(done, source, kept, counted)


def _made(
    done: Reconstructed, source: Source, kept: BinaryIO, tokenizer: Tokenizer, allowed: Allowed, limit: int
) -> Counter[str]:
    """Puts the rows of a source that can be made into `kept`; answers how many of them count their end token, and not.

    Answers that were cut have none, and say nothing of that.
    """
    # Ids name the file, not where it lies.
    dataset = source.name.rstrip("/").rpartition("/")[2].partition(".")[0] or "rows"
    counted: Counter[str] = Counter()
    for row in _rows(source, limit):
        done.rows += 1
        try:
            made = reconstruct(row.value, row.index, dataset, tokenizer, allowed)
        except Refused as refused:
            done.refuse(refused.reason, f"row {row.index:,} of {source.name}: {refused.detail}")
            continue
        if made.row.finish_reason != "length":
            counted[made.tokens] += 1
        kept.write(_line(made))
    return counted


def _rows(source: Source, limit: int) -> Iterator[Row]:
    at, unpaired = Cursor(), Unpaired()
    for number, file in enumerate(paired(source.files())):
        for row in rows_in(file, Cursor(at.index, number), limit, unpaired):
            yield row
            at = row.after


def _as_most(done: Reconstructed, source: Source, kept: BinaryIO, counted: Counter[str]) -> Iterator[bytes]:
    """The lines whose tokens are counted as in most rows; where as many are one way as the other, neither is sure."""
    difference = counted[_EQUAL] - counted[_LESS]
    refused = {_LESS} if difference > 0 else {_EQUAL} if difference < 0 else {_EQUAL, _LESS} if counted[_LESS] else {}
    for line in kept:
        row = _decode(line)
        if row.sure_tokens in refused and row.finish_reason != "length":
            others = counted[_EQUAL] if row.sure_tokens == _LESS else counted[_LESS]
            way = "count" if row.sure_tokens == _LESS else "do not count"
            detail = (
                f"{row.claimed_tokens:,} claimed, {row.completion_tokens:,} made, and {others:,} rows of the source "
                f"{way} their end token"
            )
            done.refuse("end_count_differs", f"row {row.index:,} of {source.name}: {detail}")
            continue
        done.made += 1
        done.tokens += row.prompt_tokens + row.completion_tokens
        done.trained_tokens += row.completion_tokens
        done.longest = max(done.longest, row.prompt_tokens + row.completion_tokens)
        done.sure[f"tokens {row.sure_tokens}, whitespace {row.sure_whitespace}, end {row.sure_end}"] += 1
        yield line


def _line(made: Made) -> bytes:
    flat = columns(made.row)
    line = {
        "id": flat.pop("id"),
        "input_ids": made.row.input_ids.tolist(),
        "loss_mask": made.row.loss_mask.tolist(),
        **flat,
        "claimed_tokens": made.claimed_tokens,
        "sure_tokens": made.tokens,
        "sure_whitespace": made.whitespace,
        "sure_end": made.ended,
    }
    return _encode(line) + b"\n"
