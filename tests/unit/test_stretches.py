"""The ids of a text are those of its stretches between control tokens, or it is encoded whole."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from common.control_tokens import ControlTokens
from common.encoding import FastEncoder
from common.stretches import Stretches, can_cut
from tests.conftest import REPO, SHARED

FOLDERS = [
    REPO / "examples" / "tokenizer",
    *sorted((SHARED / "data" / "tokenizers").glob("kimi_like*")),
]
LETTERS = {letter: number for number, letter in enumerate("abcdefgh <>|_▁")}


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(request.param, local_files_only=True)


@pytest.fixture(scope="module")
def control(tokenizer: Any) -> ControlTokens:
    return ControlTokens(tokenizer.added_tokens_decoder, str(tokenizer.chat_template))


@pytest.fixture(scope="module")
def encoder(tokenizer: Any, control: ControlTokens) -> FastEncoder:
    return FastEncoder(tokenizer, control)


def whole(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


ODD = [
    "user",
    "\n",
    " ",
    "  \n\n ",
    "a",
    "'s",
    "e\u0301",
    "漢字",
    "\u2028",
    "\0",
    "🙂",
    "12345",
    "<|",
    "|>",
    "<|im_",
    "_end|>",
]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_text_has_the_ids_that_it_has_as_a_whole(
    tokenizer: Any, control: ControlTokens, encoder: FastEncoder, data: st.DataObject
) -> None:
    pieces = st.sampled_from([*ODD, *sorted(control.ids)[:12]]) | st.text(max_size=8)
    texts = data.draw(st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=6))
    assert can_cut(tokenizer.backend_tokenizer, control)
    for _ in range(3):  # new, seen once, and kept
        assert encoder.encode(texts) == whole(tokenizer, texts)


def test_what_comes_again_is_not_encoded_again(tokenizer: Any, control: ControlTokens) -> None:
    asked: list[str] = []
    name = next(iter(control.ids))

    def encode(texts: Any) -> list[list[int]]:
        asked.extend(texts)
        return [[len(text)] for text in texts]

    stretches = Stretches(control.ids, encode)
    for number in range(5):
        assert stretches.encode([f"{name}system{name}{number}", ""]) == [
            [control.ids[name], 6, control.ids[name], 1],
            [],
        ]
    assert asked == ["system", "0", "system", "1", "2", "3", "4"]


def test_what_is_kept_is_bounded(control: ControlTokens) -> None:
    lengths: list[int] = []

    def encode(texts: Any) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return [[1] for _ in texts]

    stretches = Stretches(control.ids, encode)
    for number in range(300):  # of 3 MB in all, the last is kept
        for _ in range(3):
            assert stretches.encode([f"{number:04}" * 2500]) == [[1]]
    assert len(lengths) == 600
    stretches.encode(["0000" * 2500])
    assert len(lengths) == 601
    for _ in range(3):
        stretches.encode(["a" * 200_000])
    assert len(lengths) == 604


def control_of(backend: Backend) -> ControlTokens:
    return ControlTokens(backend.get_added_tokens_decoder(), "")


def made(*tokens: AddedToken, model: Any = None, before: Any = None, normalizer: Any = None) -> Backend:
    backend = Backend(model or models.BPE(vocab=LETTERS, merges=[]))
    backend.pre_tokenizer = before or pre_tokenizers.Split(" ", "isolated")
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(tokens))
    return backend


PLAIN = AddedToken("<|a|>", special=True, normalized=False)


def test_a_tokenizer_is_cut_where_nothing_looks_across() -> None:
    for backend in (
        made(PLAIN),
        made(PLAIN, AddedToken("ab", normalized=True)),
        made(PLAIN, before=pre_tokenizers.ByteLevel(add_prefix_space=False)),
        made(PLAIN, normalizer=normalizers.NFC()),
    ):
        assert can_cut(backend, control_of(backend))


@pytest.mark.parametrize(
    "backend",
    [
        made(),
        made(AddedToken("<|a|>", special=True, normalized=False, lstrip=True)),
        made(AddedToken("<|a|>", special=True, normalized=False, rstrip=True)),
        made(AddedToken("<|a|>", special=True, normalized=False, single_word=True)),
        made(AddedToken("<|a|>", special=True, normalized=True)),
        made(PLAIN, AddedToken("b", rstrip=True)),
        made(PLAIN, AddedToken(">b")),
        made(PLAIN, AddedToken("b<")),
        made(PLAIN, AddedToken("a")),
        made(PLAIN, before=pre_tokenizers.Metaspace(prepend_scheme="first")),
        made(PLAIN, before=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        made(PLAIN, before=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace()])),
        made(PLAIN, normalizer=normalizers.Prepend("▁")),
        made(PLAIN, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])),
        made(PLAIN, model=models.BPE(vocab=LETTERS, merges=[], dropout=0.5)),
        made(PLAIN, model=models.Unigram([("a", 0.0), ("b", 0.0)], unk_id=0)),
    ],
)
def test_others_are_encoded_whole(backend: Backend) -> None:
    assert not can_cut(backend, control_of(backend))
