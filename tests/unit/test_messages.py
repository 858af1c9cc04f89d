"""Conversations that a template would render wrongly without a word do not get that far."""

from typing import Any

import pytest

from common.chat_template import Tokenizer
from common.messages import BadPrompt, check_messages
from common.sections import TokenizerSettings
from tests.conftest import REPO

USER = {"role": "user", "content": "q"}
FUNCTION = {"name": "f", "arguments": "{}"}
CALL = {"id": "c0", "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "tool_call_id": "c0", "name": "f", "content": "r"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": ""}, USER],
        [{"role": "developer", "content": "d"}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [USER, calling(CALL, content=None), RESULT],
        [USER, calling({**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}), {**RESULT, "name": None}],
        [USER, calling(CALL, reasoning_content="r"), RESULT],
        [USER, {"role": "assistant", "content": "a", "tool_calls": None, "name": None}, USER],
    ],
)
def test_conversations_as_openai_has_them_pass(messages: list[dict[str, Any]]) -> None:
    check_messages(messages, [TOOL])
    check_messages(messages, [])
    check_messages(messages, None)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "Expected array of length >= 1"),
        ([USER, {"content": "a"}], "turn 1: Object missing required field role"),
        ([{"role": "human", "content": "a"}], "turn 0: Invalid value 'human' (role)"),
        ([{"role": "function", "name": "f", "content": "a"}], "turn 0: Invalid value 'function' (role)"),
        ([{"role": "user"}], "turn 0: Object missing required field content"),
        ([{"role": "user", "content": None}], "turn 0: Expected str | array, got null (content)"),
        ([{"role": "user", "content": {"text": "a"}}], "turn 0: Expected str | array, got object (content)"),
        ([{"role": "user", "content": 7}], "turn 0: Expected str | array, got int (content)"),
        ([{"role": "user", "content": ["a"]}], "turn 0: Expected object, got str (content[0])"),
        ([{"role": "user", "content": [{"type": "text", "value": "a"}]}], "missing required field text (content[0])"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "Invalid value 'image_url' (content[0].type)"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "Invalid value 'input_audio' (content[0].type)"),
        ([{**USER, "name": "Bob"}], "turn 0: a name is for tool turns alone"),
        ([USER, {"role": "assistant", "content": None}], "turn 1 (assistant) has neither content nor tool calls"),
        ([USER, {"role": "assistant"}], "turn 1 (assistant) has neither content nor tool calls"),
        ([USER, calling(CALL, reasoning_content=None), RESULT], "turn 1: Expected str, got null (reasoning_content)"),
        ([USER, calling(FUNCTION), RESULT], "turn 1: Object missing required field id (tool_calls[0])"),
        ([USER, calling({"id": "c0", **FUNCTION})], "missing required field function (tool_calls[0])"),
        ([USER, calling({**CALL, "id": ""})], "turn 1: Expected str of length >= 1 (tool_calls[0].id)"),
        (
            [USER, calling({**CALL, "function": {"name": "f", "arguments": None}})],
            "turn 1: Expected str | object, got null (tool_calls[0].function.arguments)",
        ),
        ([USER, {"role": "tool", "content": "r"}], "turn 1: Object missing required field tool_call_id"),
    ],
)
def test_what_a_template_renders_wrongly_is_rejected(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(BadPrompt) as caught:
        check_messages(messages, None)
    assert caught.value.reason == "bad_messages"
    assert words in caught.value.detail


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([TOOL, {"name": "f", "parameters": {}}], "tool 1: Object missing required field type"),
        ([{"type": "function", "function": {"name": ""}}], "tool 0: Expected str of length >= 1"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
            "tool 0: Expected object | null, got str",
        ),
        ([{"type": "retrieval", "function": {"name": "f"}}], "tool 0: Invalid enum value 'retrieval' (type)"),
    ],
)
def test_tools_that_are_no_functions_are_rejected(tools: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(BadPrompt) as caught:
        check_messages([USER], tools)
    assert caught.value.reason == "bad_tools"
    assert words in caught.value.detail


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\ude00\ud83d"])
def test_half_a_surrogate_pair_is_no_text(text: str) -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=REPO / "examples" / "tokenizer"))
    with pytest.raises(BadPrompt, match="bad_text: half of a surrogate pair"):
        tokenizer.render([{"role": "user", "content": text}], None)


@pytest.mark.parametrize("text", ["a\0b", "\0", "\ufffe\uffff\U0010ffff", "e\u0301\u200d\ufeff", "\r\n\u2028\x85\x1c"])
def test_odd_characters_come_through(text: str) -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=REPO / "examples" / "tokenizer"))
    rendered = tokenizer.render([{"role": "user", "content": text}], None)
    assert text in tokenizer.decode(tokenizer.encode([rendered])[0])


@pytest.mark.parametrize("text", ["a b " * 110_000, "x" * 450_000, "a" + " " * 450_000 + "b"])
def test_very_long_texts_come_through(text: str) -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=REPO / "examples" / "tokenizer"))
    rendered = tokenizer.render([{"role": "user", "content": text}], None)
    ids = tokenizer.encode([rendered])[0]
    assert tokenizer.decode(ids) == rendered
