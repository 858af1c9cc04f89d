"""Where a conversation is cut, so that what is left asks for an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

_ASKING = frozenset({"user", "tool"})


def answered_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The cuts of a conversation, in order: `messages[:cut]` is a prompt, for each of them.

    A cut stands behind every user or tool turn that the assistant answers next, and behind the last one even if nobody
    answers it. Turns of several users or tools in a row make one prompt; a system turn in between does not part them.
    """
    return _cuts([turn["role"] for turn in messages])


def cut(roles: Sequence[str], turns: str) -> int:
    """Where `turns` = "last" or "first" cuts turns with these roles; 0 if there is nothing to answer.

    With "all" it is where the first prompt ends.
    """
    cuts = _cuts(roles)
    if turns == "all":
        return cuts[0] if cuts else 0
    if turns == "first":
        return next((one for one in cuts if roles[one - 1] == "user"), 0)
    return cuts[-1] if cuts else 0


def _cuts(roles: Sequence[str]) -> list[int]:
    cuts: list[int] = []
    asked = 0
    for number, role in enumerate(roles, start=1):
        if role in _ASKING:
            asked = number
        elif role == "assistant" and asked:
            cuts.append(asked)
            asked = 0
    return [*cuts, asked] if asked else cuts
