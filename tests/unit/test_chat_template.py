"""The ids of a prompt are those of transformers' own `apply_chat_template`, on every prompt that there is."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from common.chat_template import Tokenizer
from common.errors import TokenizerUnavailable
from common.sections import DatasetSettings, TokenizerSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.rows import BadRow, Prompt, convert
from tests.conftest import REPO, SHARED

EXAMPLES = REPO / "examples"
EXAMPLE_TOKENIZER = EXAMPLES / "tokenizer"
SPARSE = SHARED / "data" / "tokenizers" / "kimi_like_8k_sparse"
USER = {"role": "user", "content": "a"}


def load(path: Path, **more: Any) -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=path, **more))


def library(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


@pytest.fixture(scope="module")
def example() -> Tokenizer:
    return load(EXAMPLE_TOKENIZER)


@pytest.fixture(scope="module")
def example_library() -> Any:
    return library(EXAMPLE_TOKENIZER)


@pytest.fixture(scope="module")
def sparse() -> Tokenizer:
    """Kimi's template and special ids over a vocabulary of 8,448 with a hole in it."""
    if not SPARSE.is_dir():
        pytest.skip("the Kimi tokenizer lies beside the project, and is not there")
    return load(SPARSE)


@pytest.fixture(scope="module")
def sparse_library(sparse: Tokenizer) -> Any:
    return library(SPARSE)


def prompts(file: Path, **more: Any) -> Iterator[Prompt]:
    """The prompts of a file; rows that are none are another test's."""
    source = DatasetSettings(name="A", path=file, **more)
    for row in read_rows(file, Cursor()):
        try:
            yield convert(row.value, source)
        except BadRow:
            continue


def own_ids(tokenizer: Any, prompt: Prompt, **kwargs: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        list(prompt.messages),
        tools=prompt.tools,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
        **kwargs,
    )
    return ids


def our_ids(tokenizer: Tokenizer, *many: Prompt) -> list[list[int]]:
    return tokenizer.encode([tokenizer.render(one.messages, one.tools) for one in many])


@pytest.mark.parametrize(("name", "rows"), [("chat", 143), ("code", 102), ("tools", 101)])
def test_example_prompts_get_the_librarys_own_ids(
    example: Tokenizer, example_library: Any, name: str, rows: int
) -> None:
    many = list(prompts(EXAMPLES / "prompts" / f"{name}.jsonl"))
    assert len(many) == rows
    assert our_ids(example, *many) == [own_ids(example_library, one) for one in many]


def test_a_template_argument_reaches_the_template(example_library: Any) -> None:
    without = load(EXAMPLE_TOKENIZER, chat_template_kwargs={"thinking": False})
    many = list(prompts(EXAMPLES / "prompts" / "code.jsonl"))
    ids = our_ids(without, *many)
    assert ids == [own_ids(example_library, one, thinking=False) for one in many]
    think, end_think = example_library.convert_tokens_to_ids(["<think>", "</think>"])
    assert {tuple(one[-2:]) for one in ids} == {(think, end_think)}


def test_a_vocabulary_with_holes_is_bounded_by_its_largest_id(sparse: Tokenizer, sparse_library: Any) -> None:
    assert len(sparse_library) == 8448
    assert sparse.vocab_size == 163840


