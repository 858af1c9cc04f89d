"""Training files: rows, masks, what is refused, and that no half file gets a final name."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.errors import DataError, UsageError
from producer.cli import files
from producer.export import export
from tests.lines import record_line, void_line, write_config, write_segment


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Two datasets with what a run leaves: several files, a void, an outdone attempt, a torn line."""
    output = tmp_path / "out"
    write_segment(
        output, "a-0.jsonl", record_line(0, 1, prompt=[1, 2, 3], answer=[4, 5]), record_line(1, 1, answer=[9])
    )
    write_segment(
        output, "b-0.jsonl",
        record_line(1, 2, prompt=[1], answer=[7, 8], finish_reason="length", flags=["truncated"], meta={"id": None}),
        record_line(2, 1), void_line(2, 1), record_line(3, 1)[:-9],
    )  # fmt: skip
    write_segment(output, "a-0.jsonl", record_line(0, dataset="B", sample_id="B/0"), dataset="B")
    return output


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_counting_record_becomes_one_row(output: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    a, b = export(output, ["A", "B"], "jsonl", folder)
    assert rows(folder / "A.jsonl") == [
        {
            "id": "A/0", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1],
            "dataset": "A", "index": 0, "finish_reason": "stop", "truncated": False,
        },
        {
            "id": "A/1", "input_ids": [1, 7, 8], "loss_mask": [0, 1, 1],
            "dataset": "A", "index": 1, "finish_reason": "length", "truncated": True,
        },
    ]  # fmt: skip
    assert [row["id"] for row in rows(folder / "B.jsonl")] == ["B/0"]
    assert (a.rows, a.trained_tokens, a.longest, a.faults) == (2, 4, 5, 0)
    assert (b.rows, b.trained_tokens, b.longest, b.faults) == (1, 2, 5, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["A.jsonl", "B.jsonl"]


def test_a_folder_with_files_is_refused_and_force_replaces_only_files_of_the_same_name(
    output: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "A.jsonl").write_text("old")
    with pytest.raises(UsageError, match="not empty"):
        export(output, ["A"], "jsonl", folder)
    assert (folder / "A.jsonl").read_text() == "old"
    export(output, ["A"], "jsonl", folder, force=True)
    assert len(rows(folder / "A.jsonl")) == 2
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_leftover_of_a_killed_export_is_no_hindrance(output: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / ".A.jsonl.part").write_text('{"id": "A/0", "inp')
    export(output, ["A"], "jsonl", folder)
    assert [path.name for path in folder.iterdir()] == ["A.jsonl"]


def test_an_export_that_fails_leaves_no_file(output: Path, tmp_path: Path) -> None:
    write_segment(output, "c-0.jsonl", record_line(5, dataset="B", output_ids=[-1]), dataset="B")
    folder = tmp_path / "train"
    with pytest.raises(DataError, match=r"c-0\.jsonl"):
        export(output, ["A", "B"], "jsonl", folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("inside", [".", "A", "A/train"])
def test_the_runs_own_folders_are_refused(output: Path, inside: str) -> None:
    before = sorted(output.rglob("*"))
    with pytest.raises(UsageError, match="the run's own files"):
        export(output, ["A"], "jsonl", output / inside, force=True)
    assert sorted(output.rglob("*")) == before


def test_nothing_to_export_is_an_error_and_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no records of A yet"):
        export(tmp_path / "out", ["A"], "jsonl", tmp_path / "train")
    assert not (tmp_path / "train").exists()


def test_the_command_prints_counts_on_stderr_and_nothing_on_stdout(output: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, datasets=("A", "B", "C"))
    write_segment(output, "z-0.jsonl", b"?\n")
    folder = tmp_path / "train"
    result = CliRunner().invoke(files.export, ["-c", str(config), "-o", str(folder)])
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"A: 2 rows, 4 tokens to train on, longest row 5 tokens -> {folder}/A.jsonl",
        "A: 1 lines are no records and were left out; `tokenmill verify A` names them",
        f"B: 1 rows, 2 tokens to train on, longest row 5 tokens -> {folder}/B.jsonl",
        "C: no records yet, so no file",
    ]


def test_the_command_exports_the_datasets_it_is_given(output: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, datasets=("A",))  # B left the configuration, and still has its folder
    folder = tmp_path / "train"
    result = CliRunner().invoke(files.export, ["B", "B", "-c", str(config), "-o", str(folder)])
    assert result.exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["B.jsonl"]
