"""`audit` and `reconstruct` as commands: every way in and out, and real files where they are there."""

import gzip
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.audit.audit import audit
from tests.acceptance.commands import TOKENMILL, environment, tokenmill
from tests.conftest import PATIENCE_SECONDS, REPO, SHARED
from tests.unit.audit_steps import alarms, clean, flat, message, tokenizer, write

PROMPTS = SHARED / "data" / "prompts"
needs_files = pytest.mark.skipif(not PROMPTS.is_dir(), reason="real prompts lie beside the project, and are not there")
TOKENIZER = ("--tokenizer", str(REPO / "examples" / "tokenizer"))
# file: rows, answers, those without reasoning, alarms.
REAL: list[tuple[str, int, int, int, dict[str, str]]] = [
    ("broken/blns.json", 515, 0, 0, {"not_json": "wrong"}),
    ("broken/made_malformed.jsonl", 25, 0, 0, {"not_json": "wrong"}),
    ("eagle_family/eagle_mt_bench_question.jsonl", 80, 0, 0, {}),
    (
        "eagle_family/torchspec_sample_conversations.jsonl",
        200,
        200,
        200,
        {"same_answers": "wrong", "duplicates": "warning"},
    ),
    ("eagle_family/torchspec_sample_kimi_k25_conversations.jsonl", 8, 8, 0, {"duplicates": "warning"}),
    ("glaive/dataflow_glaive_raw.jsonl", 5, 5, 5, {}),
    ("gsm8k/gsm8k_test.jsonl", 250, 250, 250, {}),
    ("humaneval/HumanEval.jsonl.gz", 164, 0, 0, {}),
    ("odd_shapes/xtuner_openai_sft.jsonl", 128, 128, 128, {}),
    ("openai_tools/bfcl_v4_live_multiple.json", 60, 0, 0, {}),
    ("openai_tools/llamafactory_reason_tool_use_50.jsonl", 50, 50, 0, {}),
    ("reasoning/curator_reasoning_dataset.parquet", 5, 5, 0, {}),
    ("reshaped/mixture_of_thoughts_shape.jsonl", 50, 50, 0, {}),
    ("reshaped/openorca_shape.jsonl", 80, 80, 80, {}),
    ("reshaped/openthoughts114k_shape.jsonl", 50, 50, 0, {}),
    ("reshaped/openthoughts3_shape.jsonl", 50, 50, 0, {}),
    ("sharegpt/axolotl_conversation.missingturns.json", 1, 1, 1, {"empty_turn": "wrong"}),
    ("sharegpt/fastchat_dummy_conversation.json", 200, 200, 200, {"same_answers": "wrong"}),
    ("swe_agent/swesmith_ft_xml_example.jsonl", 3, 3, 3, {}),
    ("ultrachat/ultra_eval.json", 200, 0, 0, {}),
]


@needs_files
@pytest.mark.parametrize(("file", "rows", "answers", "plain", "wanted"), REAL, ids=[file for file, *_ in REAL])
def test_a_real_file(file: str, rows: int, answers: int, plain: int, wanted: dict[str, str]) -> None:
    found = audit(PROMPTS / file)
    assert (found.facts["rows"], found.facts["answers"], found.facts["answers_without_reasoning"]) == (
        rows,
        answers,
        plain,
    )
    assert alarms(found) == wanted


@needs_files
def test_every_real_file_is_looked_through() -> None:
    """Whatever is in a file, it is told in sentences."""
    for path in sorted(PROMPTS.glob("*/*")):
        found = audit(path)
        assert found.verdict
        assert sum(found.facts["layouts"].values()) + found.facts["broken_rows"] == found.facts["rows"], path


def lost(folder: Path) -> Path:
    rows = clean(60, tokenizer())
    for row in rows:
        message(row)["reasoning_content"] = None
    return write(folder / "lost.jsonl", rows)


def test_a_fault_is_said_first_and_leaves_with_3(tmp_path: Path) -> None:
    lost(tmp_path)
    done = tokenmill("audit", "lost.jsonl", *TOKENIZER, "-o", "report.html", folder=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "report.html")
    lines = done.stdout.splitlines()
    assert lines[0] == "lost.jsonl: 60 rows, 0.0 MB, layout openai"
    assert lines[1].startswith("  100 % of the answers have no reasoning while usage claims ")
    assert "What to do:" in done.stdout
    assert max(map(len, lines)) <= 120
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "reasoning_lost" in page
    assert "http" not in page.replace("http://gpu", "")


