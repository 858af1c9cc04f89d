"""A small row of every layout, and the very messages, tools or ids that it becomes."""

import base64
import json
import struct
from pathlib import Path
from typing import Any, get_args

import pytest

from common.sections import DatasetSettings, Format
from producer.datasets.cursor import BadLine
from producer.datasets.layouts.catalog import LAYOUTS, MESSAGE_LIST, detect, layout_name
from producer.datasets.rows import BadRow, Prompt, convert

Row = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
FLAT = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}


def dataset(**more: Any) -> DatasetSettings:
    return DatasetSettings(name="A", path=Path("a.jsonl"), **more)


def prompt(row: Any, **more: Any) -> Prompt:
    return convert(json.dumps(row).encode(), dataset(**more))


def system(text: str) -> Row:
    return {"role": "system", "content": text}


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, made: str) -> Row:
    return {"id": made, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, made: str, **more: Any) -> Row:
    return {"role": "tool", "content": text, "tool_call_id": made, **more}


def said(*texts: str) -> list[Row]:
    """ShareGPT's turns, in which human and gpt alternate."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


GLAIVE = (
    "USER: Is it\nwarm?\n\n\nASSISTANT: I look. <functioncall> "
    '{"name": "weather", "arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"degrees": 30}\n\n\nASSISTANT: Yes. <|endoftext|>\n\n\n'
    "USER: And Oslo?\n\n\nASSISTANT: No. <|endoftext|>"
)
GLAIVE_SYSTEM = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(FLAT, indent=4)
    + "\n\n"
    + json.dumps({"name": "now"}, indent=4)
    + "\n"
)
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
WARM = call("weather", '{"city": "Rome"}', "functions.weather:0")
ANSWERED = [
    user("Is it warm?"),
    assistant("", tool_calls=[call("weather", {"city": "Rome"}, "functions.weather:0")]),
    result("30", "functions.weather:0"),
]
QUESTION = [user("Is it warm?")]

OPEN_THOUGHTS = "<|begin_of_thought|>\n\nr\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nb\n\n<|end_of_solution|>"
LS = [call("ls", "{}", "call_1")]
WEATHER = [call("weather", "{}", "c1")]
TWO = ('{"city": "Rome"}', '{"city": "Oslo"}')

GOLDEN: list[tuple[str, Any, list[Row]]] = [
    ("messages", {"messages": [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]}, [
        system("s"), user("a"), assistant("b"), user("c"),
    ]),
    ("messages", {"prompt": "a", "prompt_id": "p", "messages": [user("a"), assistant("b")]}, [user("a")]),
    ("messages", {"messages": json.dumps([user("a"), assistant("b"), user("c")]), "instance_id": "x"}, [
        user("a"), assistant("b"), user("c"),
    ]),
    ("messages", {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}, [user("a")]),
    ("messages", {"messages": [user("a"), assistant("<think>\nr\n</think>\n\nb"), user("c")], "num_tokens": 3}, [
        user("a"), assistant("b", reasoning_content="r"), user("c"),
    ]),
    ("conversations", {"id": "1", "conversations": said("a", "b", "c", "d")}, [user("a"), assistant("b"), user("c")]),
    ("conversations", {"system": "s", "conversations": [
        {"from": "user", "value": "a"},
        {"from": "assistant", "value": OPEN_THOUGHTS},
        {"from": "user", "value": "c"},
    ]}, [system("s"), user("a"), assistant("b", reasoning_content="r"), user("c")]),
    ("conversations", {"conversations": [
        *({"from": "system", "value": "s"}, {"from": "human", "value": "Is it warm?"}),
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "30"},
        {"from": "gpt", "value": "Yes."},
    ], "tools": json.dumps([FLAT])}, [system("s"), *ANSWERED]),
    ("conversations", {"conversations": [user("a"), assistant("b"), {"from": "human", "value": "c"}]}, [
        user("a"), assistant("b"), user("c"),
    ]),
    ("conversation", {"conversation": [user("a"), assistant("b")], "conversation_id": "x"}, [user("a")]),
    # Mixture-of-Thoughts, OpenThoughts 3, open-perfectblend and functionary as they are published.
    ("messages", {"messages": [user("a"), assistant("<think>\nr\n</think>\n\nb")], "num_tokens": 7, "source": "o/x"}, [
        user("a"),
    ]),
    ("conversations", {"difficulty": None, "source": "x", "domain": "math", "conversations": [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "<think>\nr\n</think>\n\nb"},
    ]}, [user("a")]),
    ("conversations", {"conversations": said("a", "b", "c", "d"), "source": "x"}, [
        user("a"), assistant("b"), user("c"),
    ]),
    ("messages", {"tools": [TOOL], "messages": [
        user("a"), assistant("I look.", tool_calls=[{"function": {"name": "weather", "arguments": at}} for at in TWO]),
        *({"role": "tool", "name": "weather", "content": text} for text in ("30", "20")),
        assistant("Yes."), {**user("b"), "metainfo": {"img_path": "x"}},
    ]}, [
        user("a"),
        assistant("I look.", tool_calls=[call("weather", at, f"functions.weather:{n}") for n, at in enumerate(TWO)]),
        *(result(text, f"functions.weather:{n}", name="weather") for n, text in enumerate(("30", "20"))),
        assistant("Yes."), user("b"),
    ]),
    ("message_list", [user("a"), assistant("b")], [user("a")]),
    ("glaive", {"system": GLAIVE_SYSTEM, "chat": GLAIVE}, [
        system("You are a helpful assistant."), user("Is it\nwarm?"), assistant("I look.", tool_calls=[WARM]),
        result('{"degrees": 30}', "functions.weather:0"), assistant("Yes."), user("And Oslo?"),
    ]),
    ("glaive", {"system": "SYSTEM: You have {no} functions.", "chat": "USER: a ASSISTANT: b <|endoftext|> USER: c"}, [
        system("You have {no} functions."), user("a"), assistant("b"), user("c"),
    ]),
    ("swe_agent", {"environment": "main", "trajectory": [{"action": "ls", "observation": "f"}], "history": [
        {**system("s"), "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": [{"type": "text", "text": "fix "}, {"type": "text", "text": "it"}]},
        {"role": "assistant", "content": "I look.", "thought": "I look.", "action": "ls", "tool_calls": LS},
        {"role": "tool", "content": [{"type": "text", "text": "f"}], "tool_call_ids": ["call_1"]},
        {"role": "assistant", "content": "Done.", "thought": "Done.", "action": "submit"},
    ]}, [system("s"), user("fix it"), assistant("I look.", tool_calls=LS), result("f", "call_1")]),
    ("trajectory", {"instance_id": "x", "trajectory": [
        {"role": "system", "system_prompt": "s", "text": None, "mask": False},
        {"role": "user", "text": "fix it", "system_prompt": None, "mask": False},
        {"role": "ai", "text": "ls", "system_prompt": None, "mask": True},
        {"role": "user", "text": "f", "system_prompt": None, "mask": False},
    ]}, [system("s"), user("fix it"), assistant("ls"), user("f")]),
    ("trajectory", {"task_id": 1, "reward": 0.0, "traj": [
        user("Is it warm?"),
        {"role": "assistant", "content": None, "tool_calls": WEATHER},
        {"role": "tool", "name": "weather", "content": "30", "tool_call_id": "c1"},
    ]}, [user("Is it warm?"), assistant("", tool_calls=WEATHER), result("30", "c1", name="weather")]),
    ("ultrachat", {"id": "0", "data": ["a", "b", "c", "d"]}, [user("a"), assistant("b"), user("c")]),
    ("ultrachat", {"class": "x", "data": "a"}, [user("a")]),
    ("bfcl", {"id": "x", "question": [[system("s"), user("a")]], "function": [FLAT]}, [system("s"), user("a")]),
    ("bfcl", {"question": [[user("a")], [user("b")]], "function": [FLAT]}, [user("a")]),
    ("turns", {"question_id": 81, "category": "writing", "turns": ["a", "b"]}, [user("a")]),
    ("turns", {"turns": [user("a"), assistant("b"), user("c")]}, [user("a"), assistant("b"), user("c")]),
    ("magicoder", {"lang": "c", "problem": "p", "solution": "s"}, [user("p")]),
    ("magicoder", {"instruction": "i", "response": "r"}, [user("i")]),
    ("alpaca", {"instruction": "i", "input": "x", "output": "o"}, [user("i\n\nx")]),
    ("alpaca", {"instruction": "i", "input": "", "output": "o", "system": "s", "history": [["a", "b"]]}, [
        system("s"), user("a"), assistant("b"), user("i"),
    ]),
    ("opencode", {"id": "1", "input": "i", "output": "o", "tests_execution_status": '["pass"]'}, [user("i")]),
    ("openorca", {"id": "flan.0", "system_prompt": "s", "question": "q", "response": "r"}, [system("s"), user("q")]),
    ("openorca", {"id": "flan.0", "system_prompt": "", "question": "q", "response": "r"}, [user("q")]),
    ("question", {"question": "q", "answer": "1 #### 1"}, [user("q")]),
    ("query", {"query": "q", "answers": "[]", "tools": json.dumps([FLAT])}, [user("q")]),
    ("prompt", {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}, [user("def f():\n")]),
    ("prompt", {"prompt": [system("s"), user("a")], "answer": "1"}, [system("s"), user("a")]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "row", "messages"), GOLDEN, ids=range(len(GOLDEN)))
def test_a_row_becomes_these_messages(layout: str, row: Any, messages: list[Row]) -> None:
    made = prompt(row)
    assert made.messages == messages
    assert layout_name(row) == layout
    assert prompt(row, format=layout) == made
    if isinstance(row, dict):
        assert prompt({**row, "text": None, "score": 1, "tools": row.get("tools")}) == made


def test_every_layout_has_its_row_here_and_its_name_in_the_configuration() -> None:
    names = [layout.name for layout in LAYOUTS]
    assert {layout for layout, _, _ in GOLDEN} | {"input_ids"} == {MESSAGE_LIST, *names}
    assert sorted(get_args(Format)) == sorted(["auto", MESSAGE_LIST, *names])


@pytest.mark.parametrize(
    ("row", "tools"),
    [
        ({"system": GLAIVE_SYSTEM, "chat": GLAIVE}, [TOOL, NOW]),
        ({"question": [QUESTION], "function": [FLAT]}, [TOOL]),
        ({"conversations": said("a"), "tools": json.dumps([FLAT])}, [TOOL]),
        ({"messages": QUESTION, "tools": [TOOL]}, [TOOL]),
        ({"messages": QUESTION, "tools": [json.dumps(TOOL)]}, [TOOL]),
        ({"messages": QUESTION, "functions": [FLAT]}, [TOOL]),
        ({"messages": QUESTION, "tools": [{**FLAT, "parameters": None, "input_schema": SCHEMA}]}, [TOOL]),
        ({"messages": QUESTION, "tools": "[]"}, None),
    ],
    ids=range(8),
)
def test_tools_of_every_form_become_openais(row: Row, tools: Any) -> None:
    assert prompt(row).tools == tools


IDS = [5, 70000, 163839]


@pytest.mark.parametrize(
    "written",
    [
        IDS,
        "5 70000 163839",
        "5,70000,163839",
        "[5, 70000, 163839]",
        base64.b64encode(struct.pack("<3i", *IDS)).decode(),
        base64.b64encode(struct.pack("<3q", *IDS)).decode(),
    ],
)
def test_ready_ids_are_read_in_every_form(written: Any) -> None:
    assert prompt({"id": 1, "input_ids": written}).input_ids == IDS
    assert layout_name({"input_ids": written}) == "input_ids"


@pytest.mark.parametrize("form", ["<3i", "<3q"])
def test_ready_ids_of_parquet_may_be_packed(form: str) -> None:
    assert convert({"input_ids": struct.pack(form, *IDS)}, dataset()).input_ids == IDS


@pytest.mark.parametrize(
    ("mask", "last", "first"),
    [
        ({}, 6, 6),
        ({"loss_mask": [0] * 6}, 6, 6),
        ({"loss_mask": [0, 0, 1, 0, 1, 1]}, 4, 2),
        ({"loss_mask": [0, 0, 1, 1, 1, 0]}, 2, 2),
        ({"labels": [-100, -100, 7, -100, 9, 10]}, 4, 2),
        ({"labels": [5, 6, 7, 8, 9, 10]}, 6, 6),
    ],
)
def test_ready_ids_with_a_mask_end_where_the_answer_begins(mask: Row, last: int, first: int) -> None:
    ids = [5, 6, 7, 8, 9, 10]
    assert prompt({"input_ids": ids, **mask}).input_ids == ids[:last]
    assert prompt({"input_ids": ids, **mask}, turns="first").input_ids == ids[:first]


@pytest.mark.parametrize("seen", [[0, 1, 1, 1, 1, 0], "[0, 1, 1, 1, 1, 0]", [False, True, True, True, True, False]])
def test_padding_is_no_part_of_ready_ids(seen: Any) -> None:
    row = {"input_ids": [0, 5, 6, 7, 8, 0], "attention_mask": seen}
    assert prompt(row).input_ids == [5, 6, 7, 8]
    assert prompt({**row, "labels": [-100, -100, -100, 7, 8, -100]}).input_ids == [5, 6]
    assert prompt({**row, "attention_mask": [1] * 6}).input_ids == row["input_ids"]


@pytest.mark.parametrize("seen", [[0, 1], [0, 0, 0]])
def test_an_attention_mask_that_does_not_fit_is_refused(seen: list[int]) -> None:
    with pytest.raises(BadRow, match="attention_mask"):
        prompt({"input_ids": [5, 6, 7], "attention_mask": seen})


@pytest.mark.parametrize(
    ("mask", "reason"),
    [([1, 1], "no_user_turn"), ([0], "bad_input_ids"), ([0, 2], "bad_input_ids"), ("01", "bad_input_ids")],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        prompt({"input_ids": [5, 6], "loss_mask": mask})


def test_the_columns_may_have_names_of_their_own() -> None:
    row = {"conv": said("a"), "functions_": [FLAT], "sys": "s", "q": "b", "ids": [1], "messages": [user("other")]}
    named = {"messages": "conv", "tools": "functions_", "system": "sys"}
    assert prompt(row, columns=named).messages == [system("s"), user("a")]
    assert prompt(row, columns=named).tools == [TOOL]
    assert prompt(row, columns={"prompt": "q"}).messages == [user("b")]
    assert prompt(row, columns={"input_ids": "ids"}).input_ids == [1]
    assert prompt(row, columns={"system": "sys"}).messages == [system("s"), user("other")]
    with pytest.raises(BadRow, match="none of the columns that the configuration names"):
        prompt({"messages": [user("a")]}, columns={"messages": "conv"})


def test_a_format_by_name_takes_no_other() -> None:
    with pytest.raises(BadRow, match="no_prompt"):
        prompt({"messages": QUESTION}, format="alpaca")
    with pytest.raises(BadRow, match="no_prompt"):
        prompt(QUESTION, format="messages")


def test_a_mixed_file_is_named_by_its_most_frequent_layout_and_read_row_by_row() -> None:
    rows: list[Any] = [{"prompt": "a"}, {"messages": QUESTION}, {"messages": QUESTION}, QUESTION, {"x": 1}, 5, None]
    found = detect(rows)
    assert (found.name, found.rows) == ("messages", {"messages": 2, "prompt": 1, "message_list": 1, "none": 3})
    assert detect([json.dumps(row).encode() for row in rows]) == found
    assert detect([b"{", BadLine("not_csv", "d")]).rows == {"none": 2}
    assert str(found) == "layouts messages (2), prompt (1), message_list (1), none (3)"
    assert [prompt(row).messages[-1]["content"] for row in rows[:4]] == ["a", *["Is it warm?"] * 3]
    assert (detect([]).name, detect([{}]).name) == ("none", "none")


def test_detection_looks_at_some_hundred_rows() -> None:
    assert detect({"prompt": "a"} for _ in iter(int, 1)).rows == {"prompt": 300}
