"""How rows become files: what each format is to the rest of the export."""

from pathlib import Path
from typing import Protocol

from producer.export.rows import Row


class Writer(Protocol):
    """Writes the rows of one split into files of its own."""

    def add(self, row: Row) -> str:
        """Take a row; answers "" or the reason why this format cannot have it."""
        ...

    def close(self) -> list[tuple[Path, int]]:
        """Finish the files; answers each with its number of rows."""
        ...

    def abandon(self) -> None:
        """Let go of the files, which are removed by the caller."""
        ...


def columns(row: Row) -> dict[str, str | int | bool]:
    """The flat columns of a row: the same in every row, never null, of one type over all exports.

    datasets and speculators take a column's type from its first rows, and fail, or change values, where a later one
    differs; so what is missing is "" (shared types of the trainers: a text, an integer, a boolean).
    """
    return {
        "id": row.id,
        "dataset": row.dataset,
        "index": row.index,
        "row_id": row.row_id,
        "finish_reason": row.finish_reason,
        "flags": ",".join(row.flags),
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "part": row.part,
        "parts": row.parts,
    }