def test_a_clean_file_leaves_with_0_and_says_what_was_not_checked(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", clean(60))
    done = tokenmill("audit", "a.jsonl", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nothing looks wrong." in done.stdout
    assert "tokens in the text were not checked, for want of a tokenizer (--tokenizer DIR)" in done.stdout


def test_json_for_programs(tmp_path: Path) -> None:
    lost(tmp_path)
    write(tmp_path / "good.jsonl", clean(60))
    done = tokenmill("audit", "good.jsonl", "lost.jsonl", "--json", *TOKENIZER, folder=tmp_path)
    assert done.returncode == 3
    good, bad = json.loads(done.stdout)["sources"]
    assert (good["source"], bad["source"]) == ("good.jsonl", "lost.jsonl")
    (finding,) = bad["findings"]
    assert (finding["level"], finding["name"]) == ("wrong", "reasoning_lost")
    assert bad["facts"]["tokens_in_text"]["rows_compared"] == 60
    assert set(bad["lengths"]["answer, tokens claimed"]) == {"mean", "p5", "p25", "p50", "p75", "p95", "p99", "max"}


def test_standard_input_folders_and_other_containers(tmp_path: Path) -> None:
    rows = flat(clean(40))
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    piped = subprocess.run(
        [*TOKENMILL, "audit", "-", "--json"],
        input=gzip.compress(text),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        check=True,
    )
    sources: list[dict[str, Any]] = json.loads(piped.stdout)["sources"]
    assert [(one["source"], one["facts"]["rows"]) for one in sources] == [("-", 40)]
    folder = tmp_path / "export"
    (folder / "ids").mkdir(parents=True)
    (folder / "parquet").mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "token_counts.json").write_text("{}")
    (folder / "ids" / "train.jsonl").write_bytes(text)
    pq.write_table(pa.Table.from_pylist(rows), folder / "parquet" / "train-0.parquet")
    done = tokenmill("audit", "export", "--json", folder=tmp_path)
    found = json.loads(done.stdout)["sources"]
    assert [(one["source"], one["facts"]["rows"]) for one in found] == [("export/ids", 40), ("export/parquet", 40)]


def test_a_pipe_is_read_as_standard_input_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "".join(json.dumps(row) + "\n" for row in flat(clean(40))).encode()
    writer = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)  # waits for who reads
    writer.start()
    done = tokenmill("audit", "pipe", "--json", folder=tmp_path)
    writer.join(PATIENCE_SECONDS)
    assert [(one["source"], one["facts"]["rows"]) for one in json.loads(done.stdout)["sources"]] == [("pipe", 40)]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["audit"], 2, "Missing argument 'FILE...'"),
        (["audit", "none.jsonl"], 4, "none.jsonl: No such file or directory"),
        (["audit", "a.jsonl", "--tokenizer", "nowhere"], 4, "[tokenizer] path nowhere is not a folder"),
        (["audit", "a.jsonl", "-c", "none.toml"], 2, "none.toml does not exist"),
        (
            ["reconstruct", "a.jsonl", "-o", "b.jsonl"],
            2,
            "no tokenizer; name the model's own folder with --tokenizer DIR",
        ),
        (["reconstruct", "none.jsonl", "-o", "b.jsonl", *TOKENIZER], 4, "none.jsonl: No such file or directory"),
        (["audit", "/dev/zero"], 3, "/dev/zero is a pipe or a device, and no file"),
        (["reconstruct", "a.jsonl", "-o", "./a.jsonl", *TOKENIZER], 2, "a.jsonl is one of the files to be read"),
        (["reconstruct", "-", "-o", "b.jsonl", *TOKENIZER], 2, "takes no standard input"),
        (["reconstruct", "a.jsonl", "-o", "b.jsonl", *TOKENIZER, "--chat-template-kwargs", "x"], 2, "no JSON object"),
    ],
    ids=lambda one: " ".join(one)[:40] if isinstance(one, list) else str(one),
)
def test_mistakes_are_told_in_a_sentence(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    write(tmp_path / "a.jsonl", clean(3))
    done = tokenmill(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "b.jsonl").exists()


def test_a_configuration_of_the_folder_that_does_not_fit_is_told_of(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", clean(60))
    (tmp_path / "tokenmill.toml").write_text('[tokenizer]\npath = "nowhere"\n')
    done = tokenmill("audit", "a.jsonl", folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ")
    assert "tokens in the text are not checked" in done.stderr


def test_reconstruct_says_what_became_of_each_row(tmp_path: Path) -> None:
    of = tokenizer()
    rows = clean(20, of)
    for row in rows:  # those of the example prompts' template
        (ids,) = of.encode([of.render(row["messages"], None)])
        row["response"]["usage"]["prompt_tokens"] = len(ids)
    message(rows[3])["reasoning_content"] = ""
    write(tmp_path / "a.jsonl", rows)
    done = tokenmill("reconstruct", "a.jsonl", "-o", "ids.jsonl", *TOKENIZER, folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("ids.jsonl: 19 of 20 rows (95 %) reconstructed, ")
    assert "tokens equal, whitespace template, end stated" in done.stdout
    assert "no_reasoning: the prompt opens a think block, and the row has no reasoning" in done.stdout
    assert len((tmp_path / "ids.jsonl").read_text().splitlines()) == 19
    told = tokenmill("reconstruct", "a.jsonl", "-o", "ids.jsonl", "--json", *TOKENIZER, folder=tmp_path)
    assert json.loads(told.stdout)["refused"] == {"no_reasoning": 1}
    again = tokenmill("audit", "ids.jsonl", *TOKENIZER, folder=tmp_path)
    assert again.returncode == 0
