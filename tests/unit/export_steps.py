"""What the tests of exports have in common."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from producer.cli.main import cli
from tests.lines import record_line, write_config, write_segment


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", *arguments, "-c", str(output.parent / "tokenmill.toml")])


def export(output: Path, *arguments: str, layout: str = "ids") -> Path:
    """The folder of an export that succeeds."""
    folder = output.parent / "train"
    done = run(output, *arguments, "-o", str(folder), "--format", layout)
    assert done.exit_code == 0, (done.stderr, done.exception)
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids_of(path: Path) -> list[str]:
    return [row["id"] for row in rows(path)]


def many(tmp_path: Path, lengths: Sequence[int], **changes: Any) -> Path:
    """Dataset A with answers of these lengths; no two have an id in common."""
    lines = [
        record_line(n, prompt=[1, 2], answer=range(100 * n + 10, 100 * n + 10 + length), **changes)
        for n, length in enumerate(lengths)
    ]
    write_segment(tmp_path / "out", "a-0.jsonl", *lines)
    write_config(tmp_path)
    return tmp_path / "out"


def manifest(folder: Path) -> dict[str, Any]:
    """That of an export."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    return found
