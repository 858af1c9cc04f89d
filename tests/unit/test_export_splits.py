"""What is held out, capped and mixed: first the split, then caps and shares of what is left to train on."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import DataError, UsageError
from tests.lines import record_line, write_config, write_segment
from tests.unit.export_steps import export, ids_of, manifest, many, rows, run


def learnt(path: Path) -> Counter[str]:
    """Tokens to learn, by dataset."""
    found = Counter[str]()
    for row in rows(path):
        found[row["dataset"]] += sum(row["loss_mask"])
    return found


def two(tmp_path: Path, prompts: int = 60) -> Path:
    """Datasets A and B with answers of ten ids to prompts that all differ, and C with a few."""
    for number, (name, n) in enumerate((("A", prompts), ("B", prompts), ("C", 5))):
        lines = [
            record_line(i, prompt=[number, i], answer=range(i, i + 10), dataset=name, sample_id=f"{name}/{i}")
            for i in range(n)
        ]
        write_segment(tmp_path / "out", "a-0.jsonl", *lines, dataset=name)
    write_config(tmp_path, datasets=("A", "B", "C"))
    return tmp_path / "out"


def test_a_cap_is_of_what_is_trained_on_and_leaves_what_is_held_out(tmp_path: Path) -> None:
    output = two(tmp_path)
    whole = export(output, "A", "--eval", "0.5")
    held_out = ids_of(whole / "ids-eval/eval.jsonl")
    trained = ids_of(whole / "ids/train.jsonl")
    assert 15 < len(held_out) < 45
    folder = export(output, "A", "--eval", "0.5", "--cap", "55", "--overwrite")
    assert ids_of(folder / "ids-eval/eval.jsonl") == held_out
    assert ids_of(folder / "ids/train.jsonl") == trained[:6]
    assert learnt(folder / "ids/train.jsonl") == {"A": 55}
    counts = manifest(folder)["datasets"]["A"]
    assert (counts["train_rows"], counts["eval_rows"]) == (6, len(held_out))
    assert counts["over_cap"] == len(trained) - 6
    done = run(output, "A", "--eval", "0.5", "--cap", "55", "--dry-run")
    assert "--cap is for train alone: what is held out for eval is there whole" in done.stderr


def test_a_mix_is_right_in_what_is_trained_on(tmp_path: Path) -> None:
    output = two(tmp_path)
    folder = export(output, "A", "B", "--eval", "0.3", "--mix", "A=1", "--mix", "B=2", "--shuffle", "1")
    found = learnt(folder / "ids/train.jsonl")
    assert found["B"] == 2 * found["A"] > 200
    held_out = sorted(ids_of(folder / "ids-eval/eval.jsonl"))
    whole = export(output, "A", "B", "--eval", "0.3", "--overwrite")
    assert sorted(ids_of(whole / "ids-eval/eval.jsonl")) == held_out
    assert found["B"] == learnt(whole / "ids/train.jsonl")["B"]  # it has least for its share, and is taken whole


def test_what_a_mix_takes_whole_is_whole(tmp_path: Path) -> None:
    """1001 / 49 * 49 is less than 1001 in floating point: the last answer lost its end token."""
    for name, answer in (("A", range(1001)), ("B", range(2000))):
        record = record_line(0, prompt=[1], answer=answer, dataset=name, sample_id=f"{name}/0")
        write_segment(tmp_path / "out", "a-0.jsonl", record, dataset=name)
    write_config(tmp_path, datasets=("A", "B"))
    folder = export(tmp_path / "out", "--mix", "A=49", "--mix", "B=49")
    assert learnt(folder / "ids/train.jsonl") == {"A": 1001, "B": 1001}
    assert "cut_at_cap" not in manifest(folder)["datasets"]["A"]


def test_a_mix_counts_only_the_rows_that_can_be_taken(tmp_path: Path) -> None:
    output = two(tmp_path)
    longer = [record_line(i, prompt=[9, i], answer=range(40), dataset="B", sample_id=f"B/{i}") for i in range(60, 99)]
    write_segment(output, "b-0.jsonl", *longer, dataset="B")
    for how in ("drop", "cut"):
        folder = export(output, "--max-length", "20", "--too-long", how, "--mix", "A=1", "--mix", "B=1", "--overwrite")
        assert learnt(folder / "ids/train.jsonl") == {"A": 600, "B": 600}


def test_datasets_that_a_mix_does_not_name_are_left_out_and_said(tmp_path: Path) -> None:
    output = two(tmp_path)
    folder = output.parent / "train"
    done = run(output, "--mix", "A=1", "--mix", "B=2", "-o", str(folder))
    assert done.exit_code == 0, done.exception
    assert "left out, 1 of 3 datasets: C (not in --mix)\n" in done.stderr
    assert learnt(folder / "ids/train.jsonl") == {"A": 300, "B": 600}
    assert manifest(folder)["datasets"]["C"] == {"records": 5, "not_in_mix": 5}


def test_a_mix_with_a_dataset_that_has_nothing_is_an_error(tmp_path: Path) -> None:
    done = run(two(tmp_path), "--mix", "A=1", "--mix", "C=1", "--max-length", "11", "--dry-run")
    assert isinstance(done.exception, DataError)
    assert "--mix gives A a share, and nothing of it is there to train on" in str(done.exception)


@pytest.mark.parametrize(
    ("share", "split"), [("0.0001", "eval"), ("0.9999", "train")], ids=["nothing held out", "all held out"]
)
def test_a_split_without_rows_is_there_and_warned_of(tmp_path: Path, share: str, split: str) -> None:
    output = two(tmp_path)
    folder = output.parent / "train"
    for layout, path in (
        ("ids", {"train": "ids/train.jsonl", "eval": "ids-eval/eval.jsonl"}[split]),
        ("parquet", f"parquet/{split}-00000-of-00001.parquet"),
        ("arrow", f"arrow/{split}/data-00000-of-00001.arrow"),
    ):
        done = run(output, "--eval", share, "--format", layout, "-o", str(folder), "--overwrite")
        assert done.exit_code == 0, done.exception
        assert f"warning: {split} has 0 rows: " in done.stderr
        assert manifest(folder)["splits"][split]["rows"] == 0
        assert (folder / path).is_file()
        if layout == "parquet":  # with a split that has no rows in its card, datasets loads none
            assert f"split: {split}" not in (folder / "README.md").read_text()
            assert pq.read_table(folder / path).num_rows == 0
        elif layout == "arrow":  # datasets cannot read a file without a batch
            with pa.memory_map(str(folder / path)) as source:
                assert [batch.num_rows for batch in pa.ipc.open_stream(source)] == [0]


def sides(folder: Path) -> dict[str, str]:
    """Of each row's id, its split."""
    both = (("train", "ids/train.jsonl"), ("eval", "ids-eval/eval.jsonl"))
    return {one: split for split, path in both for one in ids_of(folder / path)}


