"""Answers that others recorded, written as Kimi writes them, are read again and come back from its template."""

from typing import Any

import msgspec
import pytest

from common.answers import parse, survival
from common.chat_template import Tokenizer
from common.sections import DatasetSettings, TokenizerSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, convert
from tests.conftest import SHARED
from tests.unit.answer_models import ids_of
from tests.unit.test_answers import check_spans

PROMPTS = SHARED / "data" / "prompts"
KIMI = SHARED / "data" / "tokenizers" / "kimi_like_8k_sparse"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


@pytest.fixture(scope="module")
def kimi() -> Tokenizer:
    if not KIMI.is_dir():
        pytest.skip("the Kimi tokenizers lie beside the project, and are not there")
    return Tokenizer(TokenizerSettings(path=KIMI))


def called(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose id and arguments are as Kimi writes them."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    own = call["id"] if ":" in call["id"] else f"functions.{name}:{call['id']}"
    return {"id": own, "type": "function", "function": {"name": name, "arguments": text}}


def as_kimi(message: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The answer as Kimi writes it, and its calls."""
    calls = [called(call) for call in message.get("tool_calls") or []]
    text = "".join(
        f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{call['function']['arguments']}<|tool_call_end|>"
        for call in calls
    )
    section = f"{SECTION}{text}{SECTION_END}" if calls else ""
    reasoning = message.get("reasoning_content") or ""
    return f"{reasoning}</think>{message['content'] or ''}{section}<|im_end|>", calls


@pytest.mark.parametrize(
    ("file", "turns", "thinking", "calling", "whole"),
    [
        ("openai_tools/llamafactory_reason_tool_use_50.jsonl", 112, 112, 53, 53),
        ("openai_tools/specforge_tool_use_conversation.jsonl", 6, 0, 5, 6),
        ("openai_tools/taubench_gpt4o_airline.json", 240, 0, 104, 240),
        ("reasoning/xtuner_qwen35_tokenize_data.jsonl", 27, 12, 9, 17),
        ("reshaped/mixture_of_thoughts_shape.jsonl", 50, 50, 0, 0),
        ("reshaped/openthoughts114k_shape.jsonl", 50, 50, 0, 0),
    ],
)
def test_recorded_answers_come_back(
    kimi: Tokenizer, file: str, turns: int, thinking: int, calling: int, whole: int
) -> None:
    path = PROMPTS / file
    source = DatasetSettings(name="A", path=path)
    found = [0, 0, 0, 0]
    for row in read_rows(path, Cursor()):
        try:
            prompt = convert(row.value, source, whole=True)
        except BadRow:
            continue
        for number, message in enumerate(prompt.messages):
            if message["role"] != "assistant":
                continue
            text, calls = as_kimi(dict(message))
            ids = ids_of(kimi, text)
            answer = parse(ids, kimi)
            check_spans(answer, ids)
            assert answer.reasoning == (message.get("reasoning_content") or "")
            assert answer.content == (message["content"] or "")
            assert answer.tool_calls == calls
            assert set(answer.damages) <= {"replacement_character", "tool_call_not_json"}
            kept = survival(prompt.messages[:number], answer, ids, kimi, tools=prompt.tools)
            assert kept != "changed"
            counted = (True, bool(answer.reasoning), bool(calls), kept == "whole")
            found = [count + one for count, one in zip(found, counted, strict=True)]
    assert found == [turns, thinking, calling, whole]
