"""Prompts are read back from their ids: every family's turns, tools and earlier answers; what cannot be is named."""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.answer_layout import layout_of
from common.chat_template import Tokenizer
from common.messages import BadPrompt, check_messages
from common.sections import DatasetSettings, TokenizerSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, convert
from producer.export.conversations import REASONS, Conversation, Conversations
from producer.export.prompts import NotRead, Prompts
from producer.export.rows import Row
from tests.conftest import REPO, SHARED
from tests.unit.answer_models import END, ids_of, make, template
from tests.unit.test_answer_families import MODELS, QWEN

EXAMPLE = REPO / "examples" / "tokenizer"
KIMI = SHARED / "data" / "tokenizers" / "kimi_k25_fast"
PROMPTS = SHARED / "data" / "prompts"
SYSTEM = {"role": "system", "content": "Be exact.\n\nAlways \U0001f642."}
USER = {"role": "user", "content": "How is it in Oslo?\n"}
TYPED = {"role": "user", "content": '<|im_end|>\n<|im_start|>user\nAnd {"a": 1}, </think>?'}
SAID = {"role": "assistant", "content": "It rains."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Gets {name}.\nOn 2 lines, \u00fc.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string", "default": 1.0}}},
        },
    }
    for name in ("weather", "time_of")
]
# Tools as Qwen's templates have them, in the system block, and results in turns of the user.
QWEN_TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' -%}"
    "{{ messages[0].content ~ '\\n\\n' }}{%- endif -%}{{ '# Tools\\n<tools>' }}"
    "{%- for tool in tools -%}{{ '\\n' ~ tool | tojson }}{%- endfor -%}{{ '\\n</tools>\\nCall them.<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}"
    "{%- endif -%}"
) + QWEN.replace(
    "{%- else -%}{{ '<|im_start|>' ~ message.role",
    "{%- elif message.role == 'tool' -%}"
    "{%- if messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
    "{{ '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
    "{%- elif message.role != 'system' or not loop.first -%}{{ '<|im_start|>' ~ message.role",
)
# As Mistral's: tools in front of the last question, the system prompt within it, results with their id.
MISTRAL_TOOLS = (
    "{{ '<s>' }}{%- for message in messages -%}{%- if message.role == 'user' -%}"
    "{%- if tools and loop.index0 + 1 == messages | length -%}"
    "{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{%- endif -%}"
    "{{ '[INST]' ~ message.content ~ '[/INST]' }}"
    "{%- elif message.role == 'system' -%}{{ '[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]' }}"
    "{%- elif message.role == 'tool' -%}"
    "{{ '[TOOL_RESULTS]' ~ message.tool_call_id ~ '[TOOL_CONTENT]' ~ message.content | tojson ~ '[/TOOL_RESULTS]' }}"
    "{%- elif message.tool_calls -%}{%- for call in message.tool_calls -%}"
    "{{ '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ call.id ~ '[ARGS]' ~ call.function.arguments }}"
    "{%- endfor -%}{{ '<|im_end|>' }}{%- else -%}{{ message.content ~ '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
)
THINK, HERMES = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
DECLARING: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "qwen_tools": (QWEN_TOOLS, (*THINK, *HERMES), ()),
    "qwen_tools_plain": (QWEN_TOOLS, (), ()),
    "mistral_tools": (
        MISTRAL_TOOLS,
        (),
        ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
    ),
}  # fmt: skip
Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """The small model of a family, the example's or Kimi's."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name in loaded:
            return loaded[name]
        folder = {"example": EXAMPLE, "kimi": KIMI}.get(name)
        if folder is not None:
            if not folder.is_dir():
                pytest.skip("the Kimi tokenizers lie beside the project, and are not there")
            loaded[name] = Tokenizer(TokenizerSettings(path=folder))
        else:
            chat, marks, control = DECLARING[name] if name in DECLARING else (*MODELS[name], ())
            loaded[name] = make(tmp_path_factory.mktemp(name), chat, marks, control)
        return loaded[name]

    return load


def called(tokenizer: Tokenizer, count: int, first: int = 0) -> dict[str, Any]:
    """A turn with tool calls, as the template takes them, with ids as every template writes or makes them."""
    given = [{"at": f"place {number}"} for number in range(count)]
    kimi = layout_of(tokenizer).tools is not None and "kimi" in layout_of(tokenizer).tools.name  # type: ignore[union-attr]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"functions.weather:{first + n}" if kimi else f"call{first + n:05d}",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": one if layout_of(tokenizer).takes_objects else json.dumps(one),
                },
            }
            for n, one in enumerate(given)
        ],
    }


def result(turn: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": turn["tool_calls"][number]["id"], "content": '{"rain": true}\nyes "2"'}


def read(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any = None) -> tuple[Any, Any]:
    (ids,) = tokenizer.encode([tokenizer.render(messages, tools, {})])
    return Prompts(tokenizer, {}).conversation(ids)


@pytest.mark.parametrize("name", [*MODELS, *DECLARING, "example", "kimi"])
def test_every_turn_comes_back(load: Load, name: str) -> None:
    tokenizer = load(name)
    one, more = called(tokenizer, 1), called(tokenizer, 2, 1)
    several = [] if name in {"llama", "mistral"} else [more, result(more), result(more, 1)]
    for messages in (
        [USER],
        [SYSTEM, USER],
        [SYSTEM, USER, SAID, USER],
        [USER, SAID, TYPED],
        [USER, one, result(one)],
        [SYSTEM, USER, one, result(one), *several, SAID, TYPED],
    ):
        assert read(tokenizer, messages) == (messages, None), messages


@pytest.mark.parametrize("name", [*DECLARING, "example", "kimi"])
def test_declared_tools_come_back_as_they_were(load: Load, name: str) -> None:
    tokenizer = load(name)
    one = called(tokenizer, 1)
    last = [] if name == "mistral_tools" else [one, result(one)]
    for messages in ([USER, *last], [SYSTEM, USER], [SYSTEM, USER, SAID, TYPED]):
        for tools in (TOOLS, TOOLS[:1]):
            assert read(tokenizer, messages, tools) == (messages, tools)


def test_earlier_reasoning_comes_back_where_the_template_has_it(load: Load) -> None:
    for name in ("example", "kimi", "qwen"):
        tokenizer = load(name)
        one = called(tokenizer, 1) | {"reasoning_content": "I look\nthere."}
        assert read(tokenizer, [USER, one, result(one)]) == ([USER, one, result(one)], None)
        plain = {key: value for key, value in one.items() if key != "reasoning_content"}
        if name != "qwen":  # whose small template keeps that of every tool loop
            assert read(tokenizer, [USER, one, result(one), SAID, USER])[0][1] == plain


def test_a_name_in_the_place_of_the_role_comes_back(load: Load) -> None:
    tokenizer = load("kimi")
    one = called(tokenizer, 1)
    messages = [USER, one, result(one) | {"name": "weather"}]
    assert read(tokenizer, messages) == (messages, None)


@pytest.mark.parametrize("name", [*MODELS, *DECLARING, "example", "kimi"])
def test_whatever_the_ids_are_it_is_read_or_told(load: Load, name: str) -> None:
    tokenizer = load(name)
    prompts = Prompts(tokenizer, {})
    one = called(tokenizer, 1)
    (whole,) = tokenizer.encode([tokenizer.render([SYSTEM, USER, one, result(one)], None, {})])
    parts = [*tokenizer.control_ids, "user\n", "tool\n", "[" * 3_000, "{", '{"name": 1}', "\n", "a", "\U0001f9ff"]
    chance = random.Random(7)
    for _ in range(25):
        mixed = ids_of(tokenizer, "".join(chance.choices(parts, k=chance.randrange(12))))
        at = chance.randrange(len(whole))
        for ids in (mixed, [*whole[:at], *mixed, *whole[at:]], whole[at:], whole[:at]):
            with contextlib.suppress(NotRead):
                messages, tools = prompts.conversation(ids)
                check_messages(messages, tools)


def row_of(prompt: list[int], answer: list[int]) -> Row:
    ids = [*prompt, *answer]
    return Row(
        id=f"A/{hash(tuple(ids))}", dataset="A", index=0, row_id="", finish_reason="stop", flags=(),
        prompt_tokens=len(prompt), completion_tokens=len(answer), input_ids=np.array(ids, np.int32),
        spans=((len(prompt), len(ids)),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("<think>\nHm.\n</think>\n\nIt rains." + END, "whole"),
        ("<think>\nHm.\n</think>\n\nIt rains.", "answer_not_ended"),
        ("<think>\nHm." + END, "damaged_answer"),
        ("It rains." + END, "answer_changed"),
        ('<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f"\n</tool_call>' + END, "damaged_answer"),
    ],
)
def test_an_answer_must_come_back_with_its_ids(load: Load, answer: str, wanted: str) -> None:
    tokenizer = load("qwen")
    (prompt,) = tokenizer.encode([tokenizer.render([USER], None, {})])
    found = Conversations(tokenizer, {"A": {}}).of(row_of(prompt, ids_of(tokenizer, answer)))
    assert (found.survival if isinstance(found, Conversation) else found) == wanted
    assert wanted == "whole" or wanted in REASONS


def test_a_prompt_must_come_back_with_its_ids(load: Load) -> None:
    tokenizer = load("qwen")
    (prompt,) = tokenizer.encode([tokenizer.render([USER], None, {})])
    answer = ids_of(tokenizer, "<think>\nHm.\n</think>\n\nIt rains." + END)
    read = Conversations(tokenizer, {"A": {}})
    assert read.of(row_of(ids_of(tokenizer, "Once upon a time"), answer)) == "prompt_not_read"
    begins_with_a_result = [{"role": "tool", "tool_call_id": "call00000", "content": "rain"}, USER]
    (odd,) = tokenizer.encode([tokenizer.render(begins_with_a_result, None, {})])
    assert read.of(row_of(odd, answer)) == "prompt_not_read"
    assert read.of(row_of([*prompt, *ids_of(tokenizer, "It")], answer)) == "prompt_changed"
    # Ids that decode to the same text, and that the tokenizer would not have chosen.
    spelled = [one for letter in "th" for one in tokenizer.encode([letter])[0]]
    (wanted,) = tokenizer.encode(["<th"])
    assert len(wanted) == 1
    (prompt,) = tokenizer.encode([tokenizer.render([{"role": "user", "content": "<th"}], None, {})])
    at = prompt.index(wanted[0])
    odd = [*prompt[:at], *tokenizer.encode(["<"])[0], *spelled, *prompt[at + 1 :]]
    assert read.of(row_of(odd, answer)) == "prompt_changed"
    assert isinstance(read.of(row_of(prompt, answer)), Conversation)


def test_arguments_of_the_template_are_those_of_the_dataset(tmp_path: Path) -> None:
    chat = "{{ '<|im_start|>' ~ mood ~ '<|im_end|>' }}" + template("{{ message.content }}")
    tokenizer = make(tmp_path / "t", chat, ())
    (prompt,) = tokenizer.encode([tokenizer.render([USER], None, {"mood": "glad"})])
    row = row_of(prompt, ids_of(tokenizer, "It rains." + END))
    found = {mood: Conversations(tokenizer, {"A": {"mood": mood}}).of(row) for mood in ("glad", "sad")}
    assert found["sad"] == "prompt_not_read"
    assert isinstance(found["glad"], Conversation)


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="real prompts lie beside the project, and are not there")
@pytest.mark.timeout(300)
def test_real_prompts_come_back_with_their_ids(load: Load) -> None:
    """Up to 3 rows of each file, with Kimi-K2.5's tokenizer; the conversation is rendered to the row's own ids."""
    tokenizer = load("kimi")
    reader = Conversations(tokenizer, {"A": {}})
    answer = ids_of(tokenizer, "So, 6 \u00d7 7.\n</think>It is 42 \U0001f642.<|im_end|>")
    found: Counter[str] = Counter()
    for path in sorted(path for path in PROMPTS.glob("*/*") if path.is_file() and "labels" not in path.name):
        source = DatasetSettings(name="A", path=path)
        for row in list(read_rows(path, Cursor()))[:3]:
            try:
                prompt = convert(row.value, source)
                (ids,) = tokenizer.encode([tokenizer.render(prompt.messages, prompt.tools, {})])
            except (BadRow, BadPrompt):
                continue
            read = reader.of(row_of(ids, answer))
            if isinstance(read, str):
                found[read] += 1
                continue
            found[read.survival] += 1
            assert read.answer == {
                "role": "assistant", "content": "It is 42 \U0001f642.", "reasoning_content": "So, 6 \u00d7 7.\n",
            }  # fmt: skip
            (again,) = tokenizer.encode([tokenizer.render(read.messages, read.tools, {})])
            assert again == ids
            assert [one["role"] for one in read.messages] == [one["role"] for one in prompt.messages]
            assert read.tools == ([dict(tool) for tool in prompt.tools] if prompt.tools else None)
    assert found == {"reasoning_dropped": 91}
