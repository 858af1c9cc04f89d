"""The ids of the tokens that steer an answer, as the model's own files name them.

A library may load them wrongly: transformers 5.5.0 took 163603 for the `<think>` of Kimi-K2.5, which is 163606
(huggingface/transformers#45356). Every prompt ended in the wrong token then, and nothing told it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import AddedToken

from common.errors import TokenizerUnavailable

_THINK, _THINK_END = "<think>", "</think>"
_TOOL = "tool"
_Kind = TypeVar("_Kind")


class SpecialIds(msgspec.Struct, frozen=True):
    """`end` are the ids that end an answer, the one that the template ends a turn with first; `tools` by name."""

    think: int | None
    think_end: int | None
    end: tuple[int, ...]
    tools: dict[str, int]


class _Added(msgspec.Struct):
    content: str
    id: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []


class _Config(msgspec.Struct):
    added_tokens_decoder: dict[str, _Added] = {}


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _ModelConfig(_Ends):
    text_config: _Ends | None = None


def added_tokens(folder: Path, tokenizer: Any) -> dict[int, Any]:
    """The tokens that stand beside the vocabulary, as AddedTokens by id: the library's, and those of the files.

    Kimi's own class tells the library of few, and reserves more names than its files list. Raises TokenizerUnavailable
    where the loaded tokenizer has a token at another id than the files say.
    """
    found = dict(tokenizer.added_tokens_decoder)
    for file, token_id, one in _named(folder):
        loaded = tokenizer.convert_tokens_to_ids(one.content)
        if loaded != token_id:
            raise TokenizerUnavailable(
                f"{folder / file} has {one.content} at id {token_id}, and the tokenizer as loaded has it at {loaded}: "
                "its prompts would not be the model's; use another version of transformers, or correct the file"
            )
        found.setdefault(
            token_id,
            AddedToken(one.content, special=one.special, lstrip=one.lstrip, rstrip=one.rstrip, normalized=False),
        )
    reserved = getattr(tokenizer, "special_tokens", None)
    for content, token_id in reserved.items() if isinstance(reserved, dict) else ():
        found.setdefault(token_id, AddedToken(content, special=True, normalized=False))
    return found


def _named(folder: Path) -> Iterator[tuple[str, int, _Added]]:
    """(file, id, token) of every token that a file of the folder adds to the vocabulary."""
    config = _read(folder / "tokenizer_config.json", _Config)
    for text, one in (config.added_tokens_decoder if config else {}).items():
        if text.isdecimal():
            yield "tokenizer_config.json", int(text), one
    tokenizer = _read(folder / "tokenizer.json", _Tokenizer)
    for one in tokenizer.added_tokens if tokenizer else []:
        if one.id is not None:
            yield "tokenizer.json", one.id, one


def _read(path: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # what is damaged here, and matters, the library has refused


def end_ids(folder: Path) -> tuple[str, tuple[int, ...]]:
    """The ids at which the model's server stops, and the file that says so; ("", ()) if none does."""
    generation = _read(folder / "generation_config.json", _Ends)
    model = _read(folder / "config.json", _ModelConfig)
    inner = model.text_config if model else None
    for file, one in (("generation_config.json", generation), ("config.json", model), ("config.json", inner)):
        if one is not None and one.eos_token_id is not None:
            ends = one.eos_token_id if isinstance(one.eos_token_id, list) else [one.eos_token_id]
            return file, tuple(ends)
    return "", ()


def find_special_ids(
    folder: Path, control_ids: Mapping[str, int], turn_end: str | None, eos_token_id: int | None
) -> tuple[SpecialIds, list[str]]:
    """The ids that steer an answer, and warnings about them.

    `turn_end` is the control token behind an answer in the template. Raises TokenizerUnavailable if an end of the
    model's files is none of the tokenizer's control tokens: then these are files of two models.
    """
    file, ends = end_ids(folder)
    names = {token_id: name for name, token_id in control_ids.items()}
    for token_id in ends:
        if token_id not in names:
            raise TokenizerUnavailable(
                f"{folder / file} ends an answer at id {token_id}, which is no control token of the tokenizer beside "
                "it; set [tokenizer] path to the model's own folder, with its own files"
            )
    warnings: list[str] = []
    ours = control_ids.get(turn_end or "")
    if not ends:
        ends = tuple(one for one in (ours, eos_token_id) if one is not None)[:1]
    elif ours is not None and ours not in ends:
        listed = ", ".join(f"{names[one]} ({one})" for one in ends)
        warnings.append(
            f"the chat template ends a turn with {turn_end} ({ours}), and {folder / file} names {listed} as the ends "
            "of an answer; see that both are the model's own"
        )
    ordered = sorted(dict.fromkeys(ends), key=lambda one: one != ours)
    tools = {name: token_id for name, token_id in control_ids.items() if _TOOL in name}
    return SpecialIds(control_ids.get(_THINK), control_ids.get(_THINK_END), tuple(ordered), tools), warnings


def control_marks(ids: list[int], control_ids: Mapping[str, int]) -> list[int]:
    """The control ids among `ids`, in their order."""
    known: set[Any] = set(control_ids.values())
    return [one for one in ids if one in known]
