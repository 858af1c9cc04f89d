"""A typed stub beside each script of scripts/.

A stub whose parameters are not those of its script's header fails at import, so the two cannot drift apart.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import redis

from common.ledger._keys import Keys

P = ParamSpec("P")
R = TypeVar("R")
Argument = str | bytes | int | float
_FOLDER = Path(__file__).with_name("scripts")


class Call(Protocol):
    """One script, bound to a connection and to the keys it names."""

    def __call__(self, *arguments: Argument) -> Any: ...


def text_of(name: str) -> str:
    """The script scripts/<name>.lua."""
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def header(text: str, word: str) -> list[str]:
    """The names on a script's `-- KEYS:` or `-- ARGV:` line; raises ValueError if it has none."""
    match = re.search(rf"^-- {word}:(.*)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"the script has no line that starts with -- {word}:")
    return match.group(1).replace("...", "").split()


def _script(
    stub: Callable[Concatenate[Call, P], R],
) -> Callable[Concatenate[redis.Redis, Keys, P], R]:
    """Bind `stub` to scripts/<its name>.lua, after comparing its parameters with the script's header."""
    text = text_of(stub.__name__)
    keys, arguments = header(text, "KEYS"), header(text, "ARGV")
    parameters = list(inspect.signature(stub).parameters)[1:]
    if parameters != arguments:
        raise AssertionError(f"{stub.__name__}: the stub takes {parameters}, the script's ARGV line says {arguments}")
    unknown = [key for key in keys if key not in Keys.__slots__]
    if unknown:
        raise AssertionError(f"{stub.__name__}: the script's KEYS line names {unknown}, which _keys.py does not spell")
    script = functools.cache(lambda client: client.register_script(text))

    def run(client: redis.Redis, of: Keys, /, *args: P.args, **kwargs: P.kwargs) -> R:
        names = [getattr(of, key) for key in keys]
        return stub(lambda *given: script(client)(keys=names, args=given), *args, **kwargs)

    return run


@_script
def register(call: Call, name: str, spec: str, cap_tokens: int, count: str, weight: float) -> str:
    """Make a dataset known. Answers `new`, `known` or `reopened`."""
    return _text(call(name, spec, cap_tokens, count, weight))


@_script
def feed(call: Call, before: str, after: str, ended: bool, rejected: int, rows: Sequence[Argument]) -> int:
    """Queue rows and move the cursor. Answers the samples queued, or -1 where the cursor is not `before`."""
    return int(call(before, after, int(ended), rejected, *rows))


@_script
def converse(call: Call, before: str, turns: Sequence[Argument]) -> int:
    """Queue turns of conversations. Answers the samples queued, or -1 where the cursor is not `before`."""
    return int(call(before, *turns))


@_script
def remember(call: Call, dataset: str, shared: bool, samples: Sequence[Argument]) -> list[str]:
    """Note prompts of (index digest) pairs. Answers, a sample each, "dataset index" of the one that was fed first."""
    return [_text(one) for one in call(dataset, int(shared), *samples)]


@_script
def claim(
    call: Call, owner: str, lease_ms: int, suspect_after: int, alone_ms: int, indices: Sequence[int]
) -> tuple[list[int | str], list[bytes]]:
    """Hand samples out. Answers, by index, the attempt or the word that says why there is none, and the payload."""
    words, payloads = call(owner, lease_ms, suspect_after, alone_ms, *indices)
    return [word if isinstance(word, int) else _text(word) for word in words], list(payloads)


@_script
def renew(call: Call, owner: str, lease_ms: int, samples: Sequence[int]) -> list[int]:
    """Prolong leases of (index attempt) pairs. Answers the indices that belong to another attempt by now."""
    return list(call(owner, lease_ms, *samples))


@_script
def settle(call: Call, segment: str, committed_bytes: int, rebuild: bool, samples: Sequence[Argument]) -> list[int]:
    """Count records. Answers 1 (it counts) or 0 (superseded) a sample."""
    return list(call(segment, committed_bytes, int(rebuild), *samples))


@_script
def release(call: Call, failed: bool, samples: Sequence[int]) -> int:
    """Give samples of (index attempt) pairs back. Answers how many."""
    return int(call(int(failed), *samples))


@_script
def reject(call: Call, rebuild: bool, samples: Sequence[Argument]) -> list[int]:
    """End samples of (index attempt reason left) without a record. Answers 1 or 0 a sample."""
    return list(call(int(rebuild), *samples))


@_script
def expire(call: Call, max_tries: int, limit: int, hold_ms: int) -> tuple[list[Any], list[Any]]:
    """Take back lapsed leases. Answers two flat (index attempt owner) lists: queued again, and ended."""
    back, ended = call(max_tries, limit, hold_ms)
    return list(back), list(ended)


@_script
def resend(call: Call, before_ms: int, indices: Sequence[int]) -> list[int]:
    """Mark queued samples as sent now. Answers those that the caller must send."""
    return list(call(before_ms, *indices))


@_script
def admit(call: Call, room: int, starts: int | str, window: int, tokens_per_second: float) -> str:
    """Set the room for further claims. Answers the state that follows."""
    return _text(call(room, starts, window, tokens_per_second))


@_script
def observe(call: Call, kept: int, size: int, packed: bytes, lost: Sequence[float]) -> int:
    """Keep how attempts ended; `lost` are (index clock) pairs. Answers how many were ever observed."""
    return int(call(kept, size, packed, *lost))


@_script
def tell(call: Call, owner: str, packed: bytes) -> int:
    """Say how far the answers in flight have come. Answers Redis's time in milliseconds."""
    return int(call(owner, packed))


@_script
def progress(call: Call) -> list[Any]:
    """Read what is in flight and how the last attempts ended, as the script's header says."""
    return list(call())


@_script
def transition(call: Call, target: str, reason: str, sources: Sequence[str]) -> str:
    """Move to `target` from one of `sources`. Answers the state before."""
    return _text(call(target, reason, *sources))


@_script
def retune(call: Call, seen_cap_tokens: int, seen_weight: float, spec: str, cap_tokens: int, weight: float) -> str:
    """Change cap and weight if they are as seen. Answers `moved`, `cancelled`, `reopened`, or the state."""
    return _text(call(seen_cap_tokens, seen_weight, spec, cap_tokens, weight))


@_script
def cancel(call: Call, reason: str) -> tuple[str, int]:
    """End a dataset for good. Answers the state before, and how many samples were withdrawn."""
    state, withdrawn = call(reason)
    return _text(state), int(withdrawn)


@_script
def snapshot(call: Call) -> list[Any]:
    """Read a dataset at one instant, as the script's header says."""
    return list(call())


@_script
def heartbeat(call: Call, name: str, facts: str) -> int:
    """Say that a process lives. Answers Redis's time in milliseconds."""
    return int(call(name, facts))


def _text(reply: bytes | str) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply
