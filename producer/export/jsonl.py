"""The format `ids`: one plain JSONL file, alone in its folder.

SpecForge's `data.prompts_path` takes one file; speculators' `prepare-data` takes a folder, and reads every .json and
.jsonl file in it as data, so nothing else is put there.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from producer.export.rows import Row
from producer.export.writers import columns

_BUFFER_BYTES = 1024 * 1024
_encode = msgspec.json.Encoder().encode


class JsonLines:
    """`<folder>/ids/train.jsonl`; another split has its own folder, `ids-eval`."""

    def __init__(self, folder: Path, split: str) -> None:
        place = folder / ("ids" if split == "train" else f"ids-{split}")
        place.mkdir()
        self._path = place / f"{split}.jsonl"
        self._file = self._path.open("wb", buffering=_BUFFER_BYTES)
        self._rows = 0

    def add(self, row: Row) -> str:
        """Write one line: id, input_ids, loss_mask, and the flat columns."""
        flat = columns(row)
        line = {"id": flat.pop("id"), "input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist(), **flat}
        self._file.write(_encode(line) + b"\n")
        self._rows += 1
        return ""

    def close(self) -> list[tuple[Path, int]]:
        """Force the file to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return [(self._path, self._rows)]

    def abandon(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(OSError):  # what is left in the buffer may find the disk full
            self._file.close()
