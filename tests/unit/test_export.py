"""Training files: rows, masks, what is chosen and cut, what is refused, and that no half file gets a final name."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from common.errors import DataError, UsageError
from producer.cli.main import cli
from tests.lines import record_line, void_line, write_config, write_segment
from tests.unit.export_steps import export, ids_of, many, rows, run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Two datasets with what a run leaves: several files, a void, an outdone attempt, a torn line."""
    output = tmp_path / "out"
    write_segment(
        output, "a-0.jsonl", record_line(0, 1, prompt=[1, 2, 3], answer=[4, 5]), record_line(1, 1, answer=[9])
    )
    write_segment(
        output, "b-0.jsonl",
        record_line(1, 2, prompt=[1], answer=[7, 8], finish_reason="length", flags=["truncated"], meta={"id": 7}),
        record_line(2, 1), void_line(2, 1), record_line(3, 1)[:-9],
    )  # fmt: skip
    write_segment(output, "a-0.jsonl", record_line(0, dataset="B", sample_id="B/0"), dataset="B")
    write_config(tmp_path, datasets=("A", "B"))
    return output


def test_each_counting_record_becomes_one_row(output: Path) -> None:
    folder = export(output)
    assert rows(folder / "ids/train.jsonl") == [
        {
            "id": "A/0", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1], "dataset": "A", "index": 0,
            "row_id": "", "finish_reason": "stop", "flags": "", "prompt_tokens": 3, "completion_tokens": 2,
            "part": 1, "parts": 1,
        },
        {
            "id": "A/1", "input_ids": [1, 7, 8], "loss_mask": [0, 1, 1], "dataset": "A", "index": 1,
            "row_id": "7", "finish_reason": "length", "flags": "truncated", "prompt_tokens": 1, "completion_tokens": 2,
            "part": 1, "parts": 1,
        },
        {
            "id": "B/0", "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1], "dataset": "B", "index": 0,
            "row_id": "", "finish_reason": "stop", "flags": "", "prompt_tokens": 3, "completion_tokens": 2,
            "part": 1, "parts": 1,
        },
    ]  # fmt: skip
    assert [path.name for path in (folder / "ids").iterdir()] == ["train.jsonl"]  # trainers read all that is there
    assert json.loads((folder / "token_counts.json").read_bytes()) == {"4": 1, "5": 1, "7": 1, "8": 2, "9": 1}
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["splits"] == {"train": {"rows": 3, "tokens": 13, "trained_tokens": 6, "longest": 5}}
    assert manifest["datasets"]["A"] == {"faults": 0, "records": 2, "train_rows": 2}


def test_all_formats_hold_the_same_rows(output: Path) -> None:
    wanted = rows(export(output) / "ids/train.jsonl")
    parquet = export(output, "--overwrite", "--shard-rows", "2", layout="parquet")
    files = sorted((parquet / "parquet").iterdir())
    assert [path.name for path in files] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert [row for path in files for row in pq.read_table(path).to_pylist()] == wanted
    table = pq.read_schema(files[0])
    assert (table.field("input_ids").type, table.field("loss_mask").type) == (pa.list_(pa.int32()), pa.list_(pa.int8()))
    assert "path: parquet/train-*.parquet" in (parquet / "README.md").read_text()
    arrow = export(output, "--overwrite", layout="arrow") / "arrow/train"
    state = json.loads((arrow / "state.json").read_bytes())
    [name] = [one["filename"] for one in state["_data_files"]]
    with pa.memory_map(str(arrow / name)) as source:
        found = pa.ipc.open_stream(source).read_all().to_pylist()
    assert [row.pop("seq_len") for row in found] == [5, 3, 5]
    assert found == wanted


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["--flag", "truncated"], ["A/1"]),
        (["--no-flag", "truncated"], ["A/0", "B/0"]),
        (["--finish-reason", "length"], ["A/1"]),
        (["--max-length", "3"], ["A/1"]),
        (["--max-tokens", "2", "--min-tokens", "2"], ["A/0", "A/1", "B/0"]),
        (["B"], ["B/0"]),
        (["--dedupe"], ["A/0", "A/1", "B/0"]),
    ],
)
def test_what_is_chosen(output: Path, options: list[str], taken: list[str]) -> None:
    assert ids_of(export(output, *options) / "ids/train.jsonl") == taken


def test_what_a_gate_leaves_out(output: Path) -> None:
    config = output.parent / "tokenmill.toml"
    own = "[datasets.gates.truncated]\ndrop_from_export = true\n"
    config.write_text(config.read_text().replace('path = "A.jsonl"\n', 'path = "A.jsonl"\n' + own))
    folder = export(output)
    assert ids_of(folder / "ids/train.jsonl") == ["A/0", "B/0"]
    assert json.loads((folder / "manifest.json").read_bytes())["datasets"]["A"]["left_out_by_gate"] == 1


