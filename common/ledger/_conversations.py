"""Conversations of which every assistant turn is made anew: what waits for its next turn, and what that needs."""

from collections.abc import Iterable, Sequence
from typing import cast

from common.ledger import _keys, _scripts
from common.ledger._processes import Processes
from common.ledger._state import Ending, NextTurn
from common.turns import TURNS, Made, index_of, unpack_made


class Conversations(Processes):
    """A part of the ledger (__init__.py). Methods raise redis.RedisError where Redis cannot be reached."""

    def converse(self, dataset: str, turns: Sequence[NextTurn | Ending], *, before: str) -> int | None:
        """Queue turns, or end conversations; answers how many were queued, or None if the cursor is not `before`.

        Each answer is followed, and the first turn of each row queued, once, however often this is called.
        """
        given: list[_scripts.Argument] = []
        for turn in turns:
            if isinstance(turn, Ending):
                given += (turn.follows, turn.earlier, "", turn.reason, turn.turns, "")
            else:
                follows = "" if turn.follows is None else turn.follows
                given += (follows, turn.earlier, turn.index, turn.payload, turn.prompt_tokens, turn.conversation)
        queued = _scripts.converse(self.redis, _keys.keys_of(dataset), before=before, turns=given)
        return None if queued < 0 else queued

    def answered(self, dataset: str, limit: int) -> list[tuple[int, bytes, bytes]]:
        """The first `limit` answers that wait to be followed, by index: (index, answer, conversation)."""
        keys = _keys.keys_of(dataset)
        indices = sorted(map(int, cast("list[bytes]", self.redis.hkeys(keys.answers))))[:limit]
        if not indices:
            return []
        fields = [*map(str, indices)]
        answers = cast("list[bytes | None]", self.redis.hmget(keys.answers, fields))
        conversations = cast("list[bytes | None]", self.redis.hmget(keys.conversations, fields))
        return [
            (index, answer, conversation)
            for index, answer, conversation in zip(indices, answers, conversations, strict=True)
            if answer is not None and conversation is not None
        ]

    def is_to_be_followed(self, dataset: str, index: int) -> bool:
        """Whether the answer of a turn waits for the next one, or, after a recovery, for its row to be read again."""
        keys = _keys.keys_of(dataset)
        return any(self.redis.hexists(key, str(index)) for key in (keys.answers, keys.resumed))

    def payloads(self, dataset: str, indices: Sequence[int]) -> dict[int, bytes]:
        """The payloads of those of `indices` that have not ended."""
        found = self.redis.hmget(_keys.keys_of(dataset).payloads, [*map(str, indices)]) if indices else []
        return {
            index: payload
            for index, payload in zip(indices, cast("list[bytes | None]", found), strict=True)
            if payload is not None
        }

    def resumed(self, dataset: str, rows: Iterable[int]) -> dict[int, list[Made]]:
        """After a recovery: for those of `rows` that are to go on, what was made of them, from the first turn on."""
        key = _keys.keys_of(dataset).resumed
        asked = list(rows)
        if not asked:
            return {}
        first = cast("list[bytes | None]", self.redis.hmget(key, [str(index_of(row, 0)) for row in asked]))
        found: dict[int, list[Made]] = {}
        for row, answer in zip(asked, first, strict=True):
            if answer is not None:
                fields = [str(index_of(row, turn)) for turn in range(TURNS)]
                answers = cast("list[bytes | None]", self.redis.hmget(key, fields))
                known = answers.index(None) if None in answers else TURNS
                found[row] = [unpack_made(one) for one in answers[:known] if one is not None]
        return found
