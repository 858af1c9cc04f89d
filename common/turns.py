"""Samples of conversations of which every assistant turn is made anew (`turns = "all"`): their indices.

Turn `turn` of the row at `row` is the sample `TURNS * row + turn`, so that a record's index says whose turn it is, and
the indices of a row are its own whatever the others hold.
"""

from collections.abc import Collection, Sequence
from zlib import crc32

import msgspec

# The ledger keeps 6 bytes an index in one Redis string of 512 MB: 64 turns a row make 384 bytes a row, and leave room
# for 1,398,101 rows. With 256 it would be 1.5 KB a row, and the string would end at row 349,525.
TURNS = 64
MAX_ROWS = 512 * 2**20 // 6 // TURNS


def index_of(row: int, turn: int) -> int:
    """The sample of a turn, counted from 0 in its row."""
    return TURNS * row + turn


def row_of(index: int) -> int:
    """The row of such a sample in its source."""
    return index // TURNS


def turn_of(index: int) -> int:
    """Which turn of its row such a sample is."""
    return index % TURNS


def turns_left(turn: int | None, turns: int | None) -> int | None:
    """How many of a conversation's turns come after this one; None if it is no turn of such a conversation."""
    return None if turn is None or turns is None else max(0, turns - turn - 1)


class Made(msgspec.Struct, frozen=True, array_like=True):
    """An answer as the ledger keeps it until it is followed by the next turn.

    `prompt_crc32` tells whether a prompt that is made anew after a recovery is the one that was answered.
    """

    prompt_crc32: int
    output_ids: list[int]

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)


unpack_made = msgspec.msgpack.Decoder(Made).decode


def to_follow(left: int | None, flags: Collection[str], input_ids: bytes, output_ids: Sequence[int]) -> bytes:
    """The answer, packed, for the turn that is to follow it; empty where none does, as after one that was truncated.

    `input_ids` is the JSON array that was sent.
    """
    return Made(crc32(input_ids), list(output_ids)).pack() if is_followed(left, flags) else b""


def is_followed(left: int | None, flags: Collection[str]) -> bool:
    """Whether another turn follows, of the `left` ones that are still to come."""
    return bool(left) and "truncated" not in flags