def test_of_equal_answers_to_equal_prompts_one_stays(tmp_path: Path) -> None:
    write_segment(tmp_path / "out", "a-0.jsonl", *(record_line(n, answer=[4, n % 2]) for n in range(5)))
    write_config(tmp_path)
    folder = export(tmp_path / "out", "--dedupe")
    assert ids_of(folder / "ids/train.jsonl") == ["A/0", "A/1"]
    assert json.loads((folder / "manifest.json").read_bytes())["datasets"]["A"]["duplicate"] == 3


def test_longer_rows_are_dropped_cut_or_split_and_counted(tmp_path: Path) -> None:
    output = many(tmp_path, [3, 10])
    for how, lengths, reason in (
        ("drop", [5], "too_long_dropped"),
        ("cut", [5, 6], "too_long_cut"),
        ("split", [5, 6, 6], "too_long_split"),
    ):
        folder = export(output, "--max-length", "6", "--too-long", how, "--overwrite")
        found = rows(folder / "ids/train.jsonl")
        assert [len(row["input_ids"]) for row in found] == lengths
        assert json.loads((folder / "manifest.json").read_bytes())["datasets"]["A"][reason] == 1
        ids = [one for row in found[1:] for one in row["input_ids"]]
        assert ids == [1, 2, *range(110, 120)][: len(ids)]
    assert [row["id"] for row in found] == ["A/0", "A/1#1", "A/1#2"]
    assert [row["loss_mask"] for row in found[1:]] == [[0, 0, 1, 1, 1, 1], [1] * 6]


def test_a_cap_is_kept_to_the_token(tmp_path: Path) -> None:
    folder = export(many(tmp_path, [5, 5, 5, 5]), "--cap", "A=12")
    found = rows(folder / "ids/train.jsonl")
    assert [sum(row["loss_mask"]) for row in found] == [5, 5, 2]
    assert json.loads((folder / "manifest.json").read_bytes())["datasets"]["A"] == {
        "cut_at_cap": 1, "faults": 0, "over_cap": 1, "records": 4, "train_rows": 3,
    }  # fmt: skip


def test_a_mix_gives_each_dataset_its_share(output: Path) -> None:
    folder = export(output, "--mix", "A=1", "--mix", "B=2")
    found = rows(folder / "ids/train.jsonl")
    tokens = {name: sum(sum(row["loss_mask"]) for row in found if row["dataset"] == name) for name in "AB"}
    assert tokens == {"A": 1, "B": 2}


def test_the_same_seed_gives_the_same_bytes_whoever_wrote_the_segments(tmp_path: Path) -> None:
    lines = [record_line(n, prompt=[n], answer=[n, n + 1]) for n in range(200)]
    made = []
    for place, segments in (("x", [lines]), ("y", [lines[1::2][::-1], lines[::2]])):
        output = tmp_path / place / "out"
        for number, part in enumerate(segments):
            write_segment(output, f"w-{number}.jsonl", *part)
        write_config(output.parent)
        folder = export(output, "--shuffle", "7", "--eval", "0.2")
        made.append([(folder / name).read_bytes() for name in ("ids/train.jsonl", "ids-eval/eval.jsonl")])
    assert made[0] == made[1]
    train, held_out = (ids_of(folder / name) for name in ("ids/train.jsonl", "ids-eval/eval.jsonl"))
    assert sorted([*train, *held_out]) == sorted(f"A/{n}" for n in range(200))
    assert train != sorted(train, key=lambda one: int(one[2:]))
    assert 20 <= len(held_out) <= 60  # of 200, at a share of a fifth
    again = export(output, "--shuffle", "8", "--eval", "0.2", "--overwrite")
    assert set(ids_of(again / "ids-eval/eval.jsonl")) == set(held_out)  # a row does not change sides
    assert ids_of(again / "ids/train.jsonl") != train


def test_turns_are_joined_where_the_history_is_what_the_model_wrote(tmp_path: Path) -> None:
    first = record_line(64, prompt=[1, 2], answer=[3, 4], turn=0, turns=3)
    second = record_line(65, prompt=[1, 2, 3, 4, 5], answer=[6, 7], turn=1, turns=3, parent=64, flags=["truncated"])
    other = record_line(66, prompt=[1, 2, 9, 5, 8], answer=[7], turn=2, turns=3, parent=65)
    write_segment(tmp_path / "out", "a-0.jsonl", other, second, first)
    write_config(tmp_path)
    found = rows(export(tmp_path / "out", "--join-turns", "--shuffle", "1") / "ids/train.jsonl")
    assert [(row["input_ids"], row["loss_mask"]) for row in found] == [
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1, 1]),
        ([1, 2, 9, 5, 8, 7], [0, 0, 0, 0, 0, 1]),
    ]