def test_equal_prompts_are_on_one_side_also_of_two_datasets_and_however_they_are_spelt(tmp_path: Path) -> None:
    rng = random.Random(3)
    output = tmp_path / "out"
    for name, separators in (("A", (",", ":")), ("B", None)):
        lines = []
        for i in range(120):
            line = json.loads(record_line(i, prompt=[i % 30, 7], answer=rng.choices(range(99), k=5), dataset=name))
            lines.append(json.dumps(line | {"sample_id": f"{name}/{i}"}, separators=separators).encode() + b"\n")
        write_segment(output, "a-0.jsonl", *lines, dataset=name)
    write_config(tmp_path, datasets=("A", "B"))
    found = sides(export(output, "--eval", "0.3"))
    assert len(found) == 240
    assert set(found.values()) == {"train", "eval"}
    of_prompt = [{found[f"{name}/{i}"] for name in "AB" for i in range(n, 120, 30)} for n in range(30)]
    assert all(len(one) == 1 for one in of_prompt)
    # A row stays on its side, whatever else is exported.
    for others in (["A"], ["--shuffle", "2"], ["--cap", "20"], ["--min-tokens", "2", "--dedupe"]):
        again = sides(export(output, "--eval", "0.3", *others, "--overwrite"))
        assert again.items() <= found.items()


