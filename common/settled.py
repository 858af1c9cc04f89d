"""What the ledger counts of a record that is read back from its segment."""

from collections.abc import Collection

import msgspec

from common.errors import DataError
from common.ledger import Settled
from common.records import Head
from common.segments import Entry, record_at
from common.turns import is_followed, to_follow


def settled_of(entry: Entry, *, goes_on: bool = True) -> Settled:
    """The record of `entry` as the ledger counts it; with its answer where a turn of a conversation is to follow it.

    `goes_on` is False where it is known already what becomes of that conversation. Raises OSError.
    """
    head = entry.what
    assert isinstance(head, Head)
    left = head.turns_left if goes_on else None
    return Settled(
        index=head.index,
        attempt=head.attempt,
        prompt_tokens=head.prompt_tokens,
        completion_tokens=head.completion_tokens,
        cached_tokens=head.cached_tokens,
        flags=head.flags,
        turns_left=left,
        answer=_answer(entry, left, head.flags) if is_followed(left, head.flags) else b"",
    )


def _answer(entry: Entry, left: int | None, flags: Collection[str]) -> bytes:
    try:
        record = record_at(entry)
    except DataError:  # `verify` names the line; nothing can follow such an answer
        return b""
    return to_follow(left, flags, msgspec.json.encode(record.input_ids), record.output_ids)
