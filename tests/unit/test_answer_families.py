"""Every family's own way to think and to call tools is read, and comes back from a template of its kind."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from common.answers import parse, survival
from common.chat_template import Tokenizer
from common.messages import check_messages
from tests.unit.answer_models import END, ids_of, make, template, typed
from tests.unit.test_answers import check_spans

USER = [{"role": "user", "content": "How is the weather?"}]
THINK, HERMES = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
# As Qwen3's own: newlines around everything, reasoning kept behind the last question only.
QWEN = template(
    "{%- if loop.last or messages[loop.index0 + 1].role == 'tool' -%}"
    "{{ '<think>\\n' ~ (message.reasoning_content or '').strip('\\n') ~ '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ (message.content or '').lstrip('\\n') }}"
    "{%- for call in message.tool_calls or [] -%}{{ '\\n' if message.content or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{%- endfor -%}"
)
# As Qwen3-Coder's and those since: arguments are objects, and a value stands on lines of its own.
CODER = template(
    "{{ message.content or '' }}{%- for call in message.tool_calls or [] -%}"
    "{{ '\\n\\n' if message.content and loop.first else '' if loop.first else '\\n' }}"
    "{{ '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    "{%- for key, value in call.function.arguments | items -%}"
    "{{ '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}{%- endfor -%}"
)


def bar(name: str) -> str:
    return f"<\uff5c{name}\uff5c>".replace("_", "\u2581")


BEGIN, CALL, SEP, CALL_END, CALLS_END = (
    bar(name) for name in ("tool_calls_begin", "tool_call_begin", "tool_sep", "tool_call_end", "tool_calls_end")
)
DEEPSEEK = (*THINK, BEGIN, CALL, SEP, CALL_END, CALLS_END)
# As DeepSeek-V3.1's: old reasoning is left out, and what closes it stands in front of every answer.
V31 = template(
    "{{ '</think>' ~ (message.content or '') }}{%- for call in message.tool_calls or [] -%}"
    "{%- if loop.first -%}" + BEGIN + "{%- endif -%}"
    "{{ '" + CALL + "' ~ call.function.name ~ '" + SEP + "' ~ call.function.arguments ~ '" + CALL_END + "' }}"
    "{%- if loop.last -%}" + CALLS_END + "{%- endif -%}{%- endfor -%}",
    prompt="<think>",
)
# As DeepSeek-R1's: the arguments are a block of Markdown, and reasoning is left out without a trace.
R1 = template(
    "{{ message.content or '' }}{%- for call in message.tool_calls or [] -%}"
    "{{ '" + BEGIN + "' if loop.first else '\\n' }}"
    "{{ '" + CALL + "function" + SEP + "' ~ call.function.name ~ '\\n```json\\n' ~ call.function.arguments }}"
    "{{ '\\n```" + CALL_END + "' }}{%- if loop.last -%}" + CALLS_END + "{%- endif -%}{%- endfor -%}",
    prompt="{{ '<think>\\n' }}",
)
# As Mistral-Small-3.1's: what the calls are is JSON of the template's own, and an id has nine letters.
MISTRAL = template(
    "{%- if message.tool_calls -%}{{ '[TOOL_CALLS] [' }}{%- for call in message.tool_calls -%}"
    "{%- if call.id | length != 9 -%}{{ raise_exception('nine') }}{%- endif -%}"
    "{{ (call.function | tojson)[:-1] ~ ', \"id\": \"' ~ call.id ~ '\"}' ~ (']' if loop.last else ', ') }}"
    "{%- endfor -%}{%- else -%}{{ message.content }}{%- endif -%}"
)
MISTRAL_11 = template(
    "{{ message.content or '' }}{%- for call in message.tool_calls or [] -%}"
    "{{ '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments }}{%- endfor -%}"
)
LLAMA = template(
    "{%- if message.tool_calls -%}{%- set call = message.tool_calls[0].function -%}"
    "{{ '{\"name\": \"' ~ call.name ~ '\", \"parameters\": ' ~ (call.arguments | tojson) ~ '}' }}"
    "{%- else -%}{{ message.content }}{%- endif -%}"
)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen": (QWEN, (*THINK, *HERMES)),
    "qwen_plain": (QWEN, ()),  # whose marks are text
    "coder": (CODER, HERMES),
    "v31": (V31, DEEPSEEK),
    "r1": (R1, DEEPSEEK),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",)),
    "mistral_11": (MISTRAL_11, ("[TOOL_CALLS]", "[ARGS]")),
    "llama": (LLAMA, ("<|python_tag|>",)),
}
Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """The small model of a family."""
    loaded: dict[str, Tokenizer] = {}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = make(tmp_path_factory.mktemp(name), *MODELS[name])
        return loaded[name]

    return load


def f_and_g(f: Any, g: Any) -> list[tuple[str, Any]]:
    return [("f", f), ("g", g)]


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content", "calls", "end"),
    [
        ("qwen", "<think>\nHm.\n\nSo.\n</think>\n\nIt rains.", "Hm.\n\nSo.", "It rains.", [], "whole"),
        ("qwen", "<think>\n\n</think>\n\nIt rains.", "", "It rains.", [], "whole"),
        ("qwen", "It rains.", None, "It rains.", [], "changed"),  # the template adds an empty think block
        (
            "qwen",
            (
                '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>\n'
                '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
            ),
            "Hm.",
            "I look.",
            f_and_g({"a": 1}, {}),
            "whole",
        ),
        (
            "coder",
            (
                "I look.\n\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n x\n\ny\n"
                "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
            ),
            None,
            "I look.",
            f_and_g({"a": "1", "b": " x\n\ny"}, {}),
            "whole",
        ),
        (
            "v31",
            f'Hm.</think>I look.{BEGIN}{CALL}f{SEP}{{"a":1}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{CALLS_END}',
            "Hm.",
            "I look.",
            f_and_g({"a": 1}, {}),
            "reasoning_dropped",
        ),
        ("v31", "Hm.</think>It rains.", "Hm.", "It rains.", [], "reasoning_dropped"),
        (
            "r1",
            (
                f'Hm.\n</think>\n\nI look.{BEGIN}{CALL}function{SEP}f\n```json\n{{"a":1}}\n```{CALL_END}\n'
                f"{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
            ),
            "Hm.",
            "I look.",
            f_and_g({"a": 1}, {}),
            "reasoning_dropped",
        ),
        ("r1", "Hm.\n</think>\n\nIt rains.", "Hm.", "It rains.", [], "reasoning_dropped"),
        (
            "mistral",
            (
                '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefgh1"}, '
                '{"name": "g", "arguments": {}, "id": "abcdefgh2"}]'
            ),
            None,
            "",
            f_and_g({"a": 1}, {}),
            "whole",
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            None,
            "",
            f_and_g({"a": 1}, {}),
            "changed",  # the template writes ids
        ),
        (
            "mistral_11",
            'I look.[TOOL_CALLS]f[ARGS]{"a":1}[TOOL_CALLS]g[ARGS]{}',
            None,
            "I look.",
            f_and_g({"a": 1}, {}),
            "whole",
        ),
        ("mistral_11", 'I look.[TOOL_CALLS]f{"a":1}', None, "I look.", [("f", {"a": 1})], "changed"),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', None, "", [("f", {"a": 1})], "whole"),
        (
            "llama",
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            None,
            "",
            f_and_g({"a": 1}, {}),
            "changed",
        ),
        ("llama", '{"name": "Ann"}', None, '{"name": "Ann"}', [], "whole"),
        ("llama", "It rains.", None, "It rains.", [], "whole"),
    ],
)
def test_a_familys_own_answers_are_read(
    load: Load, name: str, text: str, reasoning: str | None, content: str, calls: list[tuple[str, Any]], end: str
) -> None:
    tokenizer = load(name)
    ids = ids_of(tokenizer, text + END)
    answer = parse(ids, tokenizer)
    check_spans(answer, ids)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    names = [call["function"]["name"] for call in answer.tool_calls]
    assert list(zip(names, answer.arguments(), strict=True)) == calls
    assert answer.damages == ()
    assert survival(USER, answer, ids, tokenizer) == end


def test_reasoning_of_earlier_turns_that_is_left_out_is_told(load: Load) -> None:
    tokenizer = load("qwen")
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "rain"},
    ]
    for before, text, end in (
        (loop, "<think>\nSo.\n</think>\n\nIt rains.", "whole"),
        ([*loop, *USER], "<think>\nSo.\n</think>\n\nIt rains.", "whole"),
        ([*loop, *USER], "It rains.", "changed"),
    ):
        ids = ids_of(tokenizer, text + END)
        assert survival([*USER, *before], parse(ids, tokenizer), ids, tokenizer) == end


def test_marks_of_plain_text_are_found_in_the_text(load: Load) -> None:
    tokenizer = load("qwen_plain")
    text = '<think>\nHm.\n</think>\n\nI call.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = ids_of(tokenizer, text + END)
    answer = parse(ids, tokenizer)
    check_spans(answer, ids)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("Hm.", "I call.", 1)
    assert answer.damages == ()
    # `>` and the newline behind it are one token here, so that a mark's ids hold the newline, too.
    texts = [(span.kind, tokenizer.decode(ids[span.start : span.stop])) for span in answer.spans]
    assert texts == [
        ("control", "<think>\n"),
        ("think", "Hm.\n"),
        ("control", "</think>\n"),
        ("answer", "\nI call.\n"),
        ("control", "<tool_call>\n"),
        ("tool_call", '{"name": "f", "arguments": {}}\n'),
        ("control", "</tool_call>" + END),
    ]
    assert survival(USER, answer, ids, tokenizer) == "whole"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "damages"),
    [
        ("<think>\nHm.<", "Hm.<", "", ("no_think_end",)),
        ("<think>\nHm. <think>\n</think>\n\nSo </think> ends.", "Hm. <think>", "So </think> ends.", ()),
        ("It is called <think>.", None, "It is called <think>.", ()),
        ("<think>ü\U0001f9ff</think>ü\U0001f9ff", "ü\U0001f9ff", "ü\U0001f9ff", ()),
    ],
)
def test_a_think_block_of_plain_text_opens_at_the_head_and_closes_once(
    load: Load, text: str, reasoning: str | None, content: str, damages: tuple[str, ...]
) -> None:
    tokenizer = load("qwen_plain")
    ids = ids_of(tokenizer, text)
    answer = parse(ids, tokenizer)
    check_spans(answer, ids)
    assert (answer.reasoning, answer.content, answer.damages) == (reasoning, content, damages)


def test_a_prompt_of_plain_text_may_have_opened_the_block(load: Load) -> None:
    tokenizer = load("qwen_plain")
    prompt = ids_of(tokenizer, "<|im_start|>assistant\n<think>\n")
    answer = parse(ids_of(tokenizer, "Hm.\n</think>\n\nSo."), tokenizer, input_ids=prompt)
    assert (answer.reasoning, answer.content, answer.damages) == ("Hm.", "So.", ())


def test_marks_that_are_spelled_out_are_content_where_they_have_ids(load: Load) -> None:
    tokenizer = load("qwen")
    said = 'Write <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> behind </think>.'
    answer = parse([*ids_of(tokenizer, "<think>\nHm.\n</think>\n\n"), *typed(tokenizer, said)], tokenizer)
    assert (answer.reasoning, answer.content, answer.tool_calls, answer.damages) == ("Hm.", said, [], ())


@pytest.mark.parametrize("name", MODELS)
def test_whatever_a_model_writes_is_read(load: Load, name: str) -> None:
    tokenizer = load(name)
    marks = [
        *tokenizer.control_ids,
        *THINK,
        *HERMES,
        '{"name": "f", "arguments": {}}',
        "{",
        "\n\n",
        "\ufffd",
        "\U0001f9ff",
    ]
    chance = random.Random(5)
    for _ in range(200):
        ids = ids_of(tokenizer, "".join(chance.choices(marks, k=chance.randrange(12))))
        answer = parse(ids, tokenizer)
        check_spans(answer, ids)
        check_messages([*USER, answer.message()], None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", "<tool_call>\n{}\n</tool_call>"),
        ("qwen", '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": " ", "arguments": {}}\n</tool_call>'),
        ("qwen", "<tool_call>\n" + "[" * 30_000 + "\n</tool_call>"),
        ("coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("coder", "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>"),
        ("v31", f"</think>{BEGIN}{CALL}f{SEP}{{{CALL_END}{CALLS_END}"),
        ("r1", f"</think>{BEGIN}{CALL}function{CALL_END}{CALLS_END}"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("mistral_11", "[TOOL_CALLS]f"),
        ("llama", "<|python_tag|>print(1)"),
    ],
)
def test_calls_that_are_no_json_are_named(load: Load, name: str, text: str) -> None:
    tokenizer = load(name)
    ids = ids_of(tokenizer, text + END)
    answer = parse(ids, tokenizer)
    check_spans(answer, ids)
    assert answer.damages == ("tool_call_not_json",)
