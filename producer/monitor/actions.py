"""What the keys of `top` do: the same functions that the commands call, each on a connection of its own."""

import re
from collections.abc import Callable
from contextlib import closing

import redis

from common.amounts import tokens_of
from common.errors import TokenmillError, UsageError
from common.ledger import Ledger
from common.settings import Settings
from common.words import ending
from producer import crew, steer
from producer.monitor.grid import Entry


class Actions:
    """Each answers what was done, or why not, in a sentence; they may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def pause(self, dataset: str) -> str:
        return self._do(lambda ledger: steer.pause(self._settings, ledger, dataset))

    def resume(self, dataset: str) -> str:
        return self._do(lambda ledger: steer.resume(self._settings, ledger, dataset))

    def cap(self, dataset: str, text: str, seen_tokens: int | None) -> str:
        """`text` as a person types it, `seen_tokens` the cap that stood on the screen."""

        def act(ledger: Ledger) -> str:
            tokens, is_more = cap_of(text)
            if is_more:
                assert tokens is not None
                return steer.add_to_cap(self._settings, ledger, dataset, tokens)
            return steer.set_cap(self._settings, ledger, dataset, tokens, steer.Seen(seen_tokens))

        return self._do(act)

    def drain(self, worker: str) -> str:
        return self._do(lambda ledger: crew.end_worker(self._settings, ledger, worker, "drain"))

    def _do(self, act: Callable[[Ledger], str]) -> str:
        try:
            with closing(Ledger.connect(self._settings.redis_url)) as ledger:
                return act(ledger)
        except TokenmillError as error:
            return f"not done: {error}"
        except redis.RedisError as error:
            return f"not done, or not all of it: Redis does not answer ({error}); look, then do it again"
        except OSError as error:
            return f"not done, or not all of it: {error.filename}: {error.strerror}"


def cap_of(text: str) -> tuple[int | None, bool]:
    """`12M`, `none`, `+500k` or `-500k` as tokens (None: no cap), and whether these are added to the cap.

    Raises UsageError on anything else.
    """
    found = re.fullmatch(r"\s*([+-]?)\s*(\S+)\s*", text)
    if found is None:
        raise UsageError("type a number of tokens, as 12000000, 12M or +500k, or `none`")
    sign, rest = found.groups()
    tokens = tokens_of(rest)
    if sign and tokens is None:
        raise UsageError("`none` takes no sign")
    if not sign and tokens is not None and tokens < 1:
        raise UsageError("a cap is 1 token at least")
    return -tokens if sign == "-" and tokens is not None else tokens, bool(sign)


def what_a_cap_does(dataset: Entry, text: str) -> str:
    """What follows if `text` is given as the dataset's cap, before it is."""
    try:
        tokens, is_more = cap_of(text)
    except UsageError as error:
        return str(error)
    if is_more and dataset["cap_tokens"] is None:
        return "it has no cap that could be raised"
    cap = tokens if not is_more else dataset["cap_tokens"] + tokens
    if cap is None:
        return "no cap: its whole source is answered"
    spent = dataset["spent_tokens"]
    if cap <= spent:
        return (
            f"{cap:,} tokens, and {spent:,} are spent: what is there stays, {ending(dataset['in_flight'])}, "
            "and nothing new is started"
        )
    reopens = "; it is opened again" if dataset["state"] == "capped" else ""
    return f"{cap:,} tokens: {cap - spent:,} more than are spent{reopens}"
