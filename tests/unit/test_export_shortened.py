"""Rows that are not a whole answer, or more than one: their columns tell of what is in them, not of the record."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.lines import record_line, write_config, write_segment
from tests.unit.export_steps import export, manifest, many, rows, run

TOLD = ("id", "finish_reason", "flags", "prompt_tokens", "completion_tokens", "part", "parts")


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in TOLD)


def test_a_row_cut_at_the_longest_length_says_so(tmp_path: Path) -> None:
    found = rows(export(many(tmp_path, [3, 10]), "--max-length", "6", "--too-long", "cut") / "ids/train.jsonl")
    assert [told(row) for row in found] == [
        ("A/0", "stop", "", 2, 3, 1, 1),
        ("A/1", "length", "cut", 2, 4, 1, 1),
    ]


def test_the_row_at_the_cap_says_that_it_was_cut(tmp_path: Path) -> None:
    output = many(tmp_path, [5, 5], flags=["repetition"])
    found = rows(export(output, "--cap", "7") / "ids/train.jsonl")
    assert [told(row) for row in found] == [
        ("A/0", "stop", "repetition", 2, 5, 1, 1),
        ("A/1", "length", "repetition,cut", 2, 2, 1, 1),
    ]
    found = rows(export(output, "--cap", "10", "--overwrite") / "ids/train.jsonl")
    assert [told(row)[1:3] for row in found] == [("stop", "repetition")] * 2  # met without a cut


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_each_part_of_a_split_row_has_its_own_counts(tmp_path: Path, finish_reason: str) -> None:
    output = many(tmp_path, [10], finish_reason=finish_reason)
    options = ("--max-length", "5", "--too-long", "split")
    found = rows(export(output, *options) / "ids/train.jsonl")
    assert [told(row) for row in found] == [
        ("A/0#1", "length", "split", 2, 3, 1, 3),
        ("A/0#2", "length", "split", 0, 5, 2, 3),
        ("A/0#3", finish_reason, "split", 0, 2, 3, 3),
    ]
    found = rows(export(output, *options, "--cap", "5", "--overwrite") / "ids/train.jsonl")
    assert [told(row) for row in found[1:]] == [("A/0#2", "length", "split,cut", 0, 2, 2, 3)]


def test_a_part_that_holds_the_prompt_alone_is_left_out_and_counted_among_the_parts(tmp_path: Path) -> None:
    write_segment(tmp_path / "out", "a-0.jsonl", record_line(0, prompt=range(7), answer=range(50, 54)))
    write_config(tmp_path)
    found = rows(export(tmp_path / "out", "--max-length", "5", "--too-long", "split") / "ids/train.jsonl")
    assert [told(row) for row in found] == [
        ("A/0#2", "length", "split", 2, 3, 2, 3),
        ("A/0#3", "stop", "split", 0, 1, 3, 3),
    ]


def conversation(tmp_path: Path, *, history: list[int] | None = None) -> Path:
    """Two turns; the second's prompt is of eight ids, the first six of them the first turn unless they are given."""
    first = record_line(64, prompt=[1, 2], answer=[3, 4, 5, 6], turn=0, turns=2)
    prompt = (history or [1, 2, 3, 4, 5, 6]) + [7, 8]
    more: dict[str, Any] = {"turn": 1, "turns": 2, "parent": 64, "finish_reason": "length", "flags": ["truncated"]}
    write_segment(tmp_path / "out", "a-0.jsonl", first, record_line(65, prompt=prompt, answer=[9, 10, 11], **more))
    write_config(tmp_path)
    return tmp_path / "out"


def test_joined_turns_count_all_that_is_learnt_and_the_end_of_what_is_left_of_them(tmp_path: Path) -> None:
    output = conversation(tmp_path)
    folder = export(output, "--join-turns")
    assert [told(row) for row in rows(folder / "ids/train.jsonl")] == [("A/65", "length", "truncated", 2, 7, 1, 1)]
    assert manifest(folder)["datasets"]["A"]["joined"] == 1
    for options, wanted in (
        (["--cap", "6"], ("length", "truncated,cut", 2, 6)),
        (["--cap", "4"], ("stop", "truncated,cut", 2, 4)),  # all of the first answer
        (["--cap", "3"], ("length", "truncated,cut", 2, 3)),
        (["--max-length", "7", "--too-long", "cut"], ("stop", "truncated,cut", 2, 4)),
    ):
        [row] = rows(export(output, "--join-turns", *options, "--overwrite") / "ids/train.jsonl")
        assert told(row)[1:5] == wanted
        assert sum(row["loss_mask"]) == row["completion_tokens"]


def test_turns_that_could_not_be_joined_are_counted_by_reason_and_warned_of(tmp_path: Path) -> None:
    output = conversation(tmp_path, history=[1, 2, 3, 6])
    done = run(output, "--join-turns", "-o", str(tmp_path / "train"))
    assert done.exit_code == 0, done.exception
    assert "A: 2 records; not_joinable 1, train_rows 2\n" in done.stderr
    assert "warning: --join-turns has joined nothing: not_joinable 1\n" in done.stderr
    assert manifest(tmp_path / "train")["datasets"]["A"]["not_joinable"] == 1
    done = run(output, "--join-turns", "--flag", "truncated", "--dry-run")
    assert "warning: --join-turns has joined nothing: turn_before_left_out 1\n" in done.stderr
    many(tmp_path, [3, 3])
    done = run(output, "--join-turns", "--dry-run")
    assert "warning: --join-turns has joined nothing: no record is a later turn of another\n" in done.stderr
    assert "warning" not in run(output, "--dry-run").stderr


def test_columns_are_true_and_of_one_type_in_every_row_of_every_format(tmp_path: Path) -> None:
    """As SpecForge and speculators want them: in each row, never null."""
    output = many(tmp_path, [3, 10, 7])
    options = ("--max-length", "6", "--too-long", "split", "--cap", "15")
    wanted = rows(export(output, *options) / "ids/train.jsonl")
    assert len(wanted) == 4
    for row in wanted:
        assert len(row["input_ids"]) == row["prompt_tokens"] + row["completion_tokens"]
        assert {name: type(value) for name, value in row.items()} == {
            "id": str, "input_ids": list, "loss_mask": list, "dataset": str, "index": int, "row_id": str,
            "finish_reason": str, "flags": str, "prompt_tokens": int, "completion_tokens": int, "part": int,
            "parts": int,
        }  # fmt: skip
    [path] = (export(output, *options, "--overwrite", layout="parquet") / "parquet").iterdir()
    assert pq.read_table(path).to_pylist() == wanted
