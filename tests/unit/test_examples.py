"""The example prompts and tokenizer are what the demo and many tests stand on, so their promises are pinned here."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from examples import make_tokenizer

EXAMPLES = Path(make_tokenizer.__file__).parent
COUNTS = {"chat": 143, "code": 102, "tools": 101}
CONTROL = make_tokenizer.SPECIAL + make_tokenizer.MARKS
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    with (EXAMPLES / "prompts" / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {name: read(name) for name in COUNTS}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer", local_files_only=True)


def encode(tokenizer: Any, row: Row, **kwargs: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), add_generation_prompt=True, return_dict=False, **kwargs
    )
    return ids


def render(tokenizer: Any, messages: list[Row], **kwargs: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return text


def test_counts(rows: dict[str, list[Row]]) -> None:
    assert {name: len(rows[name]) for name in rows} == COUNTS
    assert len(read("token_ids")) == 20


def test_ids_are_unique_and_no_prompt_occurs_twice(rows: dict[str, list[Row]]) -> None:
    every = [row for name in COUNTS for row in rows[name]]
    assert len({row["id"] for row in every}) == len(every)
    assert len({json.dumps(row["messages"]) for row in every}) == len(every)
    assert len({row["messages"][-1]["content"] for row in every}) == len(every)


@pytest.mark.parametrize("name", COUNTS)
def test_rows_are_labelled_and_end_where_the_model_answers(rows: dict[str, list[Row]], name: str) -> None:
    for row in rows[name]:
        roles = [message["role"] for message in row["messages"]]
        assert row["id"].startswith(f"{name}-")
        assert row["category"]
        assert row["language"]
        assert set(roles) <= {"system", "user", "assistant", "tool"}, row["id"]
        assert "system" not in roles[1:], row["id"]
        assert "user" in roles, row["id"]
        assert roles[-1] in ("user", "tool"), row["id"]
        assert ("tools" in row) == (name == "tools"), row["id"]
        for message in row["messages"]:
            assert message["content"] or message.get("tool_calls"), row["id"]


def test_every_tool_call_names_a_declared_function_and_is_answered_once(rows: dict[str, list[Row]]) -> None:
    for row in rows["tools"]:
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        assert len(declared) == len(row["tools"]), row["id"]
        for name, schema in declared.items():
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name), row["id"]
            assert set(schema.get("required", ())) <= set(schema["properties"]), row["id"]
        waiting: list[str] = []
        seen: set[str] = set()
        for message in row["messages"]:
            if message["role"] == "tool":
                waiting.remove(message["tool_call_id"])
                continue
            assert not waiting, row["id"]
            for call in message.get("tool_calls", ()):
                parameters = declared[call["function"]["name"]]
                arguments = json.loads(call["function"]["arguments"])
                assert set(parameters.get("required", ())) <= set(arguments) <= set(parameters["properties"]), row["id"]
                assert call["id"] not in seen
                waiting.append(call["id"])
                seen.add(call["id"])
        assert not waiting, row["id"]


def test_no_prompt_holds_a_control_token() -> None:
    for name in COUNTS:
        text = (EXAMPLES / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
        assert [token for token in CONTROL if token in text] == []


def test_the_tokenizer_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)  # the library's logger does not propagate
    try:
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer", local_files_only=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
    config = json.loads((EXAMPLES / "tokenizer" / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"] == make_tokenizer.VOCAB_SIZE == 4096
    assert tokenizer.eos_token_id == config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 4090
    assert tokenizer.pad_token_id == config["pad_token_id"]
    assert tokenizer.convert_tokens_to_ids(list(CONTROL)) == list(range(4088, 4096))


def test_making_the_tokenizer_again_gives_the_same_bytes(tmp_path: Path) -> None:
    make_tokenizer.write(tmp_path)
    for file in ("tokenizer/tokenizer.json", "prompts/token_ids.jsonl"):
        assert (tmp_path / file).read_bytes() == (EXAMPLES / file).read_bytes(), file


@pytest.mark.parametrize("name", COUNTS)
def test_prompts_end_in_an_open_think_block(rows: dict[str, list[Row]], tokenizer: Any, name: str) -> None:
    think, end_think = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    for row in rows[name]:
        input_ids = encode(tokenizer, row)
        assert input_ids[-1] == think, row["id"]
        assert encode(tokenizer, row, thinking=True) == input_ids, row["id"]
        assert encode(tokenizer, row, thinking=False)[-2:] == [think, end_think], row["id"]
        assert 10 <= len(input_ids) <= 1600, row["id"]


@pytest.mark.parametrize("name", COUNTS)
def test_decoding_gives_the_rendered_prompt_back(rows: dict[str, list[Row]], tokenizer: Any, name: str) -> None:
    for row in rows[name]:
        text = render(tokenizer, row["messages"], tools=row.get("tools"), add_generation_prompt=True)
        assert tokenizer.decode(encode(tokenizer, row)) == text, row["id"]
        for message in row["messages"]:
            assert (message["content"] or "") in text, row["id"]


def test_token_ids_are_those_of_their_source_rows(rows: dict[str, list[Row]], tokenizer: Any) -> None:
    source = {row["id"]: row for name in COUNTS for row in rows[name]}
    ready = read("token_ids")
    assert len({row["id"] for row in ready}) == len(ready)
    for row in ready:
        assert row["input_ids"] == encode(tokenizer, source[row["id"]]), row["id"]


def test_template_writes_tools_calls_and_results(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "maß", "description": "<b> & 'c'", "parameters": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "maß", "arguments": '{"q": "é"}'}}
    messages: list[Row] = [
        {"role": "system", "content": "Kurz."},
        {"role": "user", "content": "Wie groß?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1,5 m"},
    ]
    assert render(tokenizer, messages, tools=[tool], add_generation_prompt=True) == (
        "<|im_start|>system\nKurz.\n\nYou can call these functions:\n"
        '{"name": "maß", "description": "<b> & \'c\'", "parameters": {}}\n'
        'To call one, write {"id": ..., "name": ..., "arguments": {...}} between the tool call marks.<|im_end|>\n'
        "<|im_start|>user\nWie groß?<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
        '<tool_call>{"id": "c1", "name": "maß", "arguments": {"q": "é"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n[c1]\n1,5 m<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


def test_template_drops_reasoning_of_earlier_turns_only(tokenizer: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    messages: list[Row] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>old in text</think>\nb", "reasoning_content": None},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "d"},
    ]
    loop = "<think>{}</think><tool_call>" + '{{"id": "c1", "name": "f", "arguments": {{"n": 1}}}}</tool_call>'
    assert loop.format("new") in render(tokenizer, messages)
    assert loop.format("") in render(tokenizer, messages, thinking=False)
    done = render(tokenizer, [*messages, {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}])
    assert loop.format("") in done
    assert "assistant\n<think></think>b<|im_end|>" in done


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "human", "content": "a"}, "unknown role 'human'"),
        ({"role": "user", "content": [{"type": "image"}]}, "type 'image'"),
    ],
)
def test_template_refuses_what_it_cannot_render(tokenizer: Any, message: Row, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        render(tokenizer, [message])
