"""Turns of conversations that will not be made: nothing but the ledger counts them."""

from collections.abc import Sequence

import redis

from common.errors import TokenmillError
from common.ledger import Ledger
from common.settings import Settings
from producer.embedded import reachable

_SO = "So the turns of conversations that have stopped are planned as if they were still to be made."


def stopped_turns(settings: Settings, names: Sequence[str]) -> tuple[dict[str, int], str]:
    """By dataset, how many turns are behind an answer that cannot be followed; and what is to be said if nobody knows.

    A conversation stops for what its last answer is, which its row has to be read and its answer parsed for; so the
    ledger is asked, which has counted it, and is started for that if it is our own.
    """
    try:
        with reachable(settings):
            ledger = Ledger.connect(settings.redis_url, attempts=1)
            try:
                states = {state.name: state for state in ledger.overview(1).datasets}
            finally:
                ledger.close()
    except (TokenmillError, redis.RedisError) as error:
        return {}, f"{str(error).rstrip('.')}. {_SO}"
    unknown = ", ".join(name for name in names if name not in states)
    counts = {name: sum(states[name].stopped.values()) for name in names if name in states}
    return counts, f"Redis does not know {unknown}. {_SO}" if unknown else ""
