"""Foreign bytes and odd rows: each is a prompt or a reject, and nothing else ever happens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sections import DatasetSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.layouts.catalog import LAYOUTS, detect
from producer.datasets.layouts.turns import ROLES
from producer.datasets.rows import REASONS, BadRow, Prompt, convert
from tests.conftest import SHARED


def dataset(**more: Any) -> DatasetSettings:
    return DatasetSettings(name="A", path=Path("a.jsonl"), **more)


# Not st.text(): in a fresh clone it first makes a table of all of Unicode, which takes seconds.
words = st.sampled_from(
    [
        *("", " ", "a", "user", "[]", '[{"a": 1}]', "{", "\u2028", "\x00", "\U0001f600", "\ud83d", "1, 2", "AQAAAA=="),
        *(
            "<think>",
            "</think>b",
            "USER: a",
            "ASSISTANT: <functioncall> {",
            '{"name": "f", "arguments": \'{}\'}',
            "dict",
        ),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "reasoning", "tool_call", "x"]) | json_values},
    optional={"text": json_values, "value": json_values},
)
calls = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("id", "function", "name", "arguments"), json_values)
) | st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": words, "arguments": json_values})})
odd_turns = st.fixed_dictionaries(
    {"role": st.sampled_from(sorted(ROLES)) | json_values},
    optional={
        "content": json_values | st.lists(parts, max_size=3),
        "value": json_values,
        "reasoning_content": json_values,
        "tool_calls": st.lists(calls, max_size=3) | json_values,
        "tool_call_id": json_values,
        "tool_call_ids": json_values,
        "name": json_values,
    },
)
schemas = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "properties", "items", "required"), json_values))
tools = st.lists(st.fixed_dictionaries({"name": words, "parameters": schemas | json_values}), max_size=2)
odd_turn_lists = st.lists(odd_turns, max_size=4)
COLUMNS = ["messages", "conversations", "input_ids", "loss_mask", "labels", "system", "chat", "history", "trajectory"]
COLUMNS += ["data", "question", "turns", "problem", "instruction", "input", "output", "query", "prompt", "images", "id"]
odd_rows = st.dictionaries(st.sampled_from(COLUMNS), json_values | odd_turn_lists, max_size=4)
odd_conversations = st.fixed_dictionaries(
    {"messages": odd_turn_lists}, optional={"tools": tools | json_values, "images": json_values, "id": json_values}
)
sources = st.builds(
    dataset,
    format=st.sampled_from(["auto", "auto", "auto", *(layout.name for layout in LAYOUTS)]),
    turns=st.sampled_from(["last", "first"]),
    drop_media=st.booleans(),
    system=st.none() | st.just("s"),
    columns=st.sampled_from([{}, {}, {"messages": "history"}, {"prompt": "data", "tools": "output"}]),
)


def outcome(value: Any, source: DatasetSettings) -> str:
    """The reason of the reject, or an empty text for a prompt, which is as it must be."""
    try:
        made = convert(value, source)
    except BadRow as error:
        bad = error
    else:
        return _checked(made)
    assert bad.reason in REASONS
    assert len(bad.detail) <= 500
    return bad.reason


def _checked(made: Prompt) -> str:
    if made.input_ids is not None:
        assert made.input_ids
        assert all(type(one) is int for one in made.input_ids)
        return ""
    assert made.messages[-1]["role"] in {"user", "tool"}
    for turn in made.messages:
        assert turn["role"] in {"system", "user", "assistant", "tool"}
        assert isinstance(turn["content"], str)
        assert turn.keys() <= {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}
        assert all(value or key == "content" for key, value in turn.items())
        assert all(call["id"] and call["function"]["name"] for call in turn.get("tool_calls", ()))
        assert turn["role"] != "tool" or turn["tool_call_id"]
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in made.tools or ())
    return ""


@settings(max_examples=150, deadline=None)
@given(odd_rows | odd_conversations | odd_turn_lists, sources)
def test_any_row_is_a_prompt_or_a_reject_and_the_same_again(row: Any, source: DatasetSettings) -> None:
    """A row as a library gives it; half a surrogate pair may be in it, which a line of JSON cannot have."""
    before = json.dumps(row)
    assert outcome(row, source) == outcome(json.loads(before), source)
    assert json.dumps(row) == before
    detect([row])


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prompt_or_a_reject(line: bytes) -> None:
    outcome(line, dataset())


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":' + b'[{"role":"user","content":' * 900,
        b'{"messages":"' + b"[" * 1_500_000 + b'"}',
        b'{"chat":"' + b"USER: a\\nASSISTANT:<functioncall>" * 40_000 + b'"}',
        b'{"chat":"' + b"\\n" * 1_500_000 + b'"}',
        b'{"chat":"USER: ' + b" ASSISTANT" * 100_000 + b':"}',
        b'{"messages":[{"role":"user","content":"a"},{"role":"function_call","content":"' + b"'" * 1_500_000 + b'"}'
        b',{"role":"user","content":"a"}]}',
        b'{"messages":[{"role":"assistant","content":"' + b"<think>" * 200_000 + b'"},{"role":"user","content":"a"}]}',
        b'{"messages":[{"role":"assistant","content":"'
        + b"<think></think>" * 100_000
        + b'"},{"role":"user","content":"a"}]}',
        b'{"chat":"USER: a","system":"' + b" " * 1_500_000 + b'x"}',
        b'{"chat":"USER: a","system":"a with access to the following functions' + b" " * 1_500_000 + b'x"}',
        b'{"prompt":"<' + b" " * 1_500_000 + b'x<image>","images":["a"]}',
        b'{"conversations":[{"from":"function_call","value":"' + b'\\"arguments\\":\' ' * 80_000 + b'"}'
        b',{"from":"human","value":"a"}]}',
        b'{"input_ids":"' + b"1 " * 700_000 + b'"}',
        b'{"input_ids":"' + b"9" * 1_500_000 + b'"}',
    ],
    ids=range(15),
)
def test_a_long_or_deep_line_is_soon_done_with(line: bytes) -> None:
    outcome(line, dataset())


def test_a_schema_of_schemas_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    assert outcome({"prompt": "a", "tools": [tool]}, dataset()) == "bad_tools"


BROKEN = SHARED / "data" / "prompts" / "broken"


def reasons(file: Path) -> list[str]:
    if not file.exists():
        pytest.skip(f"{file.name} lies beside the project, and is not there")
    return [outcome(row.value, dataset()) for row in read_rows(file, Cursor())]


def test_every_malformed_line_is_what_its_label_says() -> None:
    labels = BROKEN / "made_malformed.labels.json"
    found = reasons(BROKEN / "made_malformed.jsonl")
    blank = {"blank line", "spaces only"}
    names = [name for name in json.loads(labels.read_text()) if name not in blank]
    assert len(names) == len(found) == 25
    # "huge integer" is the row's own id here, and a duplicate key is legal JSON, of which the last counts.
    good = {
        "good",
        "top-level list",
        "paired surrogate escape (fine)",
        "escaped NUL (valid)",
        "duplicate keys",
        "huge integer",
        "crlf ending",
        "line of 1.5 MB",
        "no newline at end of file",
    }
    right = {name for name in names if name in good or name.startswith("raw tab and newline-like U+2028")}
    expected = {name: "" if name in right else "not_json" for name in names}
    assert dict(zip(names, found, strict=True)) == expected


def test_every_odd_shape_is_a_prompt_or_the_reject_that_fits() -> None:
    file = BROKEN / "made_odd_shapes.jsonl"
    found = reasons(file)
    cases = [json.loads(row.value)["case"] for row in read_rows(file, Cursor()) if isinstance(row.value, bytes)]
    assert {case: reason for case, reason in zip(cases, found, strict=True) if reason} == {
        "only assistant": "no_user_turn",
        "only system": "no_user_turn",
        "image part": "not_text",
        "unknown part": "not_text",
        **dict.fromkeys(
            [
                "messages null",
                "messages empty",
                "role missing",
                "role null",
                "content missing",
                "content null, no tool_calls",
                "content empty",
                "content spaces",
                "content number",
                "content dict",
                "unknown from",
            ],
            "bad_messages",
        ),
    }