def test_the_vocabulary_is_that_of_the_model_unless_the_configuration_names_it(tmp_path: Path) -> None:
    assert load(EXAMPLE_TOKENIZER).vocab_size == 4096
    assert load(EXAMPLE_TOKENIZER, vocab_size=5000).vocab_size == 5000
    folder = copy(tmp_path, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert load(folder).vocab_size == 4096
    for config, size in (
        ('{"vocab_size": 4160}', 4160),
        ('{"text_config": {"vocab_size": 4224}}', 4224),
        ('{"vocab_size": 0}', 4096),
    ):
        (folder / "config.json").write_text(config)
        assert load(folder).vocab_size == size


def test_ids_do_not_depend_on_what_else_is_encoded(example: Tokenizer) -> None:
    texts = ["a", "", "ü" * 3000, "<|im_start|>user\nx<|im_end|>", " " * 5000]
    assert example.encode(texts) == [example.encode([text])[0] for text in texts]
    assert example.encode([]) == []
    assert example.encode([""]) == [[]]


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    folder = copy(tmp_path, *FILES)
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    file.write_text(json.dumps(settings))
    short, long = load(folder).encode(["a", "a b c d e f g h"])
    assert len(short) == 1
    assert len(long) > 4


def test_decoding_gives_the_text_with_its_control_tokens(example: Tokenizer) -> None:
    text = example.render([USER], None)
    assert example.decode(example.encode([text])[0]) == text
    assert text.endswith("<|im_start|>assistant\n<think>")


def test_the_fingerprint_names_files_and_template(tmp_path: Path) -> None:
    first = load(EXAMPLE_TOKENIZER).fingerprint()
    folder = copy(tmp_path, *FILES)
    assert load(folder).fingerprint() == first
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# a comment #}")
    changed = load(folder).fingerprint()
    assert changed["tokenizer_sha256"] == first["tokenizer_sha256"]
    assert changed["template_sha256"] != first["template_sha256"]
    assert all(len(value) == 64 for value in changed.values())


def test_a_tokenizer_without_a_fast_form_gives_the_librarys_own_ids(tmp_path: Path) -> None:
    slow = ByT5Tokenizer()
    slow.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    slow.save_pretrained(tmp_path)
    ours, own = load(tmp_path), library(tmp_path)
    assert not own.is_fast
    many = list(prompts(EXAMPLES / "prompts" / "chat.jsonl"))[:20]
    ids = our_ids(ours, *many)
    assert ids == [own_ids(own, one) for one in many]
    assert own.eos_token_id not in {one[-1] for one in ids}


FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


def copy(folder: Path, *names: str) -> Path:
    """A tokenizer folder with these files of the example's."""
    made = folder / "tokenizer"
    made.mkdir()
    for name in names:
        shutil.copy(EXAMPLE_TOKENIZER / name, made / name)
    return made


def without(*left_out: str) -> Callable[[Path], Path]:
    return lambda folder: copy(folder, *(name for name in FILES if name not in left_out))


def written(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        made = copy(folder, *FILES)
        (made / name).write_text(text)
        return made

    return make


def a_file(folder: Path) -> Path:
    file = folder / "tokenizer.json"
    file.write_text("{}")
    return file


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda folder: folder / "none", "is not a folder; name the model's own folder", id="missing"),
        pytest.param(a_file, "is not a folder; name the model's own folder", id="a file"),
        pytest.param(lambda folder: folder, "does not load (", id="an empty folder"),
        pytest.param(without("tokenizer.json"), "does not load (", id="no tokenizer.json"),
        pytest.param(written("tokenizer.json", "{"), "does not load (", id="tokenizer.json cut off"),
        pytest.param(written("tokenizer.json", "{}"), "does not load (", id="tokenizer.json empty"),
        pytest.param(written("tokenizer.json", "<html>"), "does not load (", id="tokenizer.json a page"),
        pytest.param(written("tokenizer_config.json", "{"), "does not load (", id="tokenizer_config.json cut off"),
        pytest.param(written("config.json", "{"), "does not load (", id="config.json cut off"),
        pytest.param(
            written("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'),
            "trust_remote_code = true",
            id="a tokenizer of code",
        ),
        pytest.param(
            without("chat_template.jinja"), "has no chat template; copy chat_template.jinja", id="no template"
        ),
        pytest.param(written("chat_template.jinja", "{% if %}"), "makes no prompt of a simple", id="a broken template"),
        pytest.param(
            written("chat_template.jinja", "{{ raise_exception('no\\nsuch\\nthing') }}"),
            "makes no prompt of a simple question (TemplateError: no); check",
            id="a template that refuses",
        ),
    ],
)
def test_a_folder_that_is_no_tokenizer_is_told_in_one_sentence(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    folder = make(tmp_path)
    with pytest.raises(TokenizerUnavailable) as caught:
        load(folder)
    told = str(caught.value)
    assert caught.value.exit_code == 4
    assert str(folder) in told
    assert words in told
    assert "\n" not in told
    assert len(told) < 400 + 2 * len(str(folder))


def test_a_template_argument_that_cannot_be_is_told_in_one_sentence() -> None:
    with pytest.raises(TokenizerUnavailable, match=r"check its chat template and \[tokenizer\] chat_template_kwargs$"):
        load(EXAMPLE_TOKENIZER, chat_template_kwargs={"tokenize": True})
