"""The text formats: what each file holds, what is left out and counted, what is refused; and pushing."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from common.chat_template import Tokenizer
from common.errors import DataError, UnavailableError, UsageError
from common.sections import TokenizerSettings
from producer.cli.export import FORMATS
from producer.cli.main import cli
from producer.export.choose import Wanted
from producer.export.conversations import REASONS
from producer.export.export import Exported, Shape
from producer.export.push import Target
from producer.export.rows import CUT, SPLIT
from producer.export.told import sentences
from tests.conftest import REPO
from tests.lines import record_line, write_config, write_segment

EXAMPLE = REPO / "examples" / "tokenizer"
USER = {"role": "user", "content": "How is it in Oslo?"}
SYSTEM = {"role": "system", "content": "Be exact."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"Oslo"}'}}
CALLS = '<tool_call>{"id": "c1", "name": "look", "arguments": {"at":"Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=EXAMPLE))


@pytest.fixture
def output(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A plain answer, one with a system prompt, one with tools, a cut one, ready ids and random ids."""
    write_config(tmp_path)
    (tmp_path / "tokenizer").symlink_to(EXAMPLE)
    (tmp_path / "out").mkdir()
    facts = {
        **tokenizer.fingerprint(),
        "model_path": "a-model",
        "sampling_params": {"max_new_tokens": 64, "temperature": 0.5, "ignore_eos": False},
    }
    (tmp_path / "out" / "run.json").write_text(json.dumps(facts))
    prompt, with_system, with_tools = tokenizer.encode(
        [tokenizer.render(*one) for one in (([USER], None), ([SYSTEM, USER], None), ([USER], TOOLS))]
    )
    plain, calls = tokenizer.encode([f"Hm.</think>{said}<|im_end|>" for said in ("It rains.", f"I look.{CALLS}")])
    records: list[tuple[list[int], list[int], dict[str, Any]]] = [
        (prompt, plain, {"meta": {"id": "row"}}),
        (with_system, plain, {}),
        (with_tools, calls, {}),
        (prompt, plain[:-1], {"finish_reason": "length"}),
        ([5, 6, 7], plain, {}),
        (prompt, [*range(300, 320), plain[-1]], {}),
    ]
    lines = [record_line(n, prompt=one, answer=said, **more) for n, (one, said, more) in enumerate(records)]
    write_segment(tmp_path / "out", "a-0.jsonl", *lines)
    return tmp_path / "out"


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", "-c", str(output.parent / "tokenmill.toml"), *arguments])


