"""What one line of a source becomes: a prompt, with ids kept to the last one, or a reject that names its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.sections import DatasetSettings
from producer.datasets.containers import BadLine
from producer.datasets.layouts.cuts import answered_turns
from producer.datasets.rows import REASONS, BadRow, Prompt, convert

Row = dict[str, Any]
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
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
    messages = [SYSTEM, USER, CALLING, RESULT, ANSWER, {"role": "user", "content": "c"}]
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
        [USER, CALLING, {**RESULT, "content": ""}],
        [{"role": "system", "content": ""}, USER],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER],
    ],
    ids=["empty result", "empty system", "empty earlier turns"],
)
def test_only_the_turn_that_asks_must_have_something_in_it(messages: list[Row]) -> None:
    assert prompt(turns(*messages)).messages == messages


@pytest.mark.parametrize("answer", [None, 5, [{"type": "image_url"}], {"a": 1}])
def test_an_answer_that_is_cut_off_is_not_even_read(answer: Any) -> None:
    assert prompt(turns(USER, {"role": "assistant", "content": answer})).messages == [USER]


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([USER, ANSWER, USER], 1),
        ([SYSTEM, USER, CALLING, RESULT, ANSWER, USER], 2),
        ([USER, USER, ANSWER, USER], 2),
        ([ANSWER, USER, ANSWER, USER], 2),
        ([RESULT, ANSWER, USER], 3),
    ],
)
def test_the_first_turn_that_asks_is_what_remains_of_a_conversation(messages: list[Row], kept: int) -> None:
    assert prompt(turns(*messages), turns="first").messages == messages[:kept]


def test_first_finds_nothing_where_no_user_asks() -> None:
    assert reject(turns(RESULT, ANSWER), turns="first").reason == "no_user_turn"


def test_the_cuts_are_the_prompts_of_a_conversation_in_order() -> None:
    whole: list[Row] = [SYSTEM, USER, ANSWER, USER, CALLING, RESULT, RESULT, ANSWER, USER, SYSTEM]
    assert answered_turns(whole) == [2, 4, 7, 9]
    assert answered_turns([SYSTEM, ANSWER]) == []
    assert prompt(turns(*whole[:8]), turns="last").messages == whole[:7]
    assert convert(json.dumps(turns(*whole[:8])).encode(), dataset(), whole=True).messages == whole[:8]


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
    [
        *(None, "", [], {"0": 1}, 5, True, [True], [1, False], [1.0], [1, 2.5], [1, None], ["1"], [[1, 2]], [1, [2]]),
        *("1, -2", "1.0", "one", "[]", "12345678901", "AQAAAA", "AQA="),
    ],
)
def test_ids_that_are_not_whole_numbers_are_refused(ids: Any) -> None:
    assert reject({"id": "r1", "input_ids": ids}).reason == "bad_input_ids"


@pytest.mark.parametrize("written", [b"1.0", b"1e3", b"-0.0", b"true", b"null", b'"7"'])
def test_a_number_counts_as_it_is_written(written: bytes) -> None:
    assert reject(b'{"input_ids":[1,' + written + b"]}").reason == "bad_input_ids"


def test_a_column_of_text_is_the_users_turn() -> None:
    made = prompt({"question": "How many?\n", "answer": "3", "id": 7}, columns={"prompt": "question"})
    assert made.messages == [{"role": "user", "content": "How many?\n"}]
    assert made.meta == {"id": 7}


@pytest.mark.parametrize("value", [None, "", "  \n", 5, {"text": "x"}])
def test_a_column_without_text_is_no_prompt(value: Any) -> None:
    bad = reject({"id": 3, "question": value, **turns(USER)}, columns={"prompt": "question"})
    assert (bad.reason, bad.row_id) == ("no_prompt", 3)


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
        b'"text"',
        b"5",
        b"null",
        b"true",
    ],
)
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    bad = reject(line)
    assert (bad.reason, bad.row_id) == ("not_json", None)


@pytest.mark.parametrize(
    "row", [{}, {"Messages": []}, {"text": "x", "answer": "y"}, {"prompt": " "}, {"question": None}]
)
def test_a_row_without_a_prompt_is_refused(row: Row) -> None:
    assert reject(row).reason == "no_prompt"


def test_one_turn_of_a_conversation_is_no_row() -> None:
    assert "one turn of a conversation" in reject(USER).detail


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "not a list"),
        ([], "not a list"),
        ("x", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"role": "user", "content": "x"}, "not a list"),
        (["x"], "turn 0 is not an object"),
        ([None], "turn 0 is not an object"),
        ([USER, ["user", "x"]], "turn 1 is not an object"),
        ([{"content": "x"}], "the role None"),
        ([{"role": None, "content": "x"}], "the role None"),
        ([{"role": "bing", "content": "x"}], "the role 'bing'"),
        ([{"role": "", "content": "x"}], "the role ''"),
        ([{"role": ["user"], "content": "x"}], "the role a list"),
        ([{"role": {"name": "user"}, "content": "x"}], "the role an object"),
        ([{"role": 1, "content": "x"}], "the role 1"),
        ([{"role": "user"}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": None}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": 5}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": {"text": "x"}}], "turn 0 (user) has no text"),
        ([USER, {"role": "assistant", "content": None}, USER], "turn 1 (assistant) has no text"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}, USER], "turn 1 (assistant) has no text"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "turn 0 (user) has no text"),
        ([{"role": "user", "content": ""}], "turn 0 (user) asks with a blank text"),
        ([USER, ANSWER, {"role": "user", "content": " \n"}, ANSWER], "turn 2 (user) asks with a blank text"),
        ([{"role": "user", "content": [5]}], "a content part that is 5"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "type text without a text"),
        ([{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}], "of type 'tool_result'"),
        ([{"role": "user", "content": [{"type": "tool_call", "value": "{}"}]}], "of type call"),
    ],
)
def test_turns_that_a_template_would_swallow_are_refused(messages: Any, words: str) -> None:
    bad = reject({"id": "r9", "messages": messages})
    assert (bad.reason, bad.row_id) == ("bad_messages", "r9")
    assert words in bad.detail


@pytest.mark.parametrize("messages", [[ANSWER], [SYSTEM], [SYSTEM, ANSWER], [CALLING]])
def test_a_conversation_in_which_nobody_asks_is_refused(messages: list[Row]) -> None:
    assert reject(turns(*messages)).reason == "no_user_turn"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


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
    assert reject({**row, "messages": 5}).row_id == meta.get("id")


def test_columns_named_in_the_configuration_go_along_whole() -> None:
    row = {"id": 1, "tags": ["x", {"y": None}], "score": 0.5, **turns(USER)}
    assert prompt(row, meta=["tags", "score", "none"]).meta == {"tags": ["x", {"y": None}], "score": 0.5}
    assert prompt(row, meta=[]).meta == {}


def test_a_detail_is_short_however_long_the_row_is() -> None:
    for row in (
        turns({"role": "x" * 1_500_000, "content": ""}),
        {"x" * 1_500_000: 1},
        {"c" * 90 + str(n): 1 for n in range(99)},
    ):
        bad = reject(row)
        assert bad.reason in {"bad_messages", "no_prompt"}
        assert len(bad.detail) <= 500


def test_what_a_container_could_not_give_is_its_reject() -> None:
    with pytest.raises(BadRow) as caught:
        convert(BadLine("line_too_long", "d"), dataset())
    assert (caught.value.reason, caught.value.detail, caught.value.row_id) == ("line_too_long", "d", None)


@pytest.mark.parametrize("value", [5, None, "x", 1.5])
def test_a_row_is_an_object_or_a_list(value: Any) -> None:
    with pytest.raises(BadRow, match="not_json"):
        convert(value, dataset())


def test_a_row_that_a_library_has_read_is_the_same_prompt() -> None:
    row = {"id": 1, **turns(SYSTEM, USER, ANSWER)}
    assert convert(row, dataset()) == prompt(row)
    assert convert(row["messages"], dataset()).messages == [SYSTEM, USER]
