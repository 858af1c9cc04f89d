"""Ids of the stretches between control tokens, kept for those that come again.

The tokenizers library looks for added tokens first, and then handles what lies between them one by one: the ids of a
text are those of its stretches, one after the other. Role headers, system prompts and the declarations of tools are the
same in many prompts, and need no encoding anew. `can_cut` says of which tokenizers this holds.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.control_tokens import ControlTokens, any_of

# Pre-tokenizers and normalizers that look at nothing but the stretch itself. Metaspace looks for the start of the text.
_PRE_TOKENIZERS = frozenset({"Sequence", "Split", "ByteLevel", "Digits"})
_NORMALIZERS = frozenset({None, "NFC"})
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# What is kept at most: characters of stretches, and hashes of those that came once.
_MOST_CHARACTERS, _MOST_SEEN = 1_000_000, 20_000
_LONGEST = 100_000


def can_cut(backend: Any, control: ControlTokens) -> bool:
    """Whether the ids of a text are those of its stretches, for this tokenizer of the `tokenizers` library."""
    tokens = backend.get_added_tokens_decoder().values()
    cutting = [token for token in tokens if token.content in control.ids]
    others = [token.content for token in tokens if token.content not in control.ids]
    try:
        return (
            type(backend.model).__name__ == "BPE"
            and not backend.model.dropout
            and not backend.encode_special_tokens
            and len(cutting) == len(control.ids) > 0
            and not any(getattr(token, flag) for token in cutting for flag in _FLAGS)
            and not any(token.lstrip or token.rstrip or token.single_word for token in tokens)
            and not any(_overlap(token.content, other) for token in cutting for other in others)
            and _types(backend.normalizer) <= _NORMALIZERS
            and _types(backend.pre_tokenizer) <= _PRE_TOKENIZERS
        )
    except (AttributeError, TypeError, ValueError):  # another version of the library
        return False


def _overlap(one: str, other: str) -> bool:
    """Whether a text can hold both so that they share characters."""
    if one in other or other in one:
        return True
    lengths = range(1, min(len(one), len(other)))
    return any(one.endswith(other[:length]) or other.endswith(one[:length]) for length in lengths)


def _types(part: Any) -> set[str | None]:
    """The types of a part of a tokenizer and of all within it; one that puts a space in front counts as another."""
    if part is None:
        return {None}
    found: set[str | None] = set()
    open_parts = [msgspec.json.decode(part.__getstate__(), type=dict[str, Any])]
    while open_parts:
        facts = open_parts.pop()
        found.add("prefix" if facts.get("add_prefix_space") else facts["type"])
        for inner in ("pretokenizers", "normalizers"):
            open_parts += facts.get(inner, ())
    return found


class Stretches:
    """Encodes texts by stretches. `encode` is of texts without control tokens; it is given those that are new.

    Threads may share it: what one of them keeps is there for all, or encoded once more.
    """

    def __init__(self, control_ids: Mapping[str, int], encode: Callable[[Sequence[str]], list[list[int]]]) -> None:
        self._encode = encode
        self._control = {name: [token_id] for name, token_id in control_ids.items()}
        self._cut = re.compile(f"({any_of(control_ids)})")
        self._known: dict[str, list[int]] = dict(self._control)
        self._characters = 0
        self._seen: set[int] = set()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        known = self._known
        # Of each text its stretches, in place of those that are known their ids.
        cut = [[known.get(stretch, stretch) for stretch in self._cut.split(text) if stretch] for text in texts]
        new = [part for parts in cut for part in parts if isinstance(part, str)]
        encoded = self._encode(new) if new else []
        fresh = iter(encoded)
        made: list[list[int]] = []
        for parts in cut:
            ids: list[int] = []
            for part in parts:
                ids += next(fresh) if isinstance(part, str) else part
            made.append(ids)
        self._keep(new, encoded)
        return made

    def _keep(self, stretches: Sequence[str], encoded: Sequence[list[int]]) -> None:
        """Those that came before: what is said once is most often not said again."""
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        if self._characters > _MOST_CHARACTERS:
            self._known = dict(self._control)
            self._characters = 0
        for stretch, ids in zip(stretches, encoded, strict=True):
            number = hash(stretch)
            if number not in self._seen:
                self._seen.add(number)
            elif stretch not in self._known and len(stretch) <= _LONGEST:
                self._known[stretch] = ids
                self._characters += len(stretch)
