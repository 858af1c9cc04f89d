"""Rows to payloads: what fits, what is cut to fit, and what is rejected, each row for itself."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.chat_template import Tokenizer
from common.errors import TokenizerUnavailable
from common.payload import Packer
from common.sections import DatasetSettings, SamplingSettings, TokenizerSettings
from producer.datasets.cursor import Cursor, Row
from producer.prepare import Chunk, Limits, prepare
from tests.conftest import REPO

DATASET = DatasetSettings(name="A", path="a.jsonl")
UNBOUND = Limits(4096, None, 64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=REPO / "examples" / "tokenizer"))


def prepared(tokenizer: Tokenizer, rows: list[Any], limits: Limits = UNBOUND) -> Chunk:
    many = [Row(index, row, Cursor(index + 1)) for index, row in enumerate(rows)]
    return prepare(many, DATASET, tokenizer, limits, Packer())


def ids_of(chunk: Chunk) -> dict[int, list[int]]:
    return {index: msgspec.json.decode(Packer().unpack(packed).input_ids) for index, packed in chunk.samples}


def asked(chunk: Chunk) -> dict[int, int | None]:
    return {index: Packer().unpack(packed).max_new_tokens for index, packed in chunk.samples}


def reasons(chunk: Chunk) -> dict[int, str]:
    return {reject.index: reject.reason for reject in chunk.rejects}


def question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_more_rows_than_are_encoded_together_keep_their_ids(tokenizer: Tokenizer) -> None:
    rows: list[Any] = [question(f"What is {n}?") for n in range(400)]
    rows[40] = {"input_ids": [1, 2, 3]}
    rows[41] = b"{"
    rows[64] = {"messages": []}

    chunk = prepared(tokenizer, rows)

    assert sorted(reasons(chunk)) == [41, 64]
    assert [index for index, _ in chunk.samples] == [n for n in range(400) if n not in {41, 64}]
    ids = ids_of(chunk)
    assert ids.pop(40) == [1, 2, 3]
    for index, one in ids.items():
        assert one == tokenizer.encode([tokenizer.render(rows[index]["messages"], None)])[0]
        assert chunk.prompts[index] == len(one)


def test_no_rows_are_no_chunk(tokenizer: Tokenizer) -> None:
    assert prepared(tokenizer, []) == Chunk([], {}, [])


def test_half_a_surrogate_pair_costs_its_own_row_alone(tokenizer: Tokenizer) -> None:
    chunk = prepared(tokenizer, [question("a"), question("a\ud800"), question("b")])
    assert reasons(chunk) == {1: "bad_text"}
    assert set(ids_of(chunk)) == {0, 2}


def test_a_typed_control_token_costs_nothing(tokenizer: Tokenizer) -> None:
    chunk = prepared(tokenizer, [question("a<|im_end|>"), question("a")])
    ids = ids_of(chunk)
    assert reasons(chunk) == {}
    assert [ids[0].count(4090), ids[1].count(4090)] == [1, 1]


@pytest.mark.parametrize(
    ("fit", "context", "asks", "reason"),
    [
        ("reject", 10 + 64, None, None),
        ("reject", 10 + 63, None, "too_long"),
        ("cut", 10 + 66, None, None),
        ("cut", 10 + 65, 63, None),  # the server ends an answer two tokens before the context is full
        ("cut", 10 + 7, 5, None),
        ("cut", 10 + 6, None, "too_long"),  # it takes no such prompt
        ("cut", 10, None, "too_long"),
        ("reject", None, None, None),
        ("cut", None, None, None),
    ],
)
def test_a_prompt_and_its_answer_fit_the_context(
    tokenizer: Tokenizer, fit: Any, context: int | None, asks: int | None, reason: str | None
) -> None:
    chunk = prepared(tokenizer, [{"input_ids": [7] * 10, "id": "r"}], Limits(4096, context, 64, fit))
    assert reasons(chunk) == ({} if reason is None else {0: reason})
    assert asked(chunk) == ({0: asks} if reason is None else {})
    assert [reject.id for reject in chunk.rejects] == ["r"] * (reason is not None)


def test_how_a_prompt_fits_is_not_sent_to_the_server() -> None:
    assert SamplingSettings(fit="cut").params() == SamplingSettings().params()
    assert "fit" not in SamplingSettings().params()


LETTERS = "".join(map(chr, range(0x20, 0x180))) + "\0\t\r\n\u0301\u2028\ufb01\u6f22\U0001f642"


def tokenizer_of(letters: str, folder: Path) -> Tokenizer:
    """One that knows these letters, and raises at all others."""
    words = Backend(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.add_special_tokens(["<|end|>"])
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=words, eos_token="<|end|>")
    made.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    made.save_pretrained(folder)
    return Tokenizer(TokenizerSettings(path=folder))


def test_a_text_that_the_tokenizer_refuses_costs_its_own_row_alone(tmp_path: Path) -> None:
    chunk = prepared(tokenizer_of(LETTERS, tmp_path), [question("a"), question("a\u2603"), question("b")])
    assert reasons(chunk) == {1: "bad_text"}
    said = "cannot encode it: Exception: WordLevel error: Missing [UNK] token from the vocabulary"
    assert chunk.rejects[0].detail.endswith(said)
    assert set(ids_of(chunk)) == {0, 2}


@pytest.mark.parametrize("letter", ["B", "\u6f22"])
def test_a_tokenizer_that_refuses_any_text_is_told_in_one_sentence(tmp_path: Path, letter: str) -> None:
    with pytest.raises(TokenizerUnavailable, match=r"makes no ids of a simple text \(the tokenizer cannot encode it: "):
        tokenizer_of(LETTERS.replace(letter, ""), tmp_path)
