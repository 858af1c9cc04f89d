"""How a model's answers are read, for workers, which have no tokenizer: `<output>/.answers-<fingerprint>`.

Written when a job is registered, by whoever has the tokenizer then, and named after tokenizer and template, so that a
worker takes the one that this job's prompts are made with. Workers share the output folder anyway.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zstandard

from common.answer_layout import THINK, THINK_END, Around, Layout, layout_of
from common.answers import Answer, read
from common.chat_template import Tokenizer
from common.control_tokens import any_of
from common.durable import make_folder, replace_file
from common.token_bytes import UNKNOWN
from common.tool_calls import FORMATS, LLAMA

_UNCLOSED = ("no_think_end",)
# The facts of a job carry the packed reading under this name until it is registered.
READING = "reading"
_MAX_BYTES = 64 * 1024 * 1024


# A broken id stands for so many U+FFFD at most, and a character has a broken id or more.
_MOST_BROKEN = 4
_BROKEN_CHARACTERS = ("\ufffd", "\0")
# A model may speak of U+FFFD, and write it: fewer than these do not matter.
MIN_BROKEN, MIN_BROKEN_SHARE = 3, 0.05


class Parts(NamedTuple):
    """What an answer has, as far as its flags go: whether there is text in its reasoning (None: no think block).

    `content` is that there is a content, or a tool call; `damages` are those of common/answers.py but the last.
    `broken_share` of its characters are U+FFFD or NUL; 0 if they are too few to matter.
    """

    reasoning: bool | None
    content: bool
    damages: tuple[str, ...] = ()
    broken_share: float = 0.0


class _Packed(msgspec.Struct):
    control: dict[int, str]
    end: list[int]
    think_by_id: bool
    opened: str | None
    tools: str | None
    around: Around
    takes_objects: bool
    takes_null: bool
    thinks: bool
    broken: list[int]  # the ids that are no whole characters, or no token
    blank: list[int]  # those that are white space
    lengths: bytes  # of each id's bytes, as unsigned numbers of 2 bytes, little-endian
    joined: bytes  # these bytes, one after the other


class Reading:
    """The layout of a model's answers, and the bytes of its ids; serves any number of threads."""

    def __init__(self, packed: bytes, vocab_size: int = 0) -> None:
        """From what pack() made; ids below `vocab_size` that are no token stand for U+FFFD.

        Raises one of UNREADABLE for other bytes.
        """
        kept = msgspec.msgpack.decode(_decompressed(packed), type=_Packed)
        lengths, at = array("H", kept.lengths), 0
        self._bytes: list[bytes] = []
        for length in lengths:
            self._bytes.append(kept.joined[at : at + length])
            at += length
        unknown = vocab_size - len(self._bytes)
        self._bytes += [UNKNOWN] * unknown
        self._broken = frozenset([*kept.broken, *range(len(self._bytes) - max(0, unknown), len(self._bytes))])
        self._blank = frozenset(kept.blank)
        self._control = frozenset(kept.control)
        ids_of = {name: token_id for token_id, name in kept.control.items()}
        self._marks = ids_of.get(THINK, -1), ids_of.get(THINK_END, -1)
        names = set(kept.control.values())
        tools = next((one for one in FORMATS if one.name == kept.tools), None)
        missing = [mark for mark in tools.marks if mark not in names] if tools and tools is not LLAMA else []
        self.layout = Layout(
            control=kept.control,
            end=frozenset(kept.end),
            think_by_id=kept.think_by_id,
            opened=kept.opened,
            tools=tools,
            tags=re.compile(any_of(missing)) if missing else None,
            around=kept.around,
            takes_objects=kept.takes_objects,
            takes_null=kept.takes_null,
        )
        self.thinks = kept.thinks

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, U+FFFD for bytes that are none."""
        return b"".join(map(self._bytes.__getitem__, ids)).decode("utf-8", "replace")

    def read(self, output_ids: Sequence[int], prompt_end: Sequence[int]) -> Answer:
        """The answer; `prompt_end` are the last ids of its prompt, the last control token among them."""
        return read(output_ids, self.layout, self.decode, self.layout.behind_think(prompt_end, self.decode))

    def parts(self, output_ids: Sequence[int], prompt_end: Sequence[int], *, truncated: bool) -> Parts:
        """What there is to flag in an answer: by its ids alone where they tell, else it is read."""
        opened = self.layout.behind_think(prompt_end, self.decode)
        return self._plain_parts(output_ids, opened=opened is not None) or _parts(
            read(output_ids, self.layout, self.decode, opened), truncated=truncated
        )

    def _plain_parts(self, ids: Sequence[int], *, opened: bool) -> Parts | None:
        """Of an answer that is nothing but reasoning and text, each with few broken ids; None for any other."""
        layout = self.layout
        if layout.tags is not None or not layout.think_by_id or layout.tools is LLAMA:
            return None
        body = ids[:-1] if ids and ids[-1] in layout.end else ids
        if not self._broken.isdisjoint(body):
            broken = sum(map(self._broken.__contains__, body)) * _MOST_BROKEN
            if broken >= MIN_BROKEN and broken >= MIN_BROKEN_SHARE * len(body):
                return None
        found = self._control.intersection(body)
        if not found:
            has_text = self._has_text(body, 0, len(body))
            return Parts(has_text, False, _UNCLOSED) if opened else Parts(None, has_text)
        think, think_end = self._marks
        if found != ({think_end} if opened else {think, think_end}) or any(body.count(one) > 1 for one in found):
            return None
        if not opened and body[0] != think:
            return None
        end = body.index(think_end)
        return Parts(self._has_text(body, 0 if opened else 1, end), self._has_text(body, end + 1, len(body)))

    def _has_text(self, ids: Sequence[int], start: int, stop: int) -> bool:
        return any(ids[place] not in self._blank for place in range(start, stop))


UNREADABLE = (zstandard.ZstdError, msgspec.MsgspecError)


def pack(tokenizer: Tokenizer) -> bytes:
    """What a Reading is made of; empty if the tokenizer does not tell the bytes of its ids."""
    table = tokenizer.token_bytes()
    if table is None:
        return b""
    layout = layout_of(tokenizer)
    kept = _Packed(
        control=layout.control,
        end=sorted(layout.end),
        think_by_id=layout.think_by_id,
        opened=layout.opened,
        tools=layout.tools.name if layout.tools else None,
        around=layout.around,
        takes_objects=layout.takes_objects,
        takes_null=layout.takes_null,
        thinks=any(mark in tokenizer.template_text for mark in (THINK, THINK_END)),
        broken=[one for one, text in enumerate(table) if _is_broken(text)],
        blank=[one for one, text in enumerate(table) if not (_is_broken(text) or text.decode().strip())],
        lengths=array("H", map(len, table)).tobytes(),
        joined=b"".join(table),
    )
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(kept))


def reading_path(output: Path, facts: Mapping[str, Any]) -> Path | None:
    """Where the reading of a job with these facts is kept; None if they do not say what its prompts are made with."""
    made = [str(facts.get(name, ""))[:16] for name in ("tokenizer_sha256", "template_sha256")]
    return output / f".answers-{'-'.join(made)}" if all(made) else None


def packed_for(output: Path, facts: Mapping[str, Any], tokenizer: Tokenizer) -> bytes:
    """What keep_reading() is to write; empty if it is there already."""
    path = reading_path(output, facts)
    return b"" if path is None or path.exists() else pack(tokenizer)


def keep_reading(output: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the reading that `facts` carry, if any; answers the facts without it. Raises OSError."""
    rest = dict(facts)
    packed, path = rest.pop(READING, b""), reading_path(output, facts)
    if packed and path is not None:
        make_folder(output)
        replace_file(path, [packed])
    return rest


