"""Ids of an answer become reasoning, content and tool calls; every id is of a kind, and damage is named."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.answers import DAMAGES, Answer, Span, parse, survival
from common.chat_template import Tokenizer
from common.sections import TokenizerSettings
from tests.conftest import REPO, SHARED
from tests.unit.answer_models import ids_of, typed

EXAMPLE = REPO / "examples" / "tokenizer"
KIMI = [SHARED / "data" / "tokenizers" / name for name in ("kimi_like_8k_sparse", "kimi_k25_fast")]
USER = [{"role": "user", "content": "How is the weather?"}]
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call_of(number: int, name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def function(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def example() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=EXAMPLE))


@pytest.fixture(scope="module", params=KIMI, ids=lambda path: path.name)
def kimi(request: pytest.FixtureRequest) -> Tokenizer:
    path: Path = request.param
    if not path.is_dir():
        pytest.skip("the Kimi tokenizers lie beside the project, and are not there")
    return Tokenizer(TokenizerSettings(path=path))


def check_spans(answer: Answer, output_ids: list[int]) -> None:
    """They cover all ids, in order, without gaps."""
    assert [span.start for span in answer.spans] == [0, *(span.stop for span in answer.spans)][:-1]
    assert (answer.spans[-1].stop if answer.spans else 0) == len(output_ids)
    assert all(span.start < span.stop for span in answer.spans)


def read(tokenizer: Tokenizer, text: str, **more: Any) -> tuple[Answer, list[int]]:
    output_ids = ids_of(tokenizer, text)
    answer = parse(output_ids, tokenizer, **more)
    check_spans(answer, output_ids)
    return answer, output_ids


def test_thinking_content_and_two_calls_come_back(kimi: Tokenizer) -> None:
    calls = call_of(0, "look", '{"at":"Oslo"}') + call_of(1, "a.b", "{ }")
    answer, ids = read(kimi, f"I look.\n</think> Wait.\n{SECTION}{calls}{SECTION_END}<|im_end|>")
    assert (answer.reasoning, answer.content) == ("I look.\n", " Wait.\n")
    assert answer.tool_calls == [
        function("functions.look:0", "look", '{"at":"Oslo"}'),
        function("functions.a.b:1", "a.b", "{ }"),
    ]
    assert answer.arguments() == [{"at": "Oslo"}, {}]
    assert answer.damage is None
    texts = [(span.kind, kimi.decode(ids[span.start : span.stop])) for span in answer.spans]
    assert texts == [
        ("think", "I look.\n"),
        ("control", "</think>"),
        ("answer", " Wait.\n"),
        ("control", SECTION + "<|tool_call_begin|>"),
        ("tool_call", "functions.look:0"),
        ("control", "<|tool_call_argument_begin|>"),
        ("tool_call", '{"at":"Oslo"}'),
        ("control", "<|tool_call_end|><|tool_call_begin|>"),
        ("tool_call", "functions.a.b:1"),
        ("control", "<|tool_call_argument_begin|>"),
        ("tool_call", "{ }"),
        ("control", "<|tool_call_end|>" + SECTION_END + "<|im_end|>"),
    ]
    assert survival(USER, answer, ids, kimi) == "whole"


def test_a_plain_answer_of_kimi_loses_its_reasoning_in_the_history(kimi: Tokenizer) -> None:
    answer, ids = read(kimi, "I look.</think>It rains.<|im_end|>")
    assert answer.message() == {"role": "assistant", "content": "It rains.", "reasoning_content": "I look."}
    assert ids[answer.answer_start :] == ids_of(kimi, "It rains.<|im_end|>")
    assert survival(USER, answer, ids, kimi) == "reasoning_dropped"
    assert survival(USER, answer, ids, kimi) != "changed"


def test_control_tokens_that_a_user_typed_stay_text_where_reasoning_is_left_out(kimi: Tokenizer) -> None:
    before = [{"role": "user", "content": "What is </think>, and <|im_end|>?"}]
    answer, ids = read(kimi, "Hm.</think>A mark.<|im_end|>")
    assert survival(before, answer, ids, kimi) == "reasoning_dropped"
    assert survival(before, msgspec.structs.replace(answer, content="A mark"), ids, kimi) == "changed"
    assert survival(before, msgspec.structs.replace(answer, content=" A mark."), ids, kimi) == "changed"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "damages"),
    [
        ("I lo", "I lo", "", 0, ["no_think_end"]),
        ("", "", "", 0, ["no_think_end"]),
        ("<|im_end|>", "", "", 0, ["no_think_end"]),
        ("</think><|im_end|>", "", "", 0, []),
        ("</think>Yes.<|im_end|>", "", "Yes.", 0, []),
        ("Hm.</think><|im_end|>", "Hm.", "", 0, []),
        ("Hm.</think>Ye", "Hm.", "Ye", 0, []),
        ("Hm.<think>So.</think>Yes.<|im_end|>", "Hm.So.", "Yes.", 0, ["think_reopened"]),
        ("Hm.</think>Yes.<think>So.<|im_end|>", "Hm.So.", "Yes.", 0, ["no_think_end", "think_reopened"]),
        ("Hm.</think>Yes.</think>No.<|im_end|>", "Hm.", "Yes.No.", 0, ["think_end_unopened"]),
        ("Hm.</think>a<|im_user|>b<|im_end|>", "Hm.", "a<|im_user|>b", 0, ["control_in_content"]),
        ("Hm.<|im_end|>So</think>a<|im_end|>", "Hm.<|im_end|>So", "a", 0, ["control_in_content"]),
        (f"Hm.{SECTION}{call_of(0, 'f', '{}')}{SECTION_END}<|im_end|>", "Hm.", "", 1, ["no_think_end"]),
        (f"</think>{SECTION}{call_of(0, 'f', '{}')}<|tool_call_be", "", "", 1, ["unbalanced_tool_calls"]),
        (f"</think>{SECTION}{call_of(0, 'f', '{}')}<|im_end|>", "", "", 1, ["unbalanced_tool_calls"]),
        (f"</think>{SECTION}<|tool_call_begin|>functions.f:0", "", "", 0, ["unbalanced_tool_calls"]),
        (f"</think>{call_of(0, 'f', '{}')}<|im_end|>", "", "", 1, ["unbalanced_tool_calls"]),
        ("</think>a<|tool_call_end|>b", "", "ab", 0, ["unbalanced_tool_calls", "content_behind_tool_calls"]),
        (f"</think>{SECTION}{call_of(0, 'f', '{')}{SECTION_END}", "", "", 1, ["tool_call_not_json"]),
        (f"</think>{SECTION}{call_of(0, 'f', '[1]')}{SECTION_END}", "", "", 1, ["tool_call_not_json"]),
        (f"</think>{SECTION}{call_of(0, '', '{}')}{SECTION_END}", "", "", 0, ["tool_call_not_json"]),
        (f"</think>{SECTION}<|tool_call_begin|>f<|tool_call_end|>{SECTION_END}", "", "", 0, ["tool_call_not_json"]),
        (f"</think>{SECTION}{call_of(0, 'f', '{}')}{SECTION_END}Ok.", "", "Ok.", 1, ["content_behind_tool_calls"]),
        ("</think>a\ufffdb", "", "a\ufffdb", 0, ["replacement_character"]),
    ],
)
def test_damage_is_named(
    kimi: Tokenizer, text: str, reasoning: str, content: str, calls: int, damages: list[str]
) -> None:
    answer, ids = read(kimi, text)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == (reasoning, content, calls)
    assert list(answer.damages) == damages
    assert set(damages) <= set(DAMAGES)
    if "no_think_end" in damages or "unbalanced_tool_calls" in damages:
        assert survival(USER, answer, ids, kimi) == "changed"


def test_bytes_that_are_no_text_do_not_survive(kimi: Tokenizer) -> None:
    emoji = ids_of(kimi, "\U0001f9ff")
    assert len(emoji) > 1
    ids = [*ids_of(kimi, "Hm.</think>a"), *emoji[:-1], *ids_of(kimi, "b<|im_end|>")]
    answer = parse(ids, kimi)
    check_spans(answer, ids)
    assert answer.content.startswith("a\ufffd")
    assert answer.damages == ("replacement_character",)
    assert survival(USER, answer, ids, kimi) == "changed"


def test_marks_that_are_spelled_out_are_content(kimi: Tokenizer) -> None:
    said = "Write </think> and <think>, <|tool_call_begin|>."
    ids = [*ids_of(kimi, "Hm.</think>"), *typed(kimi, said), *ids_of(kimi, "<|im_end|>")]
    answer = parse(ids, kimi)
    check_spans(answer, ids)
    assert (answer.reasoning, answer.content, answer.damages) == ("Hm.", said, ())
    assert [span.kind for span in answer.spans] == ["think", "control", "answer", "control"]
    # The letters one by one are not the tokens that a tokenizer makes of them.
    assert survival(USER, answer, ids, kimi) == "changed"


def test_marks_that_are_spelled_out_as_the_tokenizer_does_survive(kimi: Tokenizer) -> None:
    said = "Write </think> and <|im_end|>."
    message = {"role": "assistant", "content": said}
    whole = kimi.encode([kimi.render([*USER, message], None)])[0]
    prompt = kimi.encode([kimi.render(USER, None)])[0]
    end = len(whole) - whole[::-1].index(kimi.special_ids.end[0])
    ids = whole[len(prompt) : end]
    answer = parse(ids, kimi)
    assert (answer.reasoning, answer.content, answer.damages) == ("", said, ())
    assert survival(USER, answer, ids, kimi) == "whole"


def test_the_prompt_says_whether_thinking_has_begun(kimi: Tokenizer) -> None:
    off = kimi.encode([kimi.render(USER, None, {"thinking": False})])[0]
    on = kimi.encode([kimi.render(USER, None)])[0]
    answer, ids = read(kimi, "It rains.<|im_end|>", input_ids=off)
    assert answer.message() == {"role": "assistant", "content": "It rains."}
    assert answer.damage is None
    assert survival(USER, answer, ids, kimi, kwargs={"thinking": False}) == "whole"
    answer, _ = read(kimi, "It rains.<|im_end|>", input_ids=on)
    assert answer.reasoning == "It rains."
    answer, _ = read(kimi, "No.</think>It rains.<|im_end|>", input_ids=off)
    assert (answer.reasoning, answer.damages) == (None, ("think_end_unopened",))


def test_a_call_with_an_object_keeps_its_text(example: Tokenizer) -> None:
    body = '{"id": "c7", "name": "f", "arguments": {"b":  1, "a": "\\u00e9"}}'
    answer, ids = read(example, f"Hm.</think><tool_call>{body}</tool_call><|im_end|>")
    assert answer.tool_calls == [function("c7", "f", '{"b":  1, "a": "\\u00e9"}')]
    assert answer.message()["content"] is None
    assert survival(USER, answer, ids, example) == "whole"


def test_a_call_without_an_id_gets_one(example: Tokenizer) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer, ids = read(example, f"</think>{call}{call}<|im_end|>", calls_before=3)
    assert [one["id"] for one in answer.tool_calls] == ["call00003", "call00004"]
    assert survival(USER, answer, ids, example) == "changed"  # its template writes the id


def test_an_answer_that_was_cut_off_survives_up_to_its_end(example: Tokenizer) -> None:
    answer, ids = read(example, "Hm.</think>It rai")
    assert survival(USER, answer, ids, example) == "whole"
    assert answer.spans[-1] == Span("answer", answer.answer_start, len(ids))


def test_other_ids_for_the_same_text_do_not_survive(example: Tokenizer) -> None:
    ids = [*ids_of(example, "</think>"), *typed(example, "weather"), *ids_of(example, "<|im_end|>")]
    answer = parse(ids, example)
    assert answer.content == "weather"
    assert survival(USER, answer, ids, example) == "changed"


def test_nothing_that_a_model_may_write_raises(example: Tokenizer) -> None:
    for start in range(0, 4096, 61):
        ids = [(start * 7 + step * step * 31) % 4096 for step in range(97)] + [4092 + start % 4]
        check_spans(parse(ids, example), ids)


def turns_of(file: Path) -> list[tuple[list[dict[str, Any]], dict[str, Any], Any]]:
    """(what was before, the assistant's turn, tools) of every assistant turn of a file of OpenAI messages."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        (row["messages"][:number], message, row.get("tools"))
        for row in rows
        for number, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("name", ["chat", "code", "tools"])
def test_every_turn_of_the_examples_comes_back(example: Tokenizer, name: str) -> None:
    turns = turns_of(REPO / "examples" / "prompts" / f"{name}.jsonl")
    assert turns
    for before, message, tools in turns:
        prompt, whole = example.encode([example.render([*before, *more], tools) for more in ([], [message])])
        end = len(whole) - whole[::-1].index(example.special_ids.end[0])
        ids = whole[len(prompt) : end]
        answer = parse(ids, example, input_ids=prompt)
        assert answer.content == (message["content"] or "")
        assert answer.tool_calls == message.get("tool_calls", [])
        assert survival(before, answer, ids, example, tools=tools) != "changed"
