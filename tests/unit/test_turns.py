"""What turns become: roles, texts, reasoning, calls and results, media, system prompts, and repaired tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.sections import DatasetSettings
from producer.datasets.layouts.turns import ROLES
from producer.datasets.rows import BadRow, Prompt, convert

Row = dict[str, Any]
USER = {"role": "user", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}


def prompt(row: Row, **more: Any) -> Prompt:
    return convert(json.dumps(row).encode(), DatasetSettings(name="A", path=Path("a.jsonl"), **more))


def made(*turns: Row, **more: Any) -> list[Any]:
    return list(prompt({"messages": [*turns, USER], **more}).messages[:-1])


def text(value: str) -> Row:
    return {"type": "text", "text": value}


@pytest.mark.parametrize("spelling", sorted(ROLES))
@pytest.mark.parametrize("change", [str, str.upper, lambda role: f" {role.replace('_', '-')} "], ids=["", "upper", "-"])
def test_every_spelling_of_a_role_is_known(spelling: str, change: Any) -> None:
    content = '{"name": "f"}'
    (turn,) = made({"from": change(spelling), "value": content})
    if ROLES[spelling] == "call":
        assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    else:
        assert (turn["role"], turn["content"]) == (ROLES[spelling], content)


def test_what_no_template_should_see_is_left_out() -> None:
    turn = {"role": "user", "content": "b", "name": "Bob", "loss": False, "weight": 0, "metainfo": {"img_path": "p"}}
    assert made(
        turn, {"role": "assistant", "content": "c", "name": "Bot", "thought": "c", "reasoning_content": None}
    ) == [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    "content",
    [
        "b c",
        [text("b "), text("c")],
        ["b ", "c"],
        [{"type": "text", "value": "b "}, {"type": "input_text", "text": "c"}],
        [{"type": "text", "text": "b c", "image_url": None}],
        [{"text": "b c"}],
        text("b c"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_a_text_in_parts_is_one_text(role: str, content: Any) -> None:
    assert made({"role": role, "content": content}) == [{"role": role, "content": "b c"}]


@pytest.mark.parametrize(
    ("turn", "reasoning", "content"),
    [
        ({"content": "b", "reasoning_content": "r"}, "r", "b"),
        ({"content": "b", "reasoning_content": "\nr\n"}, "\nr\n", "b"),
        ({"content": "b", "reasoning": "r"}, "r", "b"),
        ({"content": "b", "thinking": "r"}, "r", "b"),
        ({"content": "b", "reasoning_content": ""}, None, "b"),
        ({"content": "b", "reasoning_content": None, "reasoning": "r"}, "r", "b"),
        ({"content": None, "reasoning_content": "r"}, "r", ""),
        ({"content": "<think>r</think>b"}, "r", "b"),
        ({"content": "\n<think>\nr\n\ns\n</think>\n\n b "}, "r\n\ns", " b "),
        ({"content": "<think></think>b"}, None, "b"),
        ({"content": "<think>\n\n</think>\n\nb"}, None, "b"),
        ({"content": "<think>r</think>"}, "r", ""),
        ({"content": "<think>r b"}, "r b", ""),
        ({"content": "r\n</think>\n\nb"}, "r", "b"),
        ({"content": "<think>r</think><think>s</think>b"}, "r\ns", "b"),
        ({"content": "<think>r</think>b <think>c</think>"}, "r", "b <think>c</think>"),
        ({"content": "The tags <think> and </think> enclose it"}, None, "The tags <think> and </think> enclose it"),
        ({"content": "<think>r</think>b", "reasoning_content": " r\n"}, " r\n", "b"),
        ({"content": "<think>r</think>b", "reasoning_content": "s"}, "s\nr", "b"),
        ({"content": [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "b"}]}, "r", "b"),
        ({"content": [{"type": "thinking", "thinking": "r"}, text("b")], "reasoning": "r"}, "r", "b"),
        ({"content": "<|begin_of_thought|>\nr\n<|end_of_thought|>\nb"}, "r", "b"),
    ],
)
def test_reasoning_is_split_from_the_answer_once(turn: Row, reasoning: str | None, content: str) -> None:
    wanted = {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}
    assert made({"role": "assistant", **turn}) == [wanted]


def test_a_tag_that_a_user_wrote_stays() -> None:
    assert made({"role": "user", "content": "<think>r</think>b"}) == [{"role": "user", "content": "<think>r</think>b"}]


def calls(*values: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": "", "tool_calls": list(values), **more}


def call(name: str = "f", made_id: str | None = None, arguments: Any = "{}") -> Row:
    function = {"name": name, "arguments": arguments}
    return {**({"id": made_id} if made_id else {}), "type": "function", "function": function}


def result(content: Any = "o", **more: Any) -> Row:
    return {"role": "tool", "content": content, **more}


@pytest.mark.parametrize(
    "given",
    [
        call(),
        {"function": {"name": "f", "arguments": None}},
        {"name": "f", "parameters": {}},
        {"name": "f", "arguments": " "},
        json.dumps({"name": "f"}),
        {"function": "f", "arguments": "{}"},
    ],
)
def test_a_call_in_every_form_is_openais(given: Any) -> None:
    (turn,) = made(calls(given))
    function = turn["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("f", {} if "parameters" in given else "{}")
    assert turn["tool_calls"][0]["id"] == "functions.f:0"


@pytest.mark.parametrize("arguments", ['{"a": [\n', "l = [1]\nl", '{"é": 1}', {"é": 1, "z": [1.0]}])
def test_arguments_stay_as_a_model_wrote_them(arguments: Any) -> None:
    assert made(calls(call(made_id="c", arguments=arguments))) == [calls(call(made_id="c", arguments=arguments))]


def ids(*turns: Row) -> list[Any]:
    """The ids of calls, a list for a turn, and of results."""
    return [
        [one["id"] for one in turn["tool_calls"]] if "tool_calls" in turn else turn["tool_call_id"]
        for turn in made(*turns)
    ]


F0, F1, G1 = "functions.f:0", "functions.f:1", "functions.g:1"


@pytest.mark.parametrize(
    ("turns", "linked"),
    [
        ([calls(call(made_id="c1")), result(tool_call_id="c1")], [["c1"], "c1"]),
        ([calls(call(made_id="c1")), result()], [["c1"], "c1"]),
        ([calls(call()), result()], [[F0], F0]),
        ([calls(call()), result(tool_call_id="r1")], [["r1"], "r1"]),
        ([calls(call(), call("g")), result(), result()], [[F0, G1], F0, G1]),
        ([calls(call(), call("g")), result(name="g"), result(name="f")], [[F0, G1], G1, F0]),
        ([calls(call()), result(), calls(call()), result()], [[F0], F0, [F1], F1]),
        ([calls(call()), calls(call()), result(tool_call_ids=["x"])], [["x"], [F1], "x"]),
        ([calls(call(made_id=F1)), calls(call())], [[F1], ["functions.f:2"]]),
        ([calls({**call(), "id": 7}), result(tool_call_id=7)], [["7"], "7"]),
        ([result(tool_call_id="x")], ["x"]),
        ([result()], ["functions.tool:0"]),
        ([calls(call(made_id="c")), result(tool_call_id="c"), result(tool_call_id="c")], [["c"], "c", "c"]),
    ],
    ids=range(13),
)
def test_calls_and_results_are_linked_by_ids(turns: list[Row], linked: list[Any]) -> None:
    assert ids(*turns) == linked


def test_calls_of_one_answer_are_one_turn() -> None:
    turns = [
        {"from": "gpt", "value": "I look."},
        *({"from": "function_call", "value": f'{{"name": "{one}"}}'} for one in "fg"),
    ]
    assert made(*turns) == [calls(call("f", "functions.f:0"), call("g", "functions.g:1"), content="I look.")]


def test_the_old_form_of_a_call_becomes_the_new_one() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    turns = made(old, {"role": "function", "name": "f", "content": {"a": "é"}})
    assert turns == [calls(call("f", "functions.f:0")), result('{"a":"é"}', tool_call_id="functions.f:0", name="f")]


@pytest.mark.parametrize(
    "turn",
    [
        calls(5),
        calls({"function": {"arguments": "{}"}}),
        calls({"name": "f", "arguments": [1]}),
        {"from": "function_call", "value": "f(1)"},
        {"from": "function_call", "value": "[]"},
        {"from": "function_call", "value": '{"name": "f", "arguments": \'{"a": \'}'},
        {"role": "assistant", "content": "", "tool_calls": 5},
    ],
)
def test_a_call_that_cannot_be_read_is_refused(turn: Row) -> None:
    with pytest.raises(BadRow, match="bad_tools"):
        made(turn)


MEDIA = [IMAGE, {"type": "image", "image": "u"}, {"type": "video", "video": {"url": "u"}}, {"image": "u"}]
MEDIA += [{"type": "input_audio", "input_audio": {"data": "AA"}}, {"type": "image_url", "value": "1.jpg"}]


@pytest.mark.parametrize("part", MEDIA)
def test_media_are_refused_or_left_out_as_the_configuration_says(part: Row) -> None:
    asks = {"messages": [{"role": "user", "content": [part, text("b")]}]}
    with pytest.raises(BadRow, match="not_text"):
        prompt(asks)
    assert prompt(asks, drop_media=True).messages == [{"role": "user", "content": "b"}]
    with pytest.raises(BadRow, match="not_text"):
        prompt({"messages": [{"role": "user", "content": [part]}]}, drop_media=True)


def test_media_behind_the_turn_that_asks_do_not_count() -> None:
    assert prompt({"messages": [USER, {"role": "assistant", "content": [IMAGE]}]}).messages == [USER]


def test_marks_in_the_text_stand_for_a_column_of_the_row() -> None:
    row = {"conversations": [{"from": "human", "value": "<image>\nb"}], "images": ["1.jpg"]}
    with pytest.raises(BadRow, match="not_text"):
        prompt(row)
    assert prompt(row, drop_media=True).messages == [{"role": "user", "content": "b"}]
    assert prompt({**row, "images": []}).messages[0]["content"] == "<image>\nb"
    with pytest.raises(BadRow, match="not_text"):
        prompt({"prompt": "b", "images": ["1.jpg"]})
    assert prompt({"prompt": "b", "image": "docker.io/x"}).messages[0]["content"] == "b"


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"messages": [USER]}, {"system": " ", "chat": "USER: a"}])
def test_a_system_prompt_is_added_where_the_row_has_none(row: Row) -> None:
    assert prompt(row, system="s").messages == [{"role": "system", "content": "s"}, USER]


def test_a_system_prompt_of_the_row_stays() -> None:
    own = {"role": "system", "content": "own"}
    for row in (
        {"messages": [own, USER]},
        {"system": "own", "messages": [USER]},
        {"system_prompt": "own", "question": "a"},
    ):
        assert prompt(row, system="s").messages == [own, USER]
    assert prompt({"messages": [{**own, "content": " "}, USER]}, system="s").messages[0]["content"] == "s"


BOOL = {"type": "bool"}


def schema(**parameters: Any) -> Any:
    tools = prompt({"prompt": "a", "tools": [{"name": "f", "parameters": parameters}]}).tools
    assert tools
    return tools[0]["function"]["parameters"]


@pytest.mark.parametrize(
    ("given", "repaired"),
    [
        ({"type": "string"}, {"type": "string"}),
        ({"type": "dict"}, {"type": "object"}),
        ({"type": "float"}, {"type": "number"}),
        ({"type": "str"}, {"type": "string"}),
        ({"type": "int"}, {"type": "integer"}),
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": "any", "description": "d"}, {"description": "d"}),
        ({"type": "List[str]"}, {"type": "array", "items": {"type": "string"}}),
        ({"type": "tuple", "items": {"type": "float"}}, {"type": "array", "items": {"type": "number"}}),
        ({"type": ["str", "null"]}, {"type": ["string", "null"]}),
        ({"type": "dict", "properties": {"y": BOOL}}, {"type": "object", "properties": {"y": {"type": "boolean"}}}),
        ({"anyOf": [{"type": "int"}, {"type": "none"}]}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ({"description": "no type"}, {"description": "no type"}),
        ({"type": "string", "enum": None, "default": None}, {"type": "string", "default": None}),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "additionalProperties": False}),
    ],
)  # fmt: skip
def test_a_schema_is_repaired_where_the_damage_is_known(given: Row, repaired: Row) -> None:
    assert schema(type="dict", properties={"x": given}) == {"type": "object", "properties": {"x": repaired}}


def test_a_schema_of_properties_alone_is_completed() -> None:
    given = {
        "x": {"type": "str", "description": "d"},
        "y": {"type": "int, optional"},
        "z": {"type": "int", "default": 1},
    }
    assert schema(**given) == {
        "type": "object",
        "properties": {
            "x": {"type": "string", "description": "d"},
            "y": {"type": "integer"},
            "z": {"type": "integer", "default": 1},
        },
        "required": ["x"],
    }


def test_what_is_required_belongs_into_the_schema() -> None:
    tool = {"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": "str"}}}, "required": ["x"]}
    tools = prompt({"prompt": "a", "tools": [{"type": "function", "function": tool}]}).tools
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    assert tools == [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    "tool",
    [
        *(5, {"type": "code_interpreter"}, {"name": ""}, {"name": "f", "parameters": 5}),
        {"name": "f", "parameters": {"type": "string"}},
        {"name": "f", "parameters": {"type": "object", "properties": []}},
        {"name": "f", "parameters": {"type": "object", "properties": {"x": "string"}}},
        {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "pandas"}}}},
        {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": 5}}}},
    ],
)
def test_a_tool_beyond_repair_is_refused(tool: Any) -> None:
    with pytest.raises(BadRow, match="bad_tools"):
        prompt({"prompt": "a", "tools": [tool]})


def test_glaives_tools_that_are_not_json_are_refused() -> None:
    system = "You have access to nothing, with access to the following functions. Use them if required -\n{'name': 'f'}"
    with pytest.raises(BadRow, match="bad_tools"):
        prompt({"system": system, "chat": "USER: a"})
