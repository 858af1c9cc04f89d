"""The tokens that steer an answer are what the model's files say, and arguments that change nothing are told."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.chat_template import Tokenizer
from common.errors import TokenizerUnavailable
from common.sections import TokenizerSettings
from common.special_ids import SpecialIds
from common.template_kwargs import template_variables
from tests.conftest import REPO, SHARED

EXAMPLE = REPO / "examples" / "tokenizer"
KIMI = SHARED / "data" / "tokenizers" / "kimi_like_8k_sparse"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
TOOLS = {"<tool_call>": 4094, "</tool_call>": 4095}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example tokenizer, to be changed."""
    for name in FILES:
        shutil.copy(EXAMPLE / name, tmp_path / name)
    return tmp_path


def load(folder: Path, **kwargs: Any) -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=folder, chat_template_kwargs=kwargs))


def write(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))


def test_the_ids_that_steer_an_answer_are_found() -> None:
    tokenizer = load(EXAMPLE)
    assert tokenizer.special_ids == SpecialIds(think=4092, think_end=4093, end=(4090,), tools=TOOLS)
    assert tokenizer.warnings == []


def test_those_of_kimi_are_found() -> None:
    if not KIMI.is_dir():
        pytest.skip("the Kimi tokenizer lies beside the project, and is not there")
    found = load(KIMI).special_ids
    assert (found.think, found.think_end, found.end) == (163606, 163607, (163586,))
    assert sorted(found.tools.values()) == [163595, 163596, 163597, 163598, 163599]


def test_the_template_says_how_an_answer_ends_where_no_file_does(folder: Path) -> None:
    (folder / "config.json").unlink()
    write(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert load(folder).special_ids.end == (4090,)


def test_the_generation_config_says_how_an_answer_ends(folder: Path) -> None:
    write(folder, "generation_config.json", eos_token_id=[4088, 4090])
    tokenizer = load(folder)
    assert tokenizer.special_ids.end == (4090, 4088)
    assert tokenizer.warnings == []


def test_a_template_that_ends_a_turn_otherwise_is_warned_of(folder: Path) -> None:
    write(folder, "generation_config.json", eos_token_id=4088)
    tokenizer = load(folder)
    assert tokenizer.special_ids.end == (4088,)
    (warning,) = tokenizer.warnings
    assert "ends a turn with <|im_end|> (4090)" in warning
    assert "names <|endoftext|> (4088) as the ends" in warning


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        (
            "generation_config.json",
            {"eos_token_id": 163586},
            "ends an answer at id 163586, which is no control token of the tokenizer beside it; set",
        ),
        (
            "config.json",
            {"eos_token_id": None, "text_config": {"eos_token_id": [4090, 17]}},
            "ends an answer at id 17, which is no control token of the tokenizer beside it; set",
        ),
    ],
)
def test_files_of_two_models_are_told_in_one_sentence(
    folder: Path, file: str, values: dict[str, Any], words: str
) -> None:
    write(folder, file, **values)
    with pytest.raises(TokenizerUnavailable) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder / file} {words}")
    assert "\n" not in str(caught.value)


def test_a_token_that_the_library_loads_with_another_id_is_told(folder: Path) -> None:
    """As transformers 5.5.0 did with the `<think>` of Kimi-K2.5: 163603 for 163606."""
    added = {
        "4091": {"content": "<think>", "special": False, "lstrip": False, "rstrip": False},
        "4090": {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False},
    }
    write(folder, "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(
        TokenizerUnavailable, match=r"has <think> at id 4091, and the tokenizer as loaded has it at 4092"
    ) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_control_token_that_is_not_encoded_as_one_is_told(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for one in tokenizer["added_tokens"]:
        one["single_word"] = one["content"] == "<think>"  # found between words alone, and `</think>2` is none
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<think>' ~ reasoning", "<think>x' ~ reasoning"))
    write(folder, "tokenizer.json", added_tokens=tokenizer["added_tokens"])
    with pytest.raises(TokenizerUnavailable, match=r"gives other ids than its files say to .*<think>.*; use another"):
        load(folder)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"thinking": False}, None),
        ({"thinking": True}, None),  # it says what holds anyway
        ({"enable_thinking": False}, "enable_thinking = False changes no prompt; did you mean thinking, which"),
        ({"thinking": False, "thinkng": False}, "thinkng = False changes no prompt; did you mean thinking, which"),
        ({"thinking": "false"}, "thinking = 'false' changes no prompt; its template reads it, but not as a text"),
        ({"reasoning_effort": "high"}, "does not know it (it reads thinking)"),
    ],
)
def test_an_argument_that_changes_nothing_is_told(kwargs: dict[str, Any], words: str | None) -> None:
    warnings = load(EXAMPLE, **kwargs).warnings
    assert len(warnings) == (words is not None)
    assert all(words is not None and words in warning and "\n" not in warning for warning in warnings)


def test_an_argument_that_matters_with_tools_alone_is_no_misspelling(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if tools and few %}few{% endif %}")
    assert load(folder, few=True).warnings == []
    (warning,) = load(folder, fews=True).warnings
    assert "did you mean few, which" in warning


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% set a = b %}{{ a ~ c }}{{ messages }}{{ bos_token }}{{ range(2) }}", {"b", "c"}),
        ("{% for m in messages %}{% generation %}{{ x }}{% endgeneration %}{% break %}{% endfor %}", {"x"}),
        ("{% if tools %}{% set a = 1 %}{% endif %}{{ a }}{% if b is not defined %}{% set b = 1 %}{% endif %}", {"b"}),
        ("{% if %}", set()),
    ],
)
def test_the_arguments_of_a_template_are_read_from_it(template: str, names: set[str]) -> None:
    assert template_variables(template) == names
