"""A conversation from one turn to the next, without a model: what goes into the history, and what ends it."""

from typing import Any

import msgspec
import pytest

from common.answers import Answer
from common.sections import DatasetSettings
from common.turns import TURNS, Made, index_of, row_of, turn_of, turns_left, unpack_made
from producer.conversations import STOPS, Conversation, Stopped, begin, follow
from producer.datasets.rows import BadRow, Prompt, convert
from producer.verify import check
from tests.conftest import REPO
from tests.lines import record_line, write_segment


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(made: str, name: str = "f", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": made, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(made: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": made, "content": text}


def answer(text: str, *calls: dict[str, Any], damages: tuple[str, ...] = ()) -> Answer:
    return Answer(reasoning=None, content=text, tool_calls=list(calls), spans=[], damages=damages)


def conversation(*messages: dict[str, Any], tools: Any = None) -> Conversation:
    return begin(Prompt({"id": 7}, messages, tools))


def test_the_history_is_made_of_own_answers_alone() -> None:
    system = {"role": "system", "content": "be brief"}
    start = conversation(
        system, user("a"), user("b"), assistant("theirs"), system, user("c"), assistant("x"), user("d")
    )
    assert start.prompt == Prompt({"id": 7}, [system, user("a"), user("b")], None, turn=0, turns=3)

    second = follow(start, answer("one"))
    third = follow(second, answer("two"))

    assert second.messages == [system, user("a"), user("b"), assistant("one"), system, user("c")]
    assert third.messages == [*second.messages, assistant("two"), user("d")]
    assert (third.turn, third.turns, third.rest) == (2, 3, [])


def test_a_row_by_itself_is_the_first_prompt() -> None:
    """As `enqueue --dry-run` shows it."""
    dataset = DatasetSettings(name="A", path="a.jsonl", turns="all")
    row = msgspec.json.encode({"messages": [assistant("hello"), user("a"), assistant("x"), user("b")]})
    assert convert(row, dataset).messages == [assistant("hello"), user("a")]


def test_what_was_said_before_the_first_user_turn_stays() -> None:
    start = conversation(assistant("hello"), user("a"), assistant("x"), assistant("y"), user("b"))
    assert follow(start, answer("one")).messages == [assistant("hello"), user("a"), assistant("one"), user("b")]


def test_tool_results_get_the_ids_of_own_calls() -> None:
    theirs = assistant("", call("a", "f", {"x": 1}), call("b", "g", '{"y": [1, 2], "x": null}'))
    start = conversation(user("q"), theirs, result("b", "B"), result("a", "A"), assistant("done"))
    own = call("p", "f", '{"x":  1}'), call("q", "g", '{"x": null, "y": [1,2]}')

    messages = follow(start, answer("", *own)).messages

    assert messages[-2:] == [result("q", "B"), result("p", "A")]
    assert messages[1]["tool_calls"] == list(own)


def test_arguments_that_a_model_can_only_write_as_texts_are_the_same() -> None:
    start = conversation(user("q"), assistant("", call("a", "f", {"n": 3, "s": "3"})), result("a", "A"))
    assert follow(start, answer("", call("p", "f", '{"n": "3", "s": "3"}'))).turn == 1


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((), id="none"),
        pytest.param((call("p", "g"),), id="another name"),
        pytest.param((call("p", "f", '{"x": 2}'),), id="other arguments"),
        pytest.param((call("p", "f", "{"),), id="arguments that are not JSON"),
        pytest.param((call("p"), call("q")), id="one too many"),
    ],
)
def test_tool_results_of_other_calls_end_it(calls: tuple[dict[str, Any], ...]) -> None:
    start = conversation(user("q"), assistant("", call("a")), result("a", "A"))
    with pytest.raises(Stopped, match="other_tool_calls"):
        follow(start, answer("", *calls))


def test_a_tool_result_that_belongs_to_no_call_ends_it() -> None:
    start = conversation(user("q"), assistant("x"), result("stray", "A"))
    with pytest.raises(Stopped, match="other_tool_calls"):
        follow(start, answer("x"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer("x", call("p")), "tool_calls_unanswered"),
        (answer("x", damages=("no_think_end",)), "damaged_answer"),
    ],
)
def test_an_answer_that_nothing_can_follow_ends_it(given: Answer, reason: str) -> None:
    with pytest.raises(Stopped, match=reason):
        follow(conversation(user("q"), assistant("x"), user("r")), given)


def test_a_blank_user_turn_ends_it_and_at_the_start_the_row_is_bad() -> None:
    with pytest.raises(Stopped, match="blank_turn"):
        follow(conversation(user("q"), assistant("x"), user(" ")), answer("x"))
    with pytest.raises(BadRow, match=r"turn 0 .user. asks with a blank text"):
        conversation(user(" "), assistant("x"), user("q"))


def test_it_comes_back_from_the_ledger_as_it_was() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    start = conversation(user("ä 漢 🙂"), assistant("", call("a")), result("a", "A"), tools=tools)
    assert Conversation.unpack(start.pack()) == start


def test_indices_of_turns() -> None:
    indices = [index_of(row, turn) for row in (0, 1, 20_000) for turn in (0, 1, TURNS - 1)]
    assert len(set(indices)) == len(indices)
    assert [(row_of(index), turn_of(index)) for index in indices] == [
        (row, turn) for row in (0, 1, 20_000) for turn in (0, 1, TURNS - 1)
    ]
    assert [turns_left(turn, 3) for turn in (0, 2, None)] == [2, 0, None]
    assert turns_left(0, None) is None
    assert unpack_made(Made(2**32 - 1, [0, 2**31 - 1]).pack()) == Made(2**32 - 1, [0, 2**31 - 1])


def test_verify_names_turns_that_are_not_what_their_index_says(tmp_path: Any) -> None:
    write_segment(
        tmp_path,
        "w-0.jsonl",
        record_line(index_of(1, 0), turn=0, turns=2),
        record_line(index_of(1, 1), turn=1, turns=2, parent=index_of(1, 0)),
        record_line(index_of(2, 1), turn=2, turns=3, parent=index_of(2, 0)),
        record_line(index_of(3, 1), turn=1, turns=3),
        record_line(5, parent=4),
    )
    assert [fault.reason for fault in check(tmp_path, "A").faults] == [
        "turn 2, but index 129 is that of turn 1",
        "its parent is None, not the turn before it",
        "its parent is 4, not the turn before it",
    ]


def test_the_documentation_names_every_reason() -> None:
    text = (REPO / "docs" / "datasets.md").read_text(encoding="utf-8")
    assert [reason for reason in (*STOPS, "truncated", "rejected") if f"| `{reason}`" not in text] == []
