"""Every layout that an audit reads: what it finds in a row, and rows of ids with each of their faults."""

import json
import random
import re
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.records import Void, Voided, Written, encode_line
from producer.audit import of_answers, of_rows, shape
from producer.audit.audit import audit
from producer.audit.digests import Digests, pairs_of
from producer.audit.lengths import Lengths
from producer.audit.reconstruct import REASONS
from producer.audit.rows import NotData, see
from producer.audit.shape import shape_of
from producer.audit.texts import thoughts_in
from producer.datasets.layouts.catalog import LAYOUTS, Layout, find
from producer.datasets.reasons import REASONS as ROW_REASONS
from producer.datasets.reasons import BadRow
from tests.conftest import REPO
from tests.unit.audit_steps import Row, alarms, clean, looked, notes, tokenizer, words

USER = {"role": "user", "content": "1 + 1 = ?"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
# Layout, roles, (reasoning, content, is there a call), what is claimed, finish_reason.
Expected = tuple[str, list[str], tuple[str, str, bool] | None, int | None, str | None]
ROWS: dict[str, tuple[Any, Expected]] = {
    "chat completion": (
        {
            "object": "chat.completion",
            "choices": [
                {"message": {"role": "assistant", "content": "2", "reasoning": "I add."}, "finish_reason": "stop"}
            ],
            "usage": {"completion_tokens": 7, "prompt_tokens": 5},
        },
        ("openai", [], ("I add.", "2", False), 7, "stop"),
    ),
    "beside its messages": (
        {
            "messages": [USER],
            "response": {
                "choices": [{"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]
            },
        },
        ("openai", ["user", "assistant"], ("", "", True), None, "tool_calls"),
    ),
    "text completion": (
        {
            "prompt": "1 + 1 =",
            "choices": [{"text": " 2", "finish_reason": "length"}],
            "usage": {"completion_tokens": 1},
        },
        ("openai", ["user", "assistant"], ("", " 2", False), 1, "length"),
    ),
    "batch output": (
        {"custom_id": "r-1", "response": {"status_code": 200, "body": {"choices": [{"message": {"content": "2"}}]}}},
        ("openai batch", [], ("", "2", False), None, None),
    ),
    "responses": (
        {
            "object": "response",
            "status": "completed",
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I add."}]},
                {"type": "message", "content": [{"type": "output_text", "text": "2"}]},
            ],
            "usage": {"input_tokens": 5, "output_tokens": 9},
        },
        ("openai response", [], ("I add.", "2", False), 9, "stop"),
    ),
    "SGLang's generate": (
        {"text": "I add.</think>2", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 8}},
        ("sglang", [], ("I add.", "2", False), 8, "stop"),
    ),
    "flat": (
        {
            "prompt": "1 + 1",
            "reasoning": "I add.",
            "content": "2",
            "usage": {"completion_tokens": 6},
            "finish_reason": "stop",
        },
        ("prompt", ["user", "assistant"], ("I add.", "2", False), 6, "stop"),
    ),
    "flat, without a prompt": (
        {"reasoning_content": "I add.", "content": "2", "completion_tokens": 6},
        ("flat", [], ("I add.", "2", False), 6, None),
    ),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "1 + 1"},
                {"from": "gpt", "value": "<think>\nI add.\n</think>\n\n2"},
            ]
        },
        ("conversations", ["user", "assistant"], ("\nI add.\n", "\n\n2", False), None, None),
    ),
    "messages": (
        {"messages": [USER, {"role": "assistant", "content": "2", "reasoning_content": "I add."}]},
        ("messages", ["user", "assistant"], ("I add.", "2", False), None, None),
    ),
    "parts": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "reasoning", "value": "I add."}, {"type": "tool_call", "value": "{}"}],
                },
            ]
        },
        ("messages", ["user", "assistant"], ("I add.", "", True), None, None),
    ),
    "bare list": (
        [USER, {"role": "assistant", "content": "2"}],
        ("message_list", ["user", "assistant"], ("", "2", False), None, None),
    ),
    "Alpaca": (
        {"instruction": "Add 1 and 1", "output": "2"},
        ("alpaca", ["user", "assistant"], ("", "2", False), None, None),
    ),
    "questions": ({"turns": ["1 + 1 = ?", "And 2 + 2?"]}, ("turns", ["user", "assistant", "user"], None, None, None)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_read(name: str) -> None:
    row, (layout, roles, said, claimed, reason) = ROWS[name]
    for value in (json.dumps(row).encode(), row):
        seen = see(value)
        assert (seen.layout, list(seen.roles)) == (layout, roles)
        assert (seen.claims.get("completion_tokens"), seen.finish_reason) == (claimed, reason)
        if said is None:
            assert seen.said == []
        else:
            (one,) = seen.said
            assert (*thoughts_in(one), bool(one.calls)) == said


def test_several_choices_are_several_answers() -> None:
    seen = see({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}, "finish_reason": "length"}]})
    assert [one.content for one in seen.said] == ["a", "b"]
    assert seen.finish_reason == "length"