def export(output: Path, layout: str, *arguments: str) -> Path:
    folder = output.parent / layout
    done = run(output, "--format", layout, "-o", str(folder), *arguments)
    assert done.exception is None, done.exception
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def ids_of(output: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each record."""
    return [(one["input_ids"], one["output_ids"]) for one in lines(output / "A" / "a-0.jsonl")]


def counts(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "manifest.json").read_bytes())["datasets"]["A"]
    return found


LEFT_OUT = {"answer_not_ended": 1, "prompt_not_read": 1, "damaged_answer": 1}
SAID = {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."}
CALLED = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}


def test_messages_are_the_whole_conversations(output: Path) -> None:
    folder = export(output, "messages")
    found = lines(folder / "messages/train.jsonl")
    assert [row["messages"] for row in found] == [[USER, SAID], [SYSTEM, USER, SAID], [USER, CALLED]]
    assert [json.loads(row["tools"]) for row in found] == [[], [], TOOLS]
    tokens = [len(one) for one in ids_of(output)[0]]
    assert {key: value for key, value in found[0].items() if key not in {"messages", "tools"}} == {
        "conversation_id": "A/0", "dataset": "A", "index": 0, "row_id": "row", "finish_reason": "stop", "flags": "",
        "prompt_tokens": tokens[0], "completion_tokens": tokens[1], "part": 1, "parts": 1,
        "survival": "whole",
    }  # fmt: skip
    assert counts(folder) == {"faults": 0, "records": 6, "train_rows": 3, **LEFT_OUT}
    assert [path.name for path in (folder / "messages").iterdir()] == ["train.jsonl"]
    done = CliRunner().invoke(cli, ["verify", str(folder)])
    assert done.stdout == f"{folder}: 2 files, 3 rows, as written\n"


def test_sharegpt_has_one_question_and_what_the_model_wrote(output: Path) -> None:
    folder = export(output, "sharegpt")
    assert json.loads((folder / "sharegpt/train.json").read_bytes()) == [
        {
            "id": "A/0",
            "conversations": [
                {"from": "human", "value": "How is it in Oslo?"},
                {"from": "gpt", "value": "<think>Hm.</think>It rains."},
            ],
        }
    ]
    left_out = {"not_a_single_turn": 1, "has_tools": 1, **LEFT_OUT}
    assert counts(folder) == {"faults": 0, "records": 6, "train_rows": 1, **left_out}


def test_a_batch_has_a_request_and_an_answer_for_each_row(output: Path) -> None:
    folder = export(output, "openai-batch")
    asked, answered = (lines(folder / f"openai-batch/train.{part}.jsonl") for part in ("input", "output"))
    assert [one["custom_id"] for one in asked] == [one["custom_id"] for one in answered] == ["A/0", "A/1", "A/2"]
    assert asked[2] == {
        "custom_id": "A/2", "method": "POST", "url": "/v1/chat/completions",
        "body": {
            "model": "a-model", "temperature": 0.5, "max_completion_tokens": 64, "messages": [USER], "tools": TOOLS,
        },
    }  # fmt: skip
    body = answered[2]["response"]["body"]
    assert body["choices"] == [{"index": 0, "message": CALLED, "logprobs": None, "finish_reason": "tool_calls"}]
    assert [one["response"]["body"]["choices"][0]["finish_reason"] for one in answered[:2]] == ["stop", "stop"]


def test_a_request_has_the_sampling_of_its_own_dataset(output: Path) -> None:
    """And the manifest, and a dataset's card, tell of each; A has what is set for all."""
    write_config(output.parent, datasets=("A", "B", "C"))
    line = (output / "A" / "a-0.jsonl").read_bytes().splitlines(keepends=True)[0]
    for name in "BC":
        write_segment(output, "a-0.jsonl", line.replace(b'"A', b'"' + name.encode()), dataset=name)
    facts = json.loads((output / "run.json").read_bytes())
    everyone = {"chat_template_kwargs": {}, "sampling_params": facts["sampling_params"]}
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 512, "logit_bias": {"7": -5.0}}
    asked = {
        "A": everyone,
        "B": {"chat_template_kwargs": {"mine": False}, "sampling_params": own},
        "gone": everyone,
    }
    (output / "run.json").write_text(json.dumps({**facts, "chat_template_kwargs": {}, "datasets": asked}))
    folder = export(output, "openai-batch")
    bodies = {one["custom_id"]: one["body"] for one in lines(folder / "openai-batch/train.input.jsonl")}
    sent = {name: {k: v for k, v in bodies[f"{name}/0"].items() if k not in {"messages", "tools"}} for name in "ABC"}
    plain = {"model": "a-model", "temperature": 0.5, "max_completion_tokens": 64}
    assert sent == {
        "A": plain,
        "B": {
            "model": "a-model", "temperature": 0.6, "top_p": 0.9, "max_completion_tokens": 512,
            "logit_bias": {"7": -5.0},
        },
        "C": plain,
    }  # fmt: skip
    made_with = json.loads((folder / "manifest.json").read_bytes())["made_with"]
    assert made_with["datasets"] == {"A": everyone, "B": asked["B"], "C": everyone}
    assert "sampling_params" not in made_with
    card = (export(output, "parquet") / "README.md").read_text()
    assert "- B: chat_template_kwargs `{'mine': False}`, sampling_params `{'temperature': 0.6, 'top_p': 0.9" in card


def test_what_is_counted_of_texts_is_said(output: Path) -> None:
    done = run(output, "--format", "messages", "--dry-run")
    rows = [len(prompt) + len(answer) for prompt, answer in ids_of(output)[:3]]
    written = sum(len(answer) for _, answer in ids_of(output)[:3])
    assert done.stderr.splitlines()[-1] == (
        f"train: 3 rows, {sum(rows)} tokens, {written} written by the model, longest row {max(rows)} tokens, all as "
        "recorded"
    )
    made = Exported(Path(), {}, {"A": Counter(records=3, reasoning_dropped=2), "B": Counter(reasoning_dropped=1)})
    shape = Shape(whole=True, check=lambda _: ("", "reasoning_dropped"))
    assert [*sentences(made, Wanted(), shape)][-1] == (
        "the reasoning of 3 rows is counted here, and the chat template leaves it out: a trainer that renders the "
        "messages does not learn it"
    )


def test_an_empty_split_is_valid_json(output: Path) -> None:
    folder = export(output, "sharegpt", "--eval", "0.999", "--shuffle", "1")
    assert json.loads((folder / "sharegpt/train.json").read_bytes()) == []
    assert len(json.loads((folder / "sharegpt-eval/eval.json").read_bytes())) == 1


def test_a_dry_run_counts_what_would_be_left_out(output: Path) -> None:
    done = run(output, "--format", "messages", "--dry-run")
    assert done.exception is None
    told = done.stderr.splitlines()
    assert told[0].startswith("A: 6 records; ")
    assert {f"{reason} 1" for reason in LEFT_OUT} < set(told[0].partition("; ")[2].split(", "))
    assert told[1].startswith("train: 3 rows")


def test_a_cap_takes_whole_rows_and_none_for_those_left_out(output: Path) -> None:
    tokens = [row["completion_tokens"] for row in lines(export(output, "messages") / "messages/train.jsonl")]
    folder = export(output, "messages", "--cap", str(tokens[0] + tokens[1]), "--overwrite")
    assert [row["conversation_id"] for row in lines(folder / "messages/train.jsonl")] == ["A/0", "A/1"]
    assert counts(folder)["over_cap"] == 4
    folder = export(output, "messages", "--cap", str(tokens[0] + 1), "--shuffle", "3", "--overwrite")
    assert len(lines(folder / "messages/train.jsonl")) == 1


@pytest.mark.parametrize("options", [["--join-turns"], ["--too-long", "cut"], ["--too-long", "split"]])
def test_rows_that_are_no_whole_answers_are_refused(output: Path, options: Sequence[str]) -> None:
    done = run(output, "--format", "messages", "-o", str(output.parent / "x"), "--max-length", "9", *options)
    assert isinstance(done.exception, UsageError)
    assert options[0] in str(done.exception)


@pytest.mark.parametrize("key", ["tokenizer_sha256", "template_sha256"])
def test_another_tokenizer_is_refused(output: Path, key: str) -> None:
    facts = json.loads((output / "run.json").read_bytes())
    (output / "run.json").write_text(json.dumps({**facts, key: "0" * 64}))
    done = run(output, "--format", "messages", "-o", str(output.parent / "x"))
    assert isinstance(done.exception, UsageError)
    assert key in str(done.exception)
    assert not (output.parent / "x").exists()


def test_the_documentation_names_every_reason() -> None:
    text = (REPO / "docs" / "export.md").read_text(encoding="utf-8")
    of_texts = ("not_a_single_turn", "has_tools", "empty_text", "reasoning_dropped")
    for reason in (*REASONS, *of_texts, "not_in_mix", "joined", "not_joinable", "turn_before_left_out", CUT, SPLIT):
        assert f"`{reason}`" in text, reason
    assert all(f"`{layout}`" in text for layout in FORMATS)


def test_random_ids_are_no_text(output: Path) -> None:
    write_segment(output, "a-0.jsonl", record_line(0, prompt=[5, 6], answer=[7, 8]))
    done = run(output, "--format", "messages", "-o", str(output.parent / "x"))
    assert isinstance(done.exception, DataError)
    assert "answer_not_ended 1" in str(done.exception)


def test_an_export_is_pushed_and_replaced_whole(output: Path) -> None:
    bucket = output.parent / "bucket"
    url = f"file://{bucket}/a/b"
    folder = export(output, "messages", "--push", url)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    pushed = {str(path.relative_to(bucket / "a/b")): path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
    assert pushed == {name: (folder / name).read_bytes() for name in names}
    done = run(output, "--format", "sharegpt", "-o", str(output.parent / "x"), "--push", url)
    assert isinstance(done.exception, UsageError)
    assert "has an export already" in str(done.exception)
    assert not (output.parent / "x").exists()
    (bucket / "a/b/mine.txt").write_text("mine")
    folder = export(output, "sharegpt", "--push", url, "--overwrite")
    assert {str(path.relative_to(bucket / "a/b")) for path in bucket.rglob("*") if path.is_file()} == {
        "mine.txt", "manifest.json", "token_counts.json", "sharegpt/train.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("nowhere://x/y", UsageError, "use hf://datasets/OWNER/NAME"),
        ("hf://a-model", UsageError, "hf://datasets/OWNER/NAME"),
        ("ftp://me:secret@host/x", UsageError, "in the environment instead"),
        ("hf://datasets/nobody", UsageError, "hf://datasets/OWNER/NAME"),
    ],
)
def test_a_place_that_cannot_be_pushed_to_is_told(url: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Target(url, overwrite=False)


def test_a_package_that_is_missing_is_named() -> None:
    for url in ("s3://bucket/x", "gs://bucket/x"):
        package = {"s3": "s3fs", "gs": "gcsfs"}[url[:2]]
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(UnavailableError, match=r"pip install '.\[remote\]'"):
                Target(url, overwrite=False)
