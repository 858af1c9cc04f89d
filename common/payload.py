"""What Redis holds of a sample until it is settled: its prompt, ready to be spliced into a request and a record.

zstd of one line of JSON facts, a newline, and the prompt as a JSON array. The array is made once, by the feed, and is
never parsed again on its way to the server and into the segment: 5 us a body instead of 28 (1,000 ids).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zstandard

from common.turns import turns_left

# Level 1: 23 us for 1,000 ids, a third of plain JSON's memory; higher levels cost more and gain little on ids.
_LEVEL = 1
# The longest prompt that anybody served has some millions of ids at up to 8 bytes each.
_MAX_BYTES = 256 * 1024 * 1024


class Payload(msgspec.Struct, frozen=True):
    """A sample as the worker gets it; `input_ids` is the JSON array as bytes.

    `max_new_tokens` is its own where the context has no room for that of all, else None. A turn of a conversation whose
    every turn is made anew is number `turn`, from 0, of `turns`; others have None.
    """

    input_ids: bytes
    prompt_tokens: int
    largest_id: int
    meta: Mapping[str, Any]
    max_new_tokens: int | None = None
    turn: int | None = None
    turns: int | None = None

    @property
    def turns_left(self) -> int | None:
        """How many turns of its conversation are still to come; None if it is no turn of one."""
        return turns_left(self.turn, self.turns)


class _Facts(msgspec.Struct, omit_defaults=True):
    n: int
    top: int
    meta: dict[str, Any] = {}
    most: int | None = None
    turn: int | None = None
    turns: int | None = None


# What Packer.unpack raises on bytes that are no payload.
UNREADABLE = (zstandard.ZstdError, msgspec.DecodeError)
_facts = msgspec.json.Decoder(_Facts)


class Packer:
    """Packs and unpacks payloads; one a thread, since a zstd context serves one call at a time."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(
        self,
        input_ids: Sequence[int],
        meta: Mapping[str, Any],
        max_new_tokens: int | None = None,
        *,
        turn: int | None = None,
        turns: int | None = None,
    ) -> bytes:
        """Pack a prompt of at least one id; `meta` is the row's own id and labels."""
        facts = msgspec.json.encode(_Facts(len(input_ids), max(input_ids), dict(meta), max_new_tokens, turn, turns))
        return self._compressor.compress(facts + b"\n" + msgspec.json.encode(input_ids))

    def unpack(self, packed: bytes) -> Payload:
        """The payload again; raises one of UNREADABLE on bytes that are none."""
        raw = self._decompressor.decompress(packed, max_output_size=_MAX_BYTES)
        line, _, input_ids = raw.partition(b"\n")
        facts = _facts.decode(line)
        return Payload(input_ids, facts.n, facts.top, facts.meta, facts.most, facts.turn, facts.turns)
