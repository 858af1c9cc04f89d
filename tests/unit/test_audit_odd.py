"""An audit of what is no data at all: every row is counted or told, and none brings it down."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from producer.audit.audit import audit
from producer.audit.gather import Gathered
from producer.audit.part import Part
from producer.audit.reconstruct import REASONS, Allowed, Refused, reconstruct
from producer.audit.sample import Candidates
from producer.audit.show import lines, page
from producer.audit.tokens import measure
from producer.datasets.cursor import BadLine
from tests.unit.audit_steps import alarms, clean, looked, tokenizer, write

KEYS = [
    "messages", "conversations", "role", "content", "from", "value", "choices", "message", "usage", "text", "prompt",
    "completion_tokens", "prompt_tokens", "completion_tokens_details", "reasoning_tokens", "finish_reason", "reasoning",
    "reasoning_content", "tool_calls", "function", "name", "arguments", "input_ids", "output_ids", "loss_mask",
    "response", "body", "status_code", "custom_id", "error", "object", "output", "type", "meta_info", "latency", "id",
    "tools", "system", "question", "answer", "turns", "void", "index", "reason", "detail",
    "summary", "labels", "instruction",
]  # fmt: skip
VALUES = ["user", "assistant", "system", "tool", "human", "gpt", "response", "chat.completion", "length", "stop", "7"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-300, 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([*VALUES, "<think>", "a</think>b", "[1, 2]", "<|im_end|>", "\ufffd", "{}"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=30,
)
OF = tokenizer()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8) | JSON, min_size=1, max_size=6))
def test_any_json_is_counted_or_told(values: list[Any]) -> None:
    gathered, part = Gathered("rows", 10), Part(Candidates(10))
    for value in values:
        part.take(value, 10)
    gathered.add(part)
    notes = gathered.notes["void"] + gathered.notes["reject"]
    assert gathered.rows == len(values)
    assert gathered.layouts.total() + gathered.broken.rows.total() + notes == len(values)
    assert len(gathered.tokens) == len(gathered.sizes) == len(gathered.of_replies.first()) == len(values)
    measure(gathered.sample.rows(), OF)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8))
def test_any_json_is_reconstructed_or_refused_by_name(value: dict[str, Any]) -> None:
    try:
        reconstruct(value, 0, "A", OF, Allowed(uncounted=True, guessed_whitespace=True))
        reason = ""
    except Refused as refused:
        reason = refused.reason
    assert reason in {"", *REASONS}


def test_bad_lines_of_containers(tmp_path: Path) -> None:
    part = Part(Candidates())
    part.take(BadLine("line_too_long", "the row has more than 5 bytes"), 5)
    assert dict(part.broken.rows) == {"line_too_long": 1}


def test_an_empty_file(tmp_path: Path) -> None:
    found = looked(tmp_path, [])
    assert alarms(found) == {"no_rows": "wrong"}
    assert list(lines(found))
    assert "no_rows" in page([found])


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(write(tmp_path / "rows.jsonl", clean(400)).read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    found = audit(path)
    assert alarms(found)["cut_off"] == "wrong"
    assert 100 < found.facts["rows"] < 300


def test_a_file_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        audit(path)
    with pytest.raises(FileNotFoundError):
        audit(tmp_path / "none")


def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    assert "<script>" not in page([audit(write(tmp_path / "b.jsonl", [{"<script>": 1}]))])


def test_short_answers_that_are_alike_were_not_cut(tmp_path: Path) -> None:
    """Below 64 characters answers are not compared, so that nobody knows whether two are alike."""
    rows = [{"question": f"q{n}", "answer": "a" * 40} for n in range(100)]
    assert alarms(looked(tmp_path, rows)) == {}


def test_ids_that_are_alike_were_not_cut(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [*range(500, 505 + n % 7), *[900] * 99], "loss_mask": [0] * (5 + n % 7) + [1] * 99}
        for n in range(60)
    ]
    rows += [{"input_ids": [*range(500, 600 + n)], "loss_mask": [0] * 5 + [1] * (95 + n)} for n in range(30)]
    assert "one_length" not in alarms(looked(tmp_path, rows, OF))


def test_what_stands_in_a_column_may_be_anything(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{n}", "answer": "a", "finish_reason": f"{n:02}" * 90, "completion_tokens": 10**30}
        for n in range(90)
    ]
    found = looked(tmp_path, rows)
    assert len(found.facts["finish_reasons"]) == 51
    assert found.facts["finish_reasons"]["others"] == 40
    assert max(map(len, found.facts["finish_reasons"])) == 40
    assert found.facts["claimed_completion_tokens"] is None


def test_a_conversation_of_very_many_turns(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": "x"}] * 200 + [{"from": "gpt", "value": "y"}]}]
    assert "user_twice" in alarms(looked(tmp_path, rows))
