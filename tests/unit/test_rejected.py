"""`tokenmill rejects`: the rejects of datasets by reason, with the first three of each."""

import json
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from common.rejects import Reject, append_rejects
from producer.cli.main import cli
from producer.datasets.reasons import REASONS
from producer.rejected import rejected_rows
from producer.run import exit_code

CONFIG = """output = "out"
[tokenizer]
path = "t"
[[datasets]]
name = "B1"
path = "a.jsonl"
[[datasets]]
name = "B2"
path = "b.jsonl"
"""
ROWS = [
    Reject(9, "bad_messages", "turn 0\nhas no text", "r9"),
    *(Reject(index, "not_json", f"d{index}") for index in (7, 5, 3, 1)),
    Reject(4, "worker_lost", "it was lost", 4),
    Reject(5, "too_long", "a second reject of a row does not count"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenmill.toml").write_text(CONFIG)
    append_rejects(tmp_path / "out", "B1", ROWS)
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["rejects", "-c", str(folder / "tokenmill.toml"), *arguments])


def test_reasons_are_summed_up_with_examples(folder: Path) -> None:
    done = run(folder)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "B1: 6 rows rejected",
        f"  not_json: 4 ({REASONS['not_json']})",
        "    row 1: d1",
        "    row 3: d3",
        "    row 5: d5",
        f"  bad_messages: 1 ({REASONS['bad_messages']})",
        "    row 9, id 'r9': turn 0 has no text",
        "  worker_lost: 1",
        "    row 4, id 4: it was lost",
        "B2: 0 rows rejected",
    ]


def test_a_program_may_read_it(folder: Path) -> None:
    done = run(folder, "B1", "--json")
    assert done.exit_code == 0
    (only,) = json.loads(done.stdout)["datasets"]
    assert (only["name"], only["rejected"], only["faults"]) == ("B1", 6, 0)
    first = only["reasons"][0]
    assert (first["reason"], first["rows"], first["meaning"]) == ("not_json", 4, REASONS["not_json"])
    assert first["examples"][0] == {"index": 1, "reason": "not_json", "detail": "d1", "id": None}


def test_a_line_that_is_no_reject_is_said_on_standard_error(folder: Path) -> None:
    with (folder / "out" / "B1" / "rejects.jsonl").open("ab") as file:
        file.write(b"x\n")
    done = run(folder, "B1")
    assert done.stderr == "B1: 1 lines of its rejects.jsonl are none\n"


def test_a_dataset_that_is_not_there_is_said(folder: Path) -> None:
    done = run(folder, "B3")
    assert done.exit_code == 1
    assert str(done.exception).startswith("there is no dataset 'B3'; ")


def peak_bytes(output: Path, dataset: str) -> int:
    tracemalloc.start()
    try:
        rejected_rows(output, [dataset])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_million_rejects_take_the_memory_of_a_few(tmp_path: Path) -> None:
    for dataset, rows in (("B1", 1000), ("B2", 20_000)):
        append_rejects(tmp_path, dataset, [Reject(index, "not_json", "d" * 200, f"r{index}") for index in range(rows)])
    assert [one.rejected for one in rejected_rows(tmp_path, ["B1", "B2"])] == [1000, 20_000]
    # A bit for each index is what grows: 2.4 KB here. The rows themselves would take 8 MB.
    assert peak_bytes(tmp_path, "B2") - peak_bytes(tmp_path, "B1") < 50_000


def test_duplicates_are_no_failures() -> None:
    ended = {"state": "exhausted", "done": 99, "rejected": 900, "rejects": {"duplicate": 900}}
    assert exit_code({"datasets": [ended]}, False, 0.01) == 0
    assert exit_code({"datasets": [ended | {"rejected": 901}]}, False, 0.01) == 0
    assert exit_code({"datasets": [ended | {"rejected": 902}]}, False, 0.01) == 3
