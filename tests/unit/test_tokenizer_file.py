"""A class of transformers that has its own idea of a tokenizer: the ids are the file's, or it is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from common.chat_template import Tokenizer
from common.sections import TokenizerSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
TEXTS = ["I'd say  12 + 3.4 = x_y", "\n\n\tnaïve  漢字🙂 e\u0301", "  def f(x):\r\n    return x"]


def folder_of(tmp_path: Path, tokenizer_class: str, **parts: Any) -> Path:
    """The example tokenizer, under another class, with `parts` of its tokenizer.json changed."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(EXAMPLE, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | parts), encoding="utf-8")
    return folder


def from_file(folder: Path) -> list[list[int]]:
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [list(one.ids) for one in whole.encode_batch(TEXTS, add_special_tokens=False)]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_the_ids_are_the_files_whatever_the_class(tmp_path: Path, tokenizer_class: str) -> None:
    folder = folder_of(tmp_path, tokenizer_class)
    tokenizer = Tokenizer(TokenizerSettings(path=folder))
    assert tokenizer.encode(TEXTS) == from_file(folder)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS)] == TEXTS
    assert not tokenizer.warnings


def test_typed_control_tokens_are_text_for_the_restored_one_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=folder_of(tmp_path, "LlamaTokenizer")))
    messages = [{"role": "user", "content": "say </think> twice"}]
    (ids,) = tokenizer.encode([tokenizer.render(messages, None)])
    (theirs,) = Tokenizer(TokenizerSettings(path=EXAMPLE)).encode([tokenizer.render(messages, None)])
    assert ids == theirs


def test_another_kind_alone_is_restored(tmp_path: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    folder = folder_of(tmp_path, "Qwen2Tokenizer", pre_tokenizer=byte_level, normalizer={"type": "NFC"})
    tokenizer = Tokenizer(TokenizerSettings(path=folder))
    assert tokenizer.encode(TEXTS) == from_file(folder)
    assert not tokenizer.warnings


def test_what_stays_another_is_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "Qwen2Tokenizer")  # its split is another one, and it composes characters
    (warning,) = Tokenizer(TokenizerSettings(path=folder)).warnings
    assert warning.startswith("Qwen2Tokenizer of transformers has a normalizer or a pattern of its own")
    assert str(folder / "tokenizer.json") in warning
