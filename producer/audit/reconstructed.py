"""Reconstructed rows as a file: the layout `ids` of an export, with columns that say how sure each row is."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from common.chat_template import Tokenizer
from common.durable import replace_file
from producer.audit.counts import EXAMPLES
from producer.audit.reconstruct import Allowed, Made, Refused, reconstruct
from producer.datasets.containers import MAX_ROW_BYTES, Cursor, read_rows
from producer.export.writers import columns

_encode = msgspec.json.Encoder().encode


class Reconstructed:
    """What became of all rows: those that were made by how sure they are, and those refused by their reason."""

    def __init__(self) -> None:
        self.rows = self.made = self.tokens = self.trained_tokens = self.longest = 0
        self.sure: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}  # of those refused


def write(
    sources: Sequence[str], path: Path, tokenizer: Tokenizer, allowed: Allowed, max_row_bytes: int = MAX_ROW_BYTES
) -> Reconstructed:
    """Write all rows of `sources` that are sure to `path`, which stands there whole or not at all.

    Raises OSError, and DataError where a source is damaged.
    """
    done = Reconstructed()
    replace_file(path, _lines(done, sources, tokenizer, allowed, max_row_bytes))
    return done


def _lines(
    done: Reconstructed, sources: Sequence[str], tokenizer: Tokenizer, allowed: Allowed, max_row_bytes: int
) -> Iterator[bytes]:
    for source in sources:
        # Ids name the file, not where it lies.
        dataset = source.rstrip("/").rpartition("/")[2].partition(".")[0] or "rows"
        for row in read_rows(source, Cursor(), max_row_bytes):
            done.rows += 1
            try:
                made = reconstruct(row.value, row.index, dataset, tokenizer, allowed)
            except Refused as refused:
                done.refused[refused.reason] += 1
                if done.refused[refused.reason] <= EXAMPLES:
                    told = f"row {row.index:,} of {source}: {refused.detail}"
                    done.examples.setdefault(refused.reason, []).append(told)
                continue
            done.made += 1
            done.tokens += len(made.row.input_ids)
            done.trained_tokens += made.row.trained_tokens
            done.longest = max(done.longest, len(made.row.input_ids))
            done.sure[f"tokens {made.tokens}, whitespace {made.whitespace}, end {made.ended}"] += 1
            yield _line(made)


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
