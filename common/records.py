"""One line of a segment: a record, or a void that takes a record back."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from common.turns import turns_left

# Bounds for what is read back, so that a line that was never ours cannot break a recovery: the ledger keeps 6 bytes
# for each index in one Redis string of 512 MB at most, and sums in 64 bits. Trainers hold ids in 32 bits.
Index = Annotated[int, msgspec.Meta(ge=0, lt=512 * 2**20 // 6)]
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Turn = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted answer, exactly as the model read and wrote it.

    `input_ids` and `output_ids` are token ids; the end token, where the model wrote one, is the last output id.
    `index` is the row's position in its source, `attempt` the ledger's number of the attempt that made the answer,
    `meta` the row's own id and labels. `finish_reason` is "stop" or "length"; `flags` names what is
    odd: "truncated" (it ended by length), "clipped" (by a smaller length than was asked for), "max_new_tokens_cut" (its
    prompt left no room in the context for the max_new_tokens of all, and less was asked for; an answer that ended
    within is whole), "uncounted" (it does not count against the cap), and those of common/flags.py. What there is to
    say of a flag beyond its name stands in `flag_details`, by flag.

    Of a conversation whose every assistant turn is made anew, this is turn number `turn`, counted from 0, of `turns`;
    `index` is then that of common/turns.py. `parent` is the index of the turn before it, whose answer stands in these
    `input_ids` as the template renders it. Other records have none of the three.
    """

    dataset: str
    index: Index
    sample_id: str
    attempt: Attempt
    input_ids: list[TokenId]
    output_ids: list[TokenId]
    finish_reason: str
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens
    latency_seconds: float
    server: str
    created_at: str
    flags: list[str]
    meta: dict[str, Any]
    flag_details: dict[str, Any] = {}
    parent: Index | None = None
    turn: Turn | None = None
    turns: Turn | None = None


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A record on its way into a segment: `input_ids` is the JSON array that was sent, spliced in unparsed."""

    dataset: str
    index: int
    sample_id: str
    attempt: int
    input_ids: msgspec.Raw
    output_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    latency_seconds: float
    server: str
    created_at: str
    flags: tuple[str, ...]
    meta: Mapping[str, Any]
    flag_details: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    parent: int | msgspec.UnsetType = msgspec.UNSET
    turn: int | msgspec.UnsetType = msgspec.UNSET
    turns: int | msgspec.UnsetType = msgspec.UNSET


class Voided(msgspec.Struct, frozen=True):
    """Which record is taken back: the one of `index` that `attempt` made."""

    index: Index
    attempt: Attempt


class Void(msgspec.Struct, frozen=True):
    """A line that takes a record of the same dataset back: another attempt's counts, or was already counted."""

    void: Voided


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a record that the books need; the ids are skipped over, not decoded."""

    dataset: str
    index: Index
    attempt: Attempt
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens = 0
    flags: tuple[str, ...] = ()
    turn: Turn | None = None
    turns: Turn | None = None

    @property
    def turns_left(self) -> int | None:
        """How many turns of its conversation are still to come; None if it is no turn of one."""
        return turns_left(self.turn, self.turns)


MAX_NEW_TOKENS_CUT = "max_new_tokens_cut"
_encode = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(Record).decode
decode_head = msgspec.json.Decoder(Head).decode
decode_void = msgspec.json.Decoder(Void).decode
VOID_PREFIX = b'{"void":'


def encode_line(entry: Written | Void) -> bytes:
    """The entry as one line of JSON, newline included."""
    return _encode(entry) + b"\n"


def sample_id(dataset: str, index: int) -> str:
    """A sample's name, unique in the run."""
    return f"{dataset}/{index}"


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as UTC, to the millisecond: 2026-01-31T12:00:00.000Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
