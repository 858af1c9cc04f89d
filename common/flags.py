"""The names of what can be odd about an answer; common/flagging.py finds it, docs/quality.md tells of it."""

from collections.abc import Iterable

# Those that a gate can be set for. The place of each is its bit in the ledger's window: add new ones at the end.
FLAGS = (
    "truncated",  # it ended by length
    "clipped",  # by a smaller length than was asked for
    "no_think",  # a model that thinks has not: there is no think block
    "no_think_end",  # the think block is never closed
    "empty_think",  # it is closed, with nothing in it
    "empty_answer",  # neither reasoning nor content nor a tool call
    "think_only",  # nothing behind the reasoning
    "unbalanced_tool_calls",  # a mark of the tool calls is missing, or out of place
    "tool_call_not_json",  # the arguments of a call are no JSON object, or it has no name
    "repetition",  # it says one stretch again and again
    "control_tokens",  # control tokens within reasoning, content or a call
    "bad_text",  # a twentieth of its characters, or more, is U+FFFD or NUL
    "duplicate_answer",  # another sample of the dataset has the same
    "copied_prompt",  # most of it stands in the prompt
)
BITS = {flag: 1 << place for place, flag in enumerate(FLAGS)}
# A record with this one is kept, and does not count against the cap: a gate with counts = false made it so.
UNCOUNTED = "uncounted"
# What may be wrong with an answer only because it was cut off. A gate leaves truncated ones out, they have their own.
OF_THE_END = frozenset(
    {"no_think_end", "empty_answer", "think_only", "unbalanced_tool_calls", "tool_call_not_json", "empty_think"}
)


def bits_of(flags: Iterable[str]) -> int:
    """The flags of FLAGS among `flags`, as the ledger's window has them."""
    return sum(BITS.get(flag, 0) for flag in flags)
