"""`show` finds one sample, shows it decoded, and says why there is none where there is none."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from common.chat_template import Tokenizer
from common.ledger import Ledger, Settled
from common.records import timestamp
from common.rejects import Reject, append_rejects
from common.sections import DatasetSettings, TokenizerSettings
from producer.cli.main import cli
from producer.monitor.find import Finder
from tests.conftest import REPO
from tests.lines import record_line, void_line, write_segment

TOKENIZER = REPO / "examples" / "tokenizer"
NOW_MS = 1_790_000_000_000  # some day in 2026


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=TOKENIZER))


@pytest.fixture
def config(tmp_path: Path, valkey: str, ledger: Ledger) -> Path:
    """A job with datasets A and other; A has 20 rows read, and is open."""
    path = tmp_path / "tokenmill.toml"
    text = f'output = "out"\nredis = "{valkey}"\n[tokenizer]\npath = "{TOKENIZER}"\n'
    path.write_text(text + "".join(f'[[datasets]]\nname = "{name}"\npath = "x.jsonl"\n' for name in ("A", "other")))
    ledger.register(DatasetSettings(name="A", path=Path("x.jsonl")))
    samples = [(index, b"p") for index in range(1, 20)]
    ledger.feed("A", before="", after='{"index":20}', ended=False, rejected=[(0, "too_long")], samples=samples)
    append_rejects(tmp_path / "out", "A", [Reject(0, "too_long", "9,000 and 10,240 tokens")])
    ledger.admit("A", room=50, window=64, tokens_per_second=1)
    return path


def show(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["show", *arguments, "-c", str(config)])


def refusal(config: Path, *arguments: str) -> str:
    result = show(config, *arguments)
    assert result.stdout == ""
    assert result.exception is not None
    return str(result.exception)


def settle(ledger: Ledger, index: int, attempt: int, flags: tuple[str, ...] = ()) -> None:
    assert ledger.settle("A", [Settled(index, attempt, 3, 2, 0, flags)], rebuild=True) == [True]


def said(tokenizer: Tokenizer, config: Path, ledger: Ledger) -> dict[str, Any]:
    """The record of A/3, with a think block that its prompt has opened, an answer and a call of a tool."""
    prompt = tokenizer.encode([tokenizer.render([{"role": "user", "content": "What is\n1 + 1?"}], None)])[0]
    call = '{"id": "c1", "name": "add", "arguments": {"a": 1}}'
    opened, closed = (token for token in tokenizer.special_ids.tools if "call" in token)
    text = f"Two ones.\x1b[2J</think>It is 2.{opened}{call}{closed}<|im_end|>"
    answer = tokenizer.encode([text])[0]
    line = record_line(3, NOW_MS, prompt=prompt, answer=answer, meta={"id": "r3"}, created_at=timestamp(NOW_MS / 1000))
    write_segment(config.parent / "out", "w1-0.jsonl", line)
    settle(ledger, 3, NOW_MS)
    return {"prompt": prompt, "answer": answer, "marks": (opened, closed), "call": call}


def test_what_is_thought_said_called_and_control_is_told_apart(
    config: Path, ledger: Ledger, tokenizer: Tokenizer
) -> None:
    expected = said(tokenizer, config, ledger)
    opened, closed = expected["marks"]
    result = show(config, "A", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    head, _, rest = result.stdout.partition("\n\n")
    assert head.splitlines()[0] == f"A/3: stop, attempt {NOW_MS}"
    assert 'meta: {"id":"r3"}' in head.splitlines()
    prompt, _, answer = rest.partition("--- made by the model: ")
    assert f"--- prompt: {len(expected['prompt'])} tokens ---\n⟦<|im_start|>⟧" in prompt
    assert "What is\n1 + 1?⟦<|im_end|>⟧" in prompt
    assert r"Two ones.\x1b[2J⟦</think>⟧" in answer
    assert f"tokens ---\nIt is 2.⟦{opened}⟧\n--- tool call: " in answer
    assert f"tokens ---\n{expected['call']}⟦{closed}⟧⟦<|im_end|>⟧\n" in answer
    assert [line.split(":")[0] for line in answer.splitlines() if line.startswith("--- ")] == [
        "--- think",
        "--- answer",
        "--- tool call",
    ]


def test_json_has_the_parts_and_on_request_the_ids(config: Path, ledger: Ledger, tokenizer: Tokenizer) -> None:
    expected = said(tokenizer, config, ledger)
    found = json.loads(show(config, "A", "3", "--json").stdout)
    assert "output_ids" not in found
    kinds = [part["kind"] for part in found["answer"]]
    assert kinds == ["think", "control", "answer", "control", "tool_call", "control", "control"]
    assert found["answer"][0]["text"] == "Two ones.\x1b[2J"
    assert sum(part["tokens"] for part in found["answer"]) == len(expected["answer"])
    assert "".join(part["text"] for part in found["prompt"]) == tokenizer.decode(expected["prompt"])
    assert (found["sample_id"], found["offset"], found["superseded"]) == ("A/3", 0, [])
    with_ids = json.loads(show(config, "A", "3", "--json", "--ids").stdout)
    assert (with_ids["input_ids"], with_ids["output_ids"]) == (expected["prompt"], expected["answer"])
    text = show(config, "A", "3", "--ids").stdout
    assert "--- output_ids ---\n" + " ".join(map(str, expected["answer"])) in text


def test_without_an_index_it_is_the_newest_and_with_a_flag_the_newest_that_has_it(config: Path, ledger: Ledger) -> None:
    lines = [record_line(index, NOW_MS, flags=["truncated"] if index == 5 else []) for index in (4, 5, 6, 7)]
    write_segment(config.parent / "out", "w1-0.jsonl", *lines, void_line(7, NOW_MS))
    for index in (4, 5, 6):
        settle(ledger, index, NOW_MS, ("truncated",) if index == 5 else ())
    assert json.loads(show(config, "A", "--json").stdout)["index"] == 6
    assert json.loads(show(config, "A", "--flag", "truncated", "--json").stdout)["index"] == 5
    drawn = {json.loads(show(config, "A", "--random", "--json").stdout)["index"] for _ in range(8)}
    assert drawn <= {4, 5, 6}
    assert refusal(config, "A", "--flag", "odd") == (
        "no answer of A has the flag 'odd'; its answers have truncated (1)"
    )


# Where there is none


def test_unknown_datasets_name_the_near_ones(config: Path) -> None:
    assert refusal(config, "othr", "3") == "no dataset is named 'othr'; did you mean other?"
    assert refusal(config, "A") == "A has no answer yet"
    assert refusal(config, "A", "3", "--random").startswith("an INDEX names one sample")


def test_why_there_is_no_record(config: Path, ledger: Ledger) -> None:
    (claimed,), _ = ledger.claim("A", "w1@host", 60, [1])
    assert refusal(config, "A", "0").startswith("A/0 was rejected: too_long; ")
    assert refusal(config, "A", "0").endswith("; 9,000 and 10,240 tokens")
    assert refusal(config, "A", "1").startswith("A/1 has no answer yet: it is in flight at w1@host since ")
    assert refusal(config, "A", "2") == "A/2 has no answer yet: it is queued"
    assert refusal(config, "A", "500") == ("A/500 is not there: only the first 20 rows of its source were read so far")
    ledger.release("A", [(1, claimed.attempt)], failed=True)
    assert refusal(config, "A", "1") == "A/1 has no answer yet: it is queued, after 1 lost attempt"


def test_a_record_that_was_taken_back_is_not_shown(config: Path, ledger: Ledger) -> None:
    line = record_line(1, NOW_MS)
    write_segment(config.parent / "out", "w1-0.jsonl", line, void_line(1, NOW_MS))
    (claimed,), _ = ledger.claim("A", "w1@host", 60, [1])
    ledger.release("A", [(1, claimed.attempt)], failed=True)
    assert refusal(config, "A", "1") == (
        "A/1 has no answer yet: it is queued, after 1 lost attempt; what attempt "
        f"{NOW_MS} made of it was superseded, and does not count"
    )
    settle(ledger, 1, NOW_MS + 5)
    write_segment(config.parent / "out", "w2-0.jsonl", record_line(1, NOW_MS + 5, finish_reason="length"))
    found = json.loads(show(config, "A", "1", "--json").stdout)
    assert (found["attempt"], found["finish_reason"]) == (NOW_MS + 5, "length")


def test_where_redis_is_away_the_files_are_looked_at(config: Path, tmp_path: Path) -> None:
    write_segment(tmp_path / "out", "w1-0.jsonl", record_line(1, 5), record_line(2, 5), void_line(2, 5))
    text = config.read_text()
    line = next(one for one in text.splitlines() if one.startswith("redis"))
    config.write_text(text.replace(line, 'redis = "unix:///nowhere/at/all.sock"'))
    result = show(config, "A", "1", "--json")
    assert json.loads(result.stdout)["attempt"] == 5
    assert result.stderr.startswith("the files alone are looked at: Redis at unix:///nowhere")
    assert str(show(config, "A", "2").exception) == (
        "A/2 has no record in the files; what attempt 5 made of it was superseded, and does not count"
    )


def test_little_is_read_to_find_a_record_among_many(tmp_path: Path, ledger: Ledger) -> None:
    ledger.register(DatasetSettings(name="A", path=Path("x.jsonl")))
    answer = [*range(1000, 1800)]
    first = time.time() - 100_000
    lines: dict[int, list[bytes]] = {0: [], 1: []}
    settled = []
    for index in range(4000):  # one every 10 s, each in flight for 200 s; two workers, 8 MB each
        claimed = round((first + 10 * index) * 1000)
        made = timestamp(claimed / 1000 + 200)
        lines[index % 2].append(record_line(index, claimed, answer=answer, created_at=made))
        settled.append(Settled(index, claimed, 3, 800, 0, ()))
    for number, written in lines.items():
        write_segment(tmp_path, f"w{number}-0.jsonl", *written)
    assert all(ledger.settle("A", settled, rebuild=True))
    total = sum(len(line) for written in lines.values() for line in written)
    assert total > 15_000_000
    for index in (0, 1, 1777, 3998, 3999):
        finder = Finder(tmp_path, "A", ledger)
        entry = finder.by_index(index).entry
        assert entry is not None
        assert entry.what.index == index
        assert finder.bytes_read < total / 10