def find_reading(output: Path, facts: Mapping[str, Any]) -> Reading | None:
    """The reading that a worker needs; None if there is none. Raises OSError, and one of UNREADABLE."""
    path = reading_path(output, facts)
    try:
        packed = path.read_bytes() if path else b""
    except FileNotFoundError:
        packed = b""
    return Reading(packed, int(facts.get("vocab_size") or 0)) if packed else None


def _is_broken(text: bytes) -> bool:
    try:
        return any(one in text.decode() for one in _BROKEN_CHARACTERS)
    except UnicodeDecodeError:
        return True


def _parts(answer: Answer, *, truncated: bool) -> Parts:
    reasoning = None if answer.reasoning is None else bool(answer.reasoning.strip())
    calls = [call["function"]["arguments"] for call in answer.tool_calls]
    texts = [answer.reasoning or "", answer.content, *calls]
    characters = sum(map(len, texts))
    broken = sum(text.count(one) for text in texts for one in _BROKEN_CHARACTERS)
    if truncated and broken and any(text.endswith("\ufffd") for text in texts):
        broken -= 1  # a character that was cut in two
    matter = broken >= MIN_BROKEN and broken >= MIN_BROKEN_SHARE * characters
    share = round(broken / characters, 4) if matter else 0.0
    damages = tuple(one for one in answer.damages if one != "replacement_character")
    return Parts(reasoning, bool(answer.content.strip() or calls), damages, share)


def _decompressed(packed: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_BYTES)
