"""The quick way to render gives the library's text, or is not taken."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.chat_template import Tokenizer
from common.quick_template import Messages, Render, Tools, is_plain, quick_render
from common.sections import TokenizerSettings
from tests.conftest import REPO

TOKENIZER = REPO / "examples" / "tokenizer"
SYSTEM, USER = {"role": "system", "content": " Be exact.\n"}, {"role": "user", "content": "  <b>1 + 1\u2028= ?</b>\n"}
ANSWER = {"role": "assistant", "content": "\n{{ 2 }} "}
PLAIN: list[list[dict[str, str]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, {"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def library() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


def own_way(tokenizer: Any) -> Render:
    def render(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return text

    return render


@pytest.mark.parametrize("kwargs", [{}, {"thinking": False}, {"thinking": True, "nothing": [1]}])
@pytest.mark.parametrize("messages", PLAIN, ids=range(len(PLAIN)))
def test_the_text_is_the_librarys(library: Any, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> None:
    quick = quick_render(library, own_way(library), kwargs)
    assert quick is not None
    assert is_plain(messages)
    assert quick(messages, None, kwargs) == own_way(library)(messages, None, kwargs)
    tokenizer = Tokenizer(TokenizerSettings(path=TOKENIZER))
    assert tokenizer.render(messages, None, kwargs) == own_way(library)(messages, None, kwargs)


def test_reasoning_in_a_text_is_the_templates_affair(library: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "<think>\nr\n</think>\n\n2"}, USER]
    quick = quick_render(library, own_way(library), {})
    assert quick is not None
    assert quick(messages, None, {}) == own_way(library)(messages, None, {})


def test_what_the_library_itself_takes_is_left_to_it(library: Any) -> None:
    quick = quick_render(library, own_way(library), {})
    assert quick is not None
    assert quick([USER], None, {"chat_template": "{{ messages[0].role }}"}) == "user"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "tool", "content": "2"}],
        [{"role": "human", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "a", "name": "n"}],
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}, USER],
        [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER],
    ],
)
def test_all_else_is_not_plain(messages: list[dict[str, Any]]) -> None:
    assert not is_plain(messages)


class Adding(PreTrainedTokenizerFast):
    """A model's own class, which does more than the template says."""

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return f"{super().apply_chat_template(*args, **kwargs)}!"


def test_a_class_of_the_models_own_is_not_gone_around() -> None:
    tokenizer = Adding.from_pretrained(TOKENIZER, local_files_only=True)
    assert quick_render(tokenizer, own_way(tokenizer), {}) is None


def test_another_text_than_the_librarys_is_not_taken(library: Any) -> None:
    def other(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        return own_way(library)(messages, tools, kwargs).replace("2", "3")

    assert quick_render(library, other, {}) is None


def test_a_tokenizer_with_several_templates_renders_by_the_one_without_tools(tmp_path: Path, library: Any) -> None:
    library = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    library.chat_template = {"default": library.chat_template, "tool_use": "t"}
    quick = quick_render(library, own_way(library), {})
    assert quick is not None
    assert quick([USER], None, {}) == own_way(library)([USER], None, {}) != "t"
    assert quick([USER], [{}], {}) == "t"
