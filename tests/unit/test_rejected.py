"""`tokenmill rejects`: the rejects of datasets by reason, with the first three of each."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from common.rejects import Reject, append_rejects
from common.sections import TokenizerSettings
from common.settings import Settings
from producer.cli.main import cli
from producer.datasets.reasons import REASONS
from producer.rejected import rejected_rows
from producer.run import exit_code, failures
from tests.lines import record_line, write_segment

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
    assert done.stderr == "B1: 1 line of its rejects.jsonl cannot be read as rejects\n"


def test_a_dataset_that_is_not_there_is_said(folder: Path) -> None:
    done = run(folder, "B3")
    assert done.exit_code == 1
    assert str(done.exception).startswith("there is no dataset 'B3'; ")


def peak_bytes(settings: Settings, dataset: str) -> int:
    tracemalloc.start()
    try:
        rejected_rows(settings, [dataset])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_million_rejects_take_the_memory_of_a_few(tmp_path: Path) -> None:
    for dataset, rows in (("B1", 1000), ("B2", 20_000)):
        append_rejects(tmp_path, dataset, [Reject(index, "not_json", "d" * 200, f"r{index}") for index in range(rows)])
    settings = Settings(output=tmp_path, tokenizer=TokenizerSettings(path=Path("tok")))
    assert [one.rejected for one in rejected_rows(settings, ["B1", "B2"])] == [1000, 20_000]
    # A bit for each index is what grows: 2.4 KB here. The rows themselves would take 8 MB.
    assert peak_bytes(settings, "B2") - peak_bytes(settings, "B1") < 50_000


def test_duplicates_are_no_failures() -> None:
    ended = {"name": "A", "state": "exhausted", "done": 99, "rejected": 900, "rejects": {"duplicate": 900}}
    assert exit_code({"datasets": [ended]}, False, 0.01) == 0
    assert exit_code({"datasets": [ended | {"rejected": 901}]}, False, 0.01) == 0
    assert exit_code({"datasets": [ended | {"rejected": 902}]}, False, 0.01) == 3


def test_why_the_command_leaves_with_3_is_said() -> None:
    """A run left with 3 after 1 reject in 66 rows, and said nothing of the share that is allowed."""
    chat = {"name": "chat", "state": "exhausted", "done": 65, "rejected": 1, "rejects": {"not_json": 1}}
    stopped = chat | {"name": "mt", "state": "halted", "rejected": 0, "rejects": {}}
    last = {"datasets": [chat, stopped]}
    rejected, halted = failures(last, 0.01)
    assert halted == "mt is halted"
    assert rejected == (
        "chat: 1 of 66 samples were rejected (1.52%), more than [run] allowed_failures = 0.01 allows; `tokenmill "
        "rejects chat` says why"
    )
    assert failures({"datasets": [chat]}, 0.02) == []
    assert (exit_code(last, False, 0.01), exit_code(last, True, 0.01)) == (3, 130)


def test_a_row_is_found_in_the_files_of_its_source(folder: Path) -> None:
    (folder / "shards").mkdir()
    row = b'{"prompt": "hello"}'
    (folder / "shards" / "a-1.jsonl").write_bytes(b"\n".join([row, b"", row]) + b"\n")
    (folder / "shards" / "a-2.jsonl.gz").write_bytes(gzip.compress(b"\n\n" + row + b"\n[1" + b"\n" + row))
    (folder / "shards" / "a-10.json").write_bytes(b'[{"prompt": "x"},\n"a text",\n{"prompt": "y"}]')
    path = folder / "tokenmill.toml"
    path.write_text(path.read_text().replace("b.jsonl", "shards"))
    meaning = REASONS["no_prompt"]
    bad = [
        Reject(1, "no_prompt", meaning),
        Reject(3, "not_json", "cut"),
        Reject(6, "not_json", "a text"),
        Reject(99, "x"),
    ]
    append_rejects(folder / "out", "B2", bad)
    assert run(folder, "B2").stdout.splitlines() == [
        "B2: 4 rows rejected",
        f"  not_json: 2 ({REASONS['not_json']})",
        "    row 3, a-2.jsonl.gz:4: cut",
        "    row 6, a-10.json, its row 1: a text",
        f"  no_prompt: 1 ({meaning})",
        "    row 1, a-1.jsonl:3",  # what was wrong with it is what the reason says
        "  x: 1",
        "    row 99",
    ]
    (found,) = json.loads(run(folder, "B2", "--json").stdout)["datasets"]
    assert found["places"] == {"3": "a-2.jsonl.gz:4", "6": "a-10.json, its row 1", "1": "a-1.jsonl:3"}


def test_turns_that_were_not_made_are_told_of(folder: Path) -> None:
    path = folder / "tokenmill.toml"
    path.write_text(path.read_text() + 'turns = "all"\n')
    lines = [record_line(index, 5, dataset="B2", turn=turn, turns=3) for index, turn in ((0, 0), (64, 0), (65, 1))]
    write_segment(folder / "out", "w1-0.jsonl", *lines, dataset="B2")
    assert run(folder, "B2").stdout.splitlines()[1] == (
        "! B2: 3 of the 6 turns of its conversations have no record: none follows on a truncated, damaged or rejected "
        "one (`tokenmill status` counts these), and some may be still to come"
    )
