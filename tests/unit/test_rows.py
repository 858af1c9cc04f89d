"""What one line of a source becomes: a prompt, with ids kept to the last one, or a reject that names its reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sections import DatasetSettings
from producer.datasets.jsonl import Cursor, read_rows
from producer.datasets.rows import REASONS, ROLES, BadRow, Prompt, convert
from tests.conftest import SHARED

Row = dict[str, Any]
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r"}
SYSTEM = {"role": "system", "content": "s"}


def dataset(**more: Any) -> DatasetSettings:
    return DatasetSettings(name="A", path=Path("a.jsonl"), **more)


def prompt(row: Row, **more: Any) -> Prompt:
    return convert(json.dumps(row).encode(), dataset(**more))


def reject(line: bytes | Row, **more: Any) -> BadRow:
    with pytest.raises(BadRow) as caught:
        convert(line if isinstance(line, bytes) else json.dumps(line).encode(), dataset(**more))
    assert caught.value.reason in REASONS
    assert caught.value.detail
    return caught.value


def turns(*messages: Row) -> Row:
    return {"messages": list(messages)}


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_conversation_keeps_every_turn_as_it_is(column: str) -> None:
    messages = [SYSTEM, USER, CALLING, RESULT, ANSWER, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    made = prompt({column: messages})
    assert made.messages == messages
    assert (made.tools, made.input_ids, made.meta) == (None, None, {})


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([USER, ANSWER], 1),
        ([USER, ANSWER, ANSWER], 1),
        ([SYSTEM, USER, ANSWER, USER, ANSWER], 4),
        ([USER, CALLING, RESULT, ANSWER], 3),
        ([USER, CALLING], 1),
        ([USER, CALLING, RESULT], 3),
        ([ANSWER, USER], 2),
        ([USER, USER], 2),
    ],
)
def test_the_prompt_ends_with_the_last_turn_that_asks(messages: list[Row], kept: int) -> None:
    assert prompt(turns(*messages)).messages == messages[:kept]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, CALLING, RESULT],
        [USER, {**CALLING, "content": ""}, {**RESULT, "content": ""}],
        [{"role": "system", "content": ""}, USER],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER],
    ],
    ids=["null call", "empty result", "empty system", "empty earlier turns"],
)
def test_only_the_turn_that_asks_must_have_something_in_it(messages: list[Row]) -> None:
    assert prompt(turns(*messages)).messages == messages


@pytest.mark.parametrize("ids", [[0], [5, 6, 7], [163839] * 3, [0, 2**31 - 1], list(range(10_000))])
def test_ready_ids_are_kept(ids: list[int]) -> None:
    made = prompt({"input_ids": ids})
    assert made.input_ids == ids
    assert made.messages == ()


def test_ready_ids_win_over_messages_unless_the_format_says_otherwise() -> None:
    row = {"input_ids": [1, 2], **turns(USER)}
    assert prompt(row).input_ids == [1, 2]
    assert prompt(row, format="messages").messages == [USER]
    assert prompt(row, format="input_ids").input_ids == [1, 2]


@pytest.mark.parametrize(
    "ids",
    [None, [], "1,2", {"0": 1}, 5, True, [True], [1, False], [1.0], [1, 2.5], [1, None], ["1"], [[1, 2]], [1, [2]]],
)
def test_ids_that_are_not_whole_numbers_are_refused(ids: Any) -> None:
    assert reject({"id": "r1", "input_ids": ids}).reason == "bad_input_ids"


@pytest.mark.parametrize("written", [b"1.0", b"1e3", b"-0.0", b"true", b"null", b'"7"'])
def test_a_number_counts_as_it_is_written(written: bytes) -> None:
    assert reject(b'{"input_ids":[1,' + written + b"]}").reason == "bad_input_ids"


def test_a_column_of_text_is_the_users_turn() -> None:
    made = prompt({"question": "How many?\n", "answer": "3", "id": 7}, prompt_column="question")
    assert made.messages == [{"role": "user", "content": "How many?\n"}]
    assert made.meta == {"id": 7}


def test_the_text_format_reads_the_column_prompt() -> None:
    assert prompt({"prompt": "x"}, format="text").messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("value", [None, "", "  \n", 5, ["x"], {"text": "x"}])
def test_a_column_without_text_is_no_prompt(value: Any) -> None:
    bad = reject({"id": 3, "question": value, **turns(USER)}, prompt_column="question")
    assert (bad.reason, bad.row_id) == ("no_prompt", 3)
    assert "'question'" in bad.detail


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"{",
        b'{"messages": [{"role": "user", "content": ',
        b"{}{}",
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"// comment",
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud83d"}',
        b'{"a": "x\x00y"}',
        b'{"a": "x\ty"}',
        b'{"a": 1e400}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b"[" * 3000,
        b'{"a":' * 3000,
        b'{"a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b"\xef\xbb\xbf{}",
        b"[1, 2]",
        b'"text"',
        b"5",
        b"null",
        b"true",
    ],
)
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    bad = reject(line)
    assert (bad.reason, bad.row_id) == ("not_json", None)


@pytest.mark.parametrize("row", [{}, {"prompt": "x"}, {"Messages": []}, {"text": "x", "question": "y"}])
def test_a_row_without_a_prompt_is_refused(row: Row) -> None:
    assert reject(row).reason == "no_prompt"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "not a list"),
        ([], "not a list"),
        ("x", "not a list"),
        ({"role": "user", "content": "x"}, "not a list"),
        (["x"], "turn 0 is not an object"),
        ([None], "turn 0 is not an object"),
        ([USER, ["user", "x"]], "turn 1 is not an object"),
        ([{"content": "x"}], "the role None"),
        ([{"role": None, "content": "x"}], "the role None"),
        ([{"role": "User", "content": "x"}], "the role 'User'"),
        ([{"role": "human", "content": "x"}], "the role 'human'"),
        ([{"role": "function", "name": "f", "content": "x"}], "the role 'function'"),
        ([{"role": ["user"], "content": "x"}], "the role ['user']"),
        ([{"role": {"name": "user"}, "content": "x"}], "the role {'name'"),
        ([{"role": 1, "content": "x"}], "the role 1"),
        ([{"from": "human", "value": "x"}], "the role None"),
        ([{"role": "user"}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": None}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": 5}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": {"text": "x"}}], "turn 0 (user) has no text"),
        ([USER, {"role": "assistant", "content": None}], "turn 1 (assistant) has no text"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "turn 1 (assistant) has no text"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": ""}], "turn 0 (user) asks with a blank text"),
        ([USER, ANSWER, {"role": "user", "content": " \n"}, ANSWER], "turn 2 (user) asks with a blank text"),
        ([{"role": "user", "content": ["x"]}], "no text"),
        ([{"role": "user", "content": [{"type": "text", "value": "x"}]}], "no text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "no text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "audio"}]}], "no text"),
    ],
)
def test_turns_that_a_template_would_swallow_are_refused(messages: Any, words: str) -> None:
    bad = reject({"id": "r9", "messages": messages})
    assert (bad.reason, bad.row_id) == ("bad_messages", "r9")
    assert words in bad.detail


@pytest.mark.parametrize("messages", [[ANSWER], [SYSTEM], [SYSTEM, ANSWER], [CALLING]])
def test_a_conversation_in_which_nobody_asks_is_refused(messages: list[Row]) -> None:
    assert reject(turns(*messages)).reason == "no_user_turn"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("given", "made"),
    [([TOOL], [TOOL]), (json.dumps([TOOL]), [TOOL]), (None, None), ([], None), ("", None), (" \n", None), ("[]", None)],
)
def test_tools_are_a_list_or_the_text_of_one(given: Any, made: Any) -> None:
    assert prompt({**turns(USER), "tools": given}).tools == made


@pytest.mark.parametrize(
    "tools", ["x", "{", "7", '["f"]', [TOOL, "f"], {"name": "f"}, 5, "[" * 3000, '[{"a":' * 3000, '["\\ud83d"]']
)
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    bad = reject({"id": 1, **turns(USER), "tools": tools})
    assert (bad.reason, bad.row_id) == ("bad_tools", 1)


@pytest.mark.parametrize(
    ("row", "meta"),
    [
        ({"id": "a", "source": "s", "other": 1}, {"id": "a", "source": "s"}),
        ({"id": 0}, {"id": 0}),
        ({"id": 123456789012345678901234567890}, {"id": 123456789012345678901234567890}),
        ({"prompt_id": "p", "language": "de"}, {"id": "p", "language": "de"}),
        ({"uuid": "u", "id": "i"}, {"id": "i", "uuid": "u"}),
        ({"question_id": 81, "category": "math"}, {"id": 81, "category": "math"}),
        ({"id": None, "uuid": "u"}, {"id": "u"}),
        ({"id": ["x"]}, {}),
    ],
)
def test_the_rows_own_id_and_labels_go_along(row: Row, meta: Row) -> None:
    assert prompt({**row, **turns(USER)}).meta == meta
    assert prompt({**row, "input_ids": [1]}).meta == meta
    assert reject(row).row_id == meta.get("id")


def test_columns_named_in_the_configuration_go_along_whole() -> None:
    row = {"id": 1, "tags": ["x", {"y": None}], "score": 0.5, **turns(USER)}
    assert prompt(row, meta=["tags", "score", "none"]).meta == {"tags": ["x", {"y": None}], "score": 0.5}
    assert prompt(row, meta=[]).meta == {}


def test_a_detail_is_short_however_long_the_row_is() -> None:
    bad = reject(turns({"role": "x" * 1_500_000, "content": ""}))
    assert bad.reason == "bad_messages"
    assert len(bad.detail) <= 500


# Not st.text(): in a fresh clone it first makes a table of all of Unicode, which takes seconds.
words = st.sampled_from(["", " ", "a", "user", "[]", '[{"a": 1}]', "{", "\u2028", "\x00", "\U0001f600"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
odd_turns = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "name"]), json_values | st.sampled_from(sorted(ROLES)), max_size=4
)
odd_rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": json_values | st.lists(odd_turns | json_values, max_size=4),
        "conversations": json_values,
        "input_ids": json_values,
        "tools": json_values,
        "id": json_values,
        "prompt": json_values,
    },
)


@settings(max_examples=50)
@given(odd_rows, st.sampled_from(["auto", "messages", "input_ids", "text"]))
def test_any_row_is_a_prompt_or_a_reject(row: Row, layout: str) -> None:
    _prompt_or_reject(json.dumps(row).encode(), dataset(format=layout))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prompt_or_a_reject(line: bytes) -> None:
    _prompt_or_reject(line, dataset())


def _prompt_or_reject(line: bytes, source: DatasetSettings) -> str:
    """The reason of the reject, or an empty text for a prompt."""
    try:
        made = convert(line, source)
    except BadRow as bad:
        reason = bad.reason
    else:
        reason = ""
    if reason:
        assert reason in REASONS
    elif made.input_ids is not None:
        assert made.input_ids
        assert all(type(one) is int for one in made.input_ids)
    else:
        assert made.messages[-1]["role"] in {"user", "tool"}
    return reason


def reasons(file: Path) -> list[str]:
    if not file.exists():
        pytest.skip(f"{file.name} lies beside the project, and is not there")
    return [_prompt_or_reject(row.line, dataset()) for row in read_rows(file, Cursor())]


BROKEN = SHARED / "data" / "prompts" / "broken"


def test_every_malformed_line_is_what_its_label_says() -> None:
    labels = BROKEN / "made_malformed.labels.json"
    found = reasons(BROKEN / "made_malformed.jsonl")
    blank = {"blank line", "spaces only"}
    names = [name for name in json.loads(labels.read_text()) if name not in blank]
    assert len(names) == len(found) == 25
    # "huge integer" is the row's own id here, and a duplicate key is legal JSON, of which the last counts.
    good = {
        "good",
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
    cases = [json.loads(row.line)["case"] for row in read_rows(file, Cursor())]
    assert {case: reason for case, reason in zip(cases, found, strict=True) if reason} == {
        "no messages key": "no_prompt",
        "only assistant": "no_user_turn",
        "only system": "no_user_turn",
        **dict.fromkeys(
            [
                "messages null",
                "messages empty",
                "messages string",
                "role missing",
                "role null",
                "role upper case",
                "content missing",
                "content null, no tool_calls",
                "content empty",
                "content spaces",
                "content number",
                "content dict",
                "legacy function_call",
                "image part",
                "unknown part",
                "from/value mixed with role/content",
                "unknown from",
            ],
            "bad_messages",
        ),
    }
