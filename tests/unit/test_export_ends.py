"""An export that ends before its time: on a full disk, by Ctrl-C. Nothing of it stays."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from producer.export.choose import Wanted
from producer.export.columnar import Arrow, Limits, Shards, parquet
from producer.export.export import MakeWriter, Shape, export
from producer.export.jsonl import JsonLines
from producer.export.rows import Row
from tests.lines import record_line, write_config, write_segment

# A file beyond the limit fails as on a full disk does: within a write.
_LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from producer.cli.main import main
main()
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    rng = random.Random(4)
    lines = [record_line(n, prompt=rng.choices(range(99_999), k=500)) for n in range(100)]
    write_segment(tmp_path / "out", "a-0.jsonl", *lines)
    write_config(tmp_path)
    return tmp_path / "out"


@pytest.mark.parametrize("layout", ["ids", "parquet", "arrow"])
def test_a_full_disk_leaves_nothing_and_is_said_in_a_sentence(output: Path, layout: str) -> None:
    folder = output.parent / "train"
    arguments = ["export", "-c", str(output.parent / "tokenmill.toml"), "--format", layout, "-o", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 4, done.stderr
    [said] = done.stderr.splitlines()
    assert said.startswith(f"tokenmill: {folder} cannot be written (")
    assert "File too large" in said
    assert said.endswith("), and is as it was before; free space or mend the disk, and export again")
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "tokenmill.toml"]


class _Interrupted:
    """A writer at whose fiftieth row somebody presses Ctrl-C."""

    def __init__(self, writer: Shards | Arrow | JsonLines) -> None:
        self._writer, self._left = writer, 50

    def add(self, row: Row) -> str:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return self._writer.add(row)

    def close(self) -> list[tuple[Path, int]]:
        return self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder, split: _Interrupted(JsonLines(folder, split)),
        lambda folder, split: _Interrupted(parquet(folder, split, Limits(rows=7))),
        lambda folder, split: _Interrupted(Arrow(folder, split, Limits(rows=7))),
    ],
    ids=["ids", "parquet", "arrow"],
)
def test_an_interrupted_export_leaves_no_half_file_and_no_thread(output: Path, make: MakeWriter) -> None:
    folder = output.parent / "train"
    with pytest.raises(KeyboardInterrupt):
        export(output, ["A"], Wanted(), Shape(), make, folder, layout="ids", command=[])
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "tokenmill.toml"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write")]
