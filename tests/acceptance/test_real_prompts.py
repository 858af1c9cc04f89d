"""The whole job on real prompts with the Kimi-K2.5 tokenizer: every id as transformers gives it, every row once."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.records import Record
from common.rejects import read_rejects
from common.segments import records
from tests.acceptance.commands import tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import SHARED

TOKENIZER = SHARED / "data" / "tokenizers" / "kimi_k25_fast"
PROMPTS = SHARED / "data" / "prompts"
GSM8K = PROMPTS / "gsm8k" / "gsm8k_test.jsonl"
TORCHSPEC = PROMPTS / "eagle_family" / "torchspec_sample_conversations.jsonl"
VOCAB_SIZE, THINK, END_THINK, END = 163840, 163606, 163607, 163586
# Ordinary ids end where the control tokens begin.
KIMI = ("--vocab-size", str(VOCAB_SIZE), "--last-id", "163583", "--end-token-id", str(END))
PACE = ("--think-end-token-id", str(END_THINK), "--speed", "200", "--mean-tokens", "120")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TOKENIZER.is_dir(), reason="real prompts and the Kimi tokenizer lie beside the project"),
]


@dataclass(frozen=True)
class Run:
    """A run of both datasets that has ended well."""

    folder: Path
    stderr: str

    def records(self, dataset: str) -> dict[int, Record]:
        kept = list(records(self.folder / "out", dataset))
        by_index = {record.index: record for record in kept}
        assert len(by_index) == len(kept)
        return by_index


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, simulate: Simulate) -> Run:
    folder = tmp_path_factory.mktemp("real")
    # Two rows in the middle that are none: each must be a reject, and cost no other row its place.
    rows = TORCHSPEC.read_bytes().splitlines(keepends=True)
    (folder / "torchspec.jsonl").write_bytes(
        b"".join([*rows[:50], b"{cut off\n", *rows[50:100], b'{"conversations": []}\n', *rows[100:]])
    )
    (folder / "tokenmill.toml").write_text(
        f'output = "out"\n[server]\nurls = ["{simulate(*KIMI, *PACE)}"]\n[tokenizer]\npath = "{TOKENIZER}"\n'
        '[gates]\naction = "none"\n'
        "[sampling]\nmax_new_tokens = 600\n"
        f'[[datasets]]\nname = "gsm8k"\npath = "{GSM8K}"\ncolumns.prompt = "question"\n'
        '[[datasets]]\nname = "torchspec"\npath = "torchspec.jsonl"\n'
    )
    done = tokenmill("run", folder=folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return Run(folder, done.stderr)


@pytest.fixture(scope="module")
def library() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


def own_ids(library: Any, messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = library.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return ids


def read(path: Path) -> list[dict[str, Any]]:
    """The rows, an empty one for a line that is no JSON."""
    return [json.loads(line) if line.endswith(b"}") else {} for line in path.read_bytes().split(b"\n") if line]


def test_every_question_is_asked_with_the_librarys_own_ids(run: Run, library: Any) -> None:
    rows = read(GSM8K)
    kept = run.records("gsm8k")
    assert set(kept) == set(range(len(rows))) == set(range(250))
    for index, row in enumerate(rows):
        assert kept[index].input_ids == own_ids(library, [{"role": "user", "content": row["question"]}])
    assert not (run.folder / "out" / "gsm8k" / "rejects.jsonl").exists()


def test_every_conversation_is_asked_up_to_its_last_question(run: Run, library: Any) -> None:
    rows = read(run.folder / "torchspec.jsonl")
    kept = run.records("torchspec")
    rejects = read_rejects(run.folder / "out", "torchspec").rows
    assert {index: row.reason for index, row in rejects.items()} == {50: "not_json", 101: "bad_messages"}
    assert set(kept) == set(range(len(rows))) - {50, 101} == set(range(202)) - {50, 101}
    for index, record in kept.items():
        turns = rows[index]["conversations"]
        while turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        assert record.input_ids == own_ids(library, turns)
        assert record.meta["id"] == rows[index]["id"]


@pytest.mark.parametrize("dataset", ["gsm8k", "torchspec"])
def test_every_record_is_a_prompt_to_think_and_a_whole_answer(run: Run, dataset: str) -> None:
    for record in run.records(dataset).values():
        assert record.input_ids[-1] == THINK
        assert (record.prompt_tokens, record.completion_tokens) == (len(record.input_ids), len(record.output_ids))
        assert all(0 <= one < VOCAB_SIZE for one in record.output_ids)
        if record.finish_reason == "stop":
            assert record.output_ids[-1] == END
            assert record.output_ids.count(END_THINK) == 1
        else:
            assert (record.finish_reason, record.flags[0]) == ("length", "truncated")
            assert len(record.output_ids) == 600


def test_verify_finds_nothing_wrong(run: Run) -> None:
    done = tokenmill("verify", "--json", folder=run.folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ledger_compared"], report["faults"], report["differences"]) == (True, [], [])
    assert [(one["name"], one["samples"], one["rejects"]) for one in report["datasets"]] == [
        ("gsm8k", 250, 0),
        ("torchspec", 200, 2),
    ]


def test_the_run_file_says_what_made_the_data(run: Run) -> None:
    made = json.loads((run.folder / "out" / "run.json").read_bytes())
    assert made["vocab_size"] == VOCAB_SIZE
    assert made["sampling_params"]["max_new_tokens"] == 600
    assert {len(made[key]) for key in ("tokenizer_sha256", "template_sha256")} == {64}