def test_pieces_of_a_stream_are_told_as_such() -> None:
    with pytest.raises(BadRow, match="a piece of a streamed answer"):
        see({"object": "chat.completion.chunk", "choices": [{"delta": {"content": "a"}}]})


@pytest.mark.parametrize(
    "row", [{"void": {"index": 1, "attempt": 2}}, {"index": 3, "reason": "too_long", "detail": "-"}]
)
def test_lines_of_ours_that_are_no_rows(row: Row) -> None:
    with pytest.raises(NotData):
        see(row)


def record(index: int, rng: random.Random, **more: Any) -> bytes:
    answer = [rng.randrange(1000, 4000) for _ in range(rng.randrange(20, 200))]
    given: dict[str, Any] = {
        "dataset": "A", "index": index, "sample_id": f"A/{index}", "attempt": 1, "input_ids": msgspec.Raw(b"[5,6,7]"),
        "output_ids": answer, "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": len(answer),
        "cached_tokens": 0, "latency_seconds": 1.0, "server": "http://gpu1:30000",
        "created_at": "2026-01-31T12:00:00.000Z", "flags": (), "meta": {},
    }  # fmt: skip
    return encode_line(Written(**(given | more)))


def test_our_own_segments(tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = tmp_path / "A"
    folder.mkdir()
    lines = [record(index, rng, input_ids=msgspec.Raw(b"[5,6,%d]" % index)) for index in range(100)]
    (folder / "w-1.jsonl").write_bytes(b"".join(lines) + encode_line(Void(Voided(3, 1))))
    (folder / "rejects.jsonl").write_bytes(b'{"index":100,"reason":"too_long","detail":"-"}\n')
    found = audit(folder)
    assert (alarms(found), notes(found)) == ({}, {"void", "reject"})
    assert found.facts["layouts"] == {"record": 100}
    (folder / "w-2.jsonl").write_bytes(record(100, rng, completion_tokens=1402, input_ids=msgspec.Raw(b"[9]")))
    found = audit(folder)
    assert alarms(found) == {"ids_not_as_counted": "warning", "prompt_ids_not_as_counted": "warning"}


def masked(rng: random.Random, **more: Any) -> Row:
    prompt, answer = rng.randrange(5, 20), rng.randrange(30, 300)
    ids = [rng.randrange(500, 4000) for _ in range(prompt + answer)]
    return {"input_ids": ids, "loss_mask": [0] * prompt + [1] * answer, **more}


def test_rows_of_ids_with_a_mask(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [masked(rng) for _ in range(100)]
    assert looked(tmp_path, rows).findings == []
    rows[1]["loss_mask"] = rows[1]["loss_mask"][:-1]
    rows[2]["loss_mask"] = [0] * len(rows[2]["input_ids"])
    rows[3]["loss_mask"] = [1] * len(rows[3]["input_ids"])
    rows[4]["input_ids"][1] = -100
    found = looked(tmp_path, rows)
    assert alarms(found) == {
        "mask_length": "wrong",
        "mask_learns_nothing": "warning",
        "mask_learns_prompt": "warning",
        "not_ids": "wrong",
    }


def test_ids_that_are_cut_at_one_length(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [masked(rng) for _ in range(100)]
    for row in rows[:20]:
        row["input_ids"] = [rng.randrange(500, 4000) for _ in range(10 + 128)]
        row["loss_mask"] = [0] * 10 + [1] * 128
    assert alarms(looked(tmp_path, rows)) == {"one_length": "wrong"}


def test_ids_with_a_tokenizer(tmp_path: Path) -> None:
    of = tokenizer()
    end, think_end = of.special_ids.end[0], of.special_ids.think_end
    rng = random.Random(5)
    rows = []
    for _ in range(100):
        row = masked(rng)
        (text,) = of.encode([words(rng, 400)])
        row["input_ids"] = text[: len(row["input_ids"])]
        row["input_ids"][-20], row["input_ids"][-1] = think_end, end
        rows.append(row)
    assert looked(tmp_path, rows, of).findings == []
    rows[0]["input_ids"][-3] = of.vocab_size
    for row in rows[1:31]:
        row["input_ids"][-1] = 700
        row["input_ids"][-20] = 700
    assert alarms(looked(tmp_path, rows, of)) == {"out_of_range": "wrong", "no_end": "wrong", "no_think_end": "warning"}
    for row in rows[1:31]:
        row["input_ids"][row["loss_mask"].index(1) - 1] = of.special_ids.think
    assert alarms(looked(tmp_path, rows, of)) == {"out_of_range": "wrong", "no_end": "wrong", "unclosed": "wrong"}


def test_text_of_a_sample_is_tokenized(tmp_path: Path) -> None:
    of = tokenizer()
    path = tmp_path / "rows.jsonl"
    looked(tmp_path, clean(300, of))
    found = audit(path, of, sample_rows=50)
    assert found.facts["tokens_in_text"]["rows_sampled"] == 50
    assert found.findings == []


def test_percentiles_and_piles() -> None:
    lengths = Lengths()
    for length in range(1, 101):
        lengths.add(length)
    assert (lengths.percentiles((0.05, 0.5, 1.0)), lengths.mean) == ([5, 50, 100], 50.5)
    assert lengths.pile(32, 0.03, 10) is None
    for _ in range(30):
        lengths.add(100)
    assert lengths.pile(32, 0.03, 10) == (100, 31)


def test_digests_tell_what_is_there_again() -> None:
    digests = Digests(array("q", [7, 9, 0, 7, 3, 0, 7]))
    assert digests.repeated() == 2
    assert list(digests.examples()) == [(0, 3, 3)]
    assert digests.first().tolist() == [True, True, False, False, True, False, False]
    assert (Digests(array("q")).repeated(), list(Digests(array("q")).examples())) == (0, [])


def test_pairs_are_equal_where_both_are() -> None:
    made = pairs_of(array("q", [1, 2, 1, 0, -1, 1]), array("q", [2, 1, 2, 2, 5, 0])).tolist()
    assert made[0] == made[2]
    assert (made[3], made[5]) == (0, 0)
    assert len({*made} - {0}) == 3


def test_every_finding_and_reason_is_in_the_documentation() -> None:
    page = (REPO / "docs" / "audit.md").read_text(encoding="utf-8")
    tables = (of_answers._NOTES, of_rows._DAMAGES, of_rows._ROLES, of_rows._IDS)
    names = {name for table in tables for name in table} - {"void", "reject"}
    folder = REPO / "producer" / "audit"
    sources = "".join((folder / name).read_text(encoding="utf-8") for name in ("of_answers.py", "of_rows.py"))
    names |= set(re.findall(r'"(?:wrong|warning|note)",\s*"([a-z_]+)"', sources))
    assert len(names) > 40
    assert {name for name in names if f"`{name}`" not in page} == set()
    reasons = REASONS.keys() - ROW_REASONS.keys()
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()


ONE_OF_EACH: dict[str, Row] = {
    "input_ids": {"input_ids": None},
    "messages": {"messages": [USER]},
    "conversations": {"conversations": [USER]},
    "conversation": {"conversation": [USER]},
    "glaive": {"chat": "USER: 1 + 1 = ?"},
    "swe_agent": {"history": [USER]},
    "trajectory": {"traj": [USER], "prompt": "p"},
    "ultrachat": {"data": ["1 + 1 = ?"]},
    "bfcl": {"question": [USER]},
    "turns": {"turns": ["1 + 1 = ?"]},
    "magicoder": {"problem": "p", "solution": "s", "instruction": "i"},
    "alpaca": {"instruction": "i", "output": "o", "input": "n"},
    "opencode": {"input": "i", "output": "o", "question": "q"},
    "openorca": {"question": "q", "system_prompt": "", "query": "q"},
    "question": {"question": "q", "query": "q", "prompt": "p"},
    "query": {"query": "q", "prompt": "p"},
    "prompt": {"prompt": "p", "response": "r"},
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_the_short_way_to_a_layout_is_that_of_the_catalog(layout: Layout) -> None:
    row = ONE_OF_EACH[layout.name]
    if layout.name == "input_ids":
        with pytest.raises(BadRow, match="bad_input_ids"):
            see(row)
        return
    assert see(row).layout == find(row).name == layout.name
    # Without the columns that it is tried for, no row fits it.
    columns = {name for name in row if layout not in shape_of({name: row[name]}).layouts}
    assert not layout.fits({name: row[name] for name in columns})
    assert see(row | {"messages": [USER]}).layout == "messages"


def test_rows_of_many_shapes_are_not_all_remembered() -> None:
    for number in range(3_000):
        shape_of({f"column {number}": 1})
    assert len(shape._known) <= shape._MOST
