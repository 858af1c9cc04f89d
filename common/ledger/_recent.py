"""The last answers of a dataset that count, as its gates look at them: a ring of common.gate_settings.KEPT_ANSWERS."""

import struct
from typing import cast

from common.flags import bits_of
from common.ledger import _keys
from common.ledger._processes import Processes
from common.ledger._state import Settled

# Behind the time of settling in ms (8, float): index (unsigned, 4), attempt (8, float), completion tokens
# (unsigned, 4), clock (4, float), and flags (unsigned, 4; common/flags.py: BITS).
_RECENT = struct.Struct(">IdIfI")


def pack_recent(record: Settled) -> bytes:
    """24 bytes an answer, big-endian; the script puts the time before them."""
    return _RECENT.pack(record.index, record.attempt, record.completion_tokens, record.clock, bits_of(record.flags))


class Recent(Processes):
    """A part of the ledger (__init__.py). Methods raise redis.RedisError where Redis cannot be reached."""

    def recent(self, dataset: str) -> bytes:
        """The last answers of `dataset`, packed, in no order."""
        return cast("bytes | None", self.redis.get(_keys.keys_of(dataset).recent)) or b""
