"""Every prompt of every real file, on real tokenizers: in batches the ids are those of the library, one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.chat_template import Tokenizer
from common.sections import DatasetSettings, TokenizerSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, Prompt, convert
from tests.conftest import SHARED

TOKENIZERS = SHARED / "data" / "tokenizers"
PROMPTS = SHARED / "data" / "prompts"
FILES = sorted(str(path.relative_to(PROMPTS)) for path in PROMPTS.glob("*/*"))
CONTROL_IDS, THINK = range(163584, 163840), 163606

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FILES, reason="real prompts and the Kimi tokenizers lie beside the project"),
]


@pytest.fixture(scope="module", params=["kimi_k25_fast", "kimi_like_8k_sparse"])
def folder(request: pytest.FixtureRequest) -> Path:
    return TOKENIZERS / str(request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=folder))


@pytest.fixture(scope="module")
def library(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def conversations(file: Path) -> Iterator[Prompt]:
    """The prompts of a file; rows that are none are another test's."""
    source = DatasetSettings(name="A", path=file)
    for row in read_rows(file, Cursor()):
        try:
            prompt = convert(row.value, source)
        except BadRow:
            continue
        if prompt.messages:
            yield prompt


def own_ids(library: Any, prompt: Prompt) -> list[int]:
    ids: list[int] = library.apply_chat_template(
        list(prompt.messages), tools=prompt.tools, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return ids


@pytest.mark.parametrize("file", FILES)
def test_every_prompt_gets_the_librarys_own_ids(tokenizer: Tokenizer, library: Any, file: str) -> None:
    many = list(conversations(PROMPTS / file))
    texts = [tokenizer.render(one.messages, one.tools) for one in many]
    for prompt, text, ids in zip(many, texts, tokenizer.encode(texts), strict=True):
        own = own_ids(library, prompt)
        assert ids[-1] == THINK
        if not text.typed:
            assert ids == own
            continue
        # The library takes what a user typed for control, so its ids are of the same text, and have more control ids.
        assert tokenizer.decode(ids) == tokenizer.decode(own) == text
        assert sum(one in CONTROL_IDS for one in own) - sum(one in CONTROL_IDS for one in ids) == len(text.typed)


def test_there_are_prompts_and_a_typed_control_token_among_them(tokenizer: Tokenizer) -> None:
    many = [one for file in FILES for one in conversations(PROMPTS / file)]
    typed = [one for one in many if tokenizer.render(one.messages, one.tools).typed]
    assert len(many) > 2800
    assert 1 <= len(typed) < 10
