"""A prompt survives its way through Redis, id by id."""

from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.payload import Packer

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)
# What JSON can hold: text without lone surrogates, finite numbers.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
metas = st.dictionaries(text, values, max_size=4)


@settings(deadline=None)
@given(input_ids=ids, meta=metas)
def test_a_payload_comes_back_as_it_was(input_ids: list[int], meta: dict[str, Any]) -> None:
    packer = Packer()

    payload = packer.unpack(packer.pack(input_ids, meta))

    assert msgspec.json.decode(payload.input_ids) == input_ids
    assert payload.prompt_tokens == len(input_ids)
    assert payload.largest_id == max(input_ids)
    assert payload.meta == meta
    assert payload.max_new_tokens is None


@settings(deadline=None)
@given(prompts=st.lists(ids, min_size=1, max_size=5))
def test_one_packer_serves_many_prompts(prompts: list[list[int]]) -> None:
    packer = Packer()

    packed = [packer.pack(input_ids, {}) for input_ids in prompts]

    assert [msgspec.json.decode(packer.unpack(one).input_ids) for one in packed] == prompts


def test_a_prompt_may_have_a_max_new_tokens_of_its_own() -> None:
    packer = Packer()
    assert packer.unpack(packer.pack([1], {"id": 1}, 17)).max_new_tokens == 17
    assert packer.unpack(packer.pack([1], {"id": 1}, 17)).meta == {"id": 1}


def test_the_ids_can_be_spliced_into_a_request() -> None:
    packer = Packer()
    payload = packer.unpack(packer.pack([151644, 0, 7], {"id": "row\n1"}))

    body = b'{"input_ids":' + payload.input_ids + b"}"

    assert body == b'{"input_ids":[151644,0,7]}'
    assert payload.meta == {"id": "row\n1"}


def test_a_long_prompt_comes_back_and_takes_less_room_than_json() -> None:
    input_ids = [index * 7919 % 163840 for index in range(200_000)]
    packed = Packer().pack(input_ids, {})

    assert msgspec.json.decode(Packer().unpack(packed).input_ids) == input_ids
    assert len(packed) < len(msgspec.json.encode(input_ids)) / 2


def test_a_prompt_without_ids_is_refused() -> None:
    with pytest.raises(ValueError):
        Packer().pack([], {})


def test_bytes_that_are_no_payload_are_refused() -> None:
    packer = Packer()
    packed = packer.pack([1, 2, 3], {"id": 1})

    with pytest.raises(zstandard.ZstdError):
        packer.unpack(b"no payload")
    with pytest.raises(zstandard.ZstdError):
        packer.unpack(packed[:-1])
    with pytest.raises(msgspec.DecodeError):
        packer.unpack(zstandard.ZstdCompressor().compress(b"[1, 2, 3]"))