def test_a_conversation_is_on_the_side_of_its_first_prompt(tmp_path: Path) -> None:
    output = tmp_path / "out"
    lines = []
    for row in range(40):
        for turn, flags in ((0, ["repetition"]), (1, []), (2, [])):
            more: dict[str, Any] = {"turn": turn, "turns": 3, "flags": flags} | (
                {"parent": 64 * row + turn - 1} if turn else {}
            )
            lines.append(record_line(64 * row + turn, prompt=[row, *range(turn + 1)], answer=[row, turn], **more))
    write_segment(output, "a-0.jsonl", *lines)
    single = [record_line(i, prompt=[i, 0], answer=[5], dataset="B", sample_id=f"B/{i}") for i in range(40)]
    write_segment(output, "a-0.jsonl", *single, dataset="B")
    write_config(tmp_path, datasets=("A", "B"))
    found = sides(export(output, "--eval", "0.4"))
    assert set(found.values()) == {"train", "eval"}
    for row in range(40):
        assert len({found[f"B/{row}"], *(found[f"A/{64 * row + turn}"] for turn in range(3))}) == 1
    # Also where the first turn is left out.
    again = sides(export(output, "--eval", "0.4", "--no-flag", "repetition", "--overwrite"))
    assert len(again) == 120
    assert again.items() <= found.items()


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("1k", 1000), ("A=1k", 1000), ("0.5k", 500), ("1_2_0", 120), ("A=none", 1800), ("none", 1800)],
)
def test_a_cap_is_written_as_everywhere_else(tmp_path: Path, given: str, tokens: int) -> None:
    output = many(tmp_path, [30] * 60)
    assert learnt(export(output, "--cap", given) / "ids/train.jsonl") == {"A": tokens}


def test_a_cap_of_one_dataset_may_be_none(tmp_path: Path) -> None:
    folder = export(two(tmp_path), "--cap", "25", "--cap", "B=none")
    assert learnt(folder / "ids/train.jsonl") == {"A": 25, "B": 600, "C": 25}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cap", "10x"], "'10x' is no number of tokens; write it as 12000000, 12_000_000 or 12M"),
        (["--cap", "0.5"], "'0.5' is no number of tokens"),
        (["--cap", "A=0"], "'A=0' leaves nothing to learn"),
        (["--cap", "-5"], "'-5' leaves nothing to learn"),
        (["--mix", "A=0"], "write DATASET=WEIGHT"),
        (["--mix", "5"], "write DATASET=WEIGHT"),
        (["--mix", "A=nan"], "write DATASET=WEIGHT"),
    ],
)
def test_what_is_no_amount_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = run(two(tmp_path), *options, "--dry-run")
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--flag", "nosuch"], "--flag nosuch: no answer can have that; "),
        (["--no-flag", "truncatd"], "--no-flag truncatd: no answer can have that; did you mean truncated?"),
        (["--flag", "truncated,repetition"], "--flag truncated,repetition: no answer can have that; did you mean "),
        (["--finish-reason", "lenght"], "--finish-reason lenght: no answer can have that; did you mean length?"),
    ],
)
def test_what_no_answer_can_have_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = run(two(tmp_path), *options, "--dry-run")
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)


@pytest.mark.parametrize("flag", ["truncated", "uncounted", "max_new_tokens_cut", "clipped", "copied_prompt"])
def test_what_an_answer_can_have_is_taken(tmp_path: Path, flag: str) -> None:
    assert run(two(tmp_path), "--no-flag", flag, "--dry-run").exit_code == 0