def test_a_dry_run_counts_and_writes_nothing(output: Path) -> None:
    before = sorted(output.parent.rglob("*"))
    done = run(output, "--dry-run", "--max-length", "3")
    assert done.exit_code == 0, done.exception
    assert "A: 2 records; too_long_dropped 1, train_rows 1" in done.stderr
    assert "train: 1 row, 3 tokens, 2 to learn, longest row 3 tokens" in done.stderr
    assert sorted(output.parent.rglob("*")) == before


def test_records_of_a_dataset_that_left_the_configuration_are_told_of(output: Path) -> None:
    write_segment(output, "a-0.jsonl", record_line(0, dataset="C"), dataset="C")
    done = run(output, "--dry-run")
    assert done.stderr.endswith(
        f"warning: {output} has records of C, not in the configuration and so left out; name the datasets to export to "
        "have them, too\n"
    )
    done = run(output, "A", "C", "--dry-run")
    assert "C: 1 record; train_rows 1" in done.stderr
    assert "warning" not in done.stderr


def test_what_is_refused(output: Path) -> None:
    mine = output.parent / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for arguments, said in (
        (["-o", str(mine)], "is not empty"),
        (["-o", str(mine), "--overwrite"], "is no earlier export"),
        (["-o", str(output / "A" / "x")], "the run's own files"),
        (["-o", str(output.parent)], "the run's own files"),
        (["-o", str(mine / "notes.txt")], "is a file"),
        ([], "name it with -o DIR"),
        (["-o", "x", "--cap", "C=5"], "'C', which is not exported"),
        (["-o", "x", "--mix", "C=5"], "'C', which is not exported"),
    ):
        done = run(output, *arguments)
        assert isinstance(done.exception, UsageError), arguments
        assert said in str(done.exception)
    assert (mine / "notes.txt").read_text() == "mine"


def test_an_empty_choice_is_an_error_and_makes_no_folder(output: Path) -> None:
    done = run(output, "-o", str(output.parent / "train"), "--min-tokens", "99")
    assert isinstance(done.exception, DataError)
    assert "too_few_tokens 3" in str(done.exception)
    for path in output.glob("*/*.jsonl"):
        path.unlink()
    done = run(output, "-o", str(output.parent / "train"))
    assert isinstance(done.exception, UsageError)
    assert "no records of A, B yet" in str(done.exception)
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "tokenmill.toml"]


def test_records_of_two_tokenizers_are_refused(output: Path) -> None:
    earlier = [{"tokenizer_sha256": "1"}]
    (output / "run.json").write_text(json.dumps({"tokenizer_sha256": "2", "earlier": earlier}))
    done = run(output, "-o", str(output.parent / "train"))
    assert isinstance(done.exception, UsageError)
    assert "2 tokenizers" in str(done.exception)


def test_an_export_that_fails_leaves_the_earlier_one_and_no_half_file(output: Path) -> None:
    folder = export(output)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_segment(output, "c-0.jsonl", record_line(5).replace(b'"sample_id":', b'"sample":'))
    done = run(output, "-o", str(folder), "--overwrite")
    assert isinstance(done.exception, DataError)
    assert "c-0.jsonl cannot be read" in str(done.exception)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "tokenmill.toml", "train"]


def test_verify_finds_what_was_changed(output: Path) -> None:
    folder = export(output)
    assert CliRunner().invoke(cli, ["verify", str(folder)]).stdout == f"{folder}: 2 files, 3 rows, as written\n"
    path = folder / "ids/train.jsonl"
    path.write_bytes(path.read_bytes().replace(b"[1,2,3,4,5]", b"[1,2,3,4,6]"))
    (folder / "ids/more.jsonl").write_text("")
    (folder / "token_counts.json").unlink()
    done = CliRunner().invoke(cli, ["verify", str(folder)])
    assert isinstance(done.exception, DataError)
    assert [line.partition(folder.name)[2][:40] for line in done.stderr.splitlines()] == [
        "/ids/train.jsonl was changed: its sha256 is another; export again"[:40],
        "/token_counts.json is missing; export again"[:40],
        "/ids/more.jsonl is not of this export; trainers"[:40],
    ]


def test_token_counts_are_those_of_the_mask(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    answers = [rng.integers(0, 50, 30).tolist() for _ in range(20)]
    write_segment(tmp_path / "out", "a-0.jsonl", *(record_line(n, answer=one) for n, one in enumerate(answers)))
    write_config(tmp_path)
    counts = json.loads((export(tmp_path / "out") / "token_counts.json").read_bytes())
    ids, wanted = np.unique(np.concatenate(answers), return_counts=True)
    assert counts == {str(one): int(n) for one, n in zip(ids, wanted, strict=True)}
