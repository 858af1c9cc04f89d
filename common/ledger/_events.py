"""What happened, as the ledger and `<output>/events.jsonl` (common/events.py) keep it."""

import msgspec

# Kept in Redis for `top` and `status`; the file has all.
KEPT_EVENTS = 200


class Event(msgspec.Struct, frozen=True, omit_defaults=False):
    """`at` is UTC, as in 2026-01-31T12:00:00.000Z; `who` did it or is what it is about; `detail` is one sentence.

    `who` is user@host for what a person asked for, the worker's name or the server's url where one came or went, and
    `keeper` for a dataset that moved by itself. `what` is a word of common.events.WHAT.
    """

    at: str
    who: str
    what: str
    dataset: str | None = None
    detail: str = ""
