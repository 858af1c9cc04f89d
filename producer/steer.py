"""Steering a dataset while a job runs: pause, resume, cap, weight, cancel.

Each is one transition of the ledger, seen by workers at their next claim and by `status` at once; then it is written
into the dataset's dataset.json, so that it outlives Redis, and into events.jsonl with who and when. A command that was
killed in between is repeated: it then writes what is missing.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import UsageError
from common.events import make_event, operator, tell
from common.ledger import OPEN_STATES, DatasetState, Ledger
from common.registered import Steering, keep_registered, read_kept, registering
from common.sections import DatasetSettings
from common.settings import Settings, nearest
from common.words import counted, ending
from producer.in_force import configured
from producer.recover import cut_short

# What `resume` opens again.
_STOPPED = ("paused", "halted", "failed")


@dataclass(frozen=True, slots=True)
class Seen:
    """A cap as somebody saw it on a screen; None: no cap."""

    cap_tokens: int | None


def known(ledger: Ledger, names: Iterable[str]) -> list[str]:
    """`names`, each once; raises UsageError, with the near ones, if one is no dataset of the job."""
    datasets = ledger.datasets()
    for name in names:
        if name not in datasets:
            raise UsageError(f"no dataset of this job is named {name!r}{nearest(name, set(datasets))}")
    return list(dict.fromkeys(names))


def pause(settings: Settings, ledger: Ledger, name: str) -> str:
    """Claim nothing more of a dataset; what is in flight ends and counts. Answers what was done, in a sentence.

    Raises UsageError if it has ended; OSError, redis.RedisError.
    """
    reason = _by("paused")
    with registering(settings.output):
        before = ledger.transition(name, "paused", OPEN_STATES, reason)
        if before not in (*OPEN_STATES, "paused"):
            raise UsageError(f"{name} is {before}; there is nothing to pause")
        state = ledger.snapshot(name)
        dataset, steering = _kept(settings, state)
        keep_registered(settings.output, dataset, Steering("paused", state.reason, steering.configured))
    if before == "paused":
        return f"{name}: it was paused already ({state.reason})"
    sentence = f"paused; {ending(state.in_flight)}"
    tell(settings.output, ledger, make_event("paused", sentence, name))
    return f"{name}: {sentence}"


def resume(settings: Settings, ledger: Ledger, name: str) -> str:
    """Open a dataset again that is paused, halted or failed. Answers what was done, in a sentence.

    Raises UsageError if it has ended otherwise; OSError, redis.RedisError.
    """
    with registering(settings.output):
        if cut_short(ledger, name):
            raise UsageError(f"the books of {name} are half built; run `tokenmill recover`")
        before = ledger.transition(name, "open", _STOPPED)
        if before not in (*OPEN_STATES, *_STOPPED):
            raise UsageError(f"{name} is {before}; {_INSTEAD[before].format(name=name)}")
        dataset, steering = _kept(settings, ledger.snapshot(name))
        keep_registered(settings.output, dataset, Steering("", "", steering.configured))
    if before in OPEN_STATES:
        return f"{name}: it is open already"
    sentence = f"open again, after it was {before}"
    tell(settings.output, ledger, make_event("resumed", sentence, name))
    return f"{name}: {sentence}"


_INSTEAD = {
    "capped": "raise its cap with `tokenmill cap {name} --add TOKENS`",
    "exhausted": "its source has ended; add rows to it, and `tokenmill enqueue {name}` or `run`",
    "cancelled": "that is final; make it anew under another name",
}


def set_cap(settings: Settings, ledger: Ledger, name: str, cap_tokens: int | None, seen: Seen | None = None) -> str:
    """Give a dataset another cap (None: no cap). Answers what follows, in a sentence.

    Raises UsageError if its cap is not what was `seen` any more, or it is cancelled; OSError, redis.RedisError.
    """
    with registering(settings.output):
        while True:
            state = ledger.snapshot(name)
            if seen is not None and state.cap_tokens != seen.cap_tokens:
                raise UsageError(
                    f"the cap of {name} is {_tokens(state.cap_tokens)} by now, and not {_tokens(seen.cap_tokens)}: "
                    "somebody else has changed it; look again"
                )
            if (after := _retune(settings, ledger, state, "cap_tokens", cap_tokens)) != "moved":
                break
    return _told_cap(settings, ledger, state, cap_tokens, after)


def add_to_cap(settings: Settings, ledger: Ledger, name: str, tokens: int) -> str:
    """Move a dataset's cap by so many tokens, up or down; two who do so at once both get what they asked for.

    Answers what follows, in a sentence. Raises UsageError if it has no cap, none would be left, or it is cancelled.
    """
    with registering(settings.output):
        while True:
            state = ledger.snapshot(name)
            if state.cap_tokens is None:
                raise UsageError(f"{name} has no cap that could be raised; set one with `tokenmill cap {name} TOKENS`")
            if (cap_tokens := state.cap_tokens + tokens) < 1:
                raise UsageError(f"the cap of {name} is {state.cap_tokens:,} tokens; {-tokens:,} fewer leave none")
            if (after := _retune(settings, ledger, state, "cap_tokens", cap_tokens)) != "moved":
                break
    return _told_cap(settings, ledger, state, cap_tokens, after)


def set_weight(settings: Settings, ledger: Ledger, name: str, weight: float) -> str:
    """Give a dataset another share of the slots. Answers what was done, in a sentence. Raises as set_cap does."""
    with registering(settings.output):
        while True:
            state = ledger.snapshot(name)
            if _retune(settings, ledger, state, "weight", weight) != "moved":
                break
    sentence = f"weight {state.weight:g} -> {weight:g}"
    tell(settings.output, ledger, make_event("weight", sentence, name))
    return f"{name}: {sentence}"


def cancel(settings: Settings, ledger: Ledger, name: str) -> str:
    """End a dataset for good: its queued samples are withdrawn; what is in flight ends by itself, and counts.

    Answers what was done, in a sentence. Raises OSError, redis.RedisError.
    """
    with registering(settings.output):
        before, withdrawn = ledger.cancel(name, _by("cancelled"))
        state = ledger.snapshot(name)
        dataset, steering = _kept(settings, state)
        keep_registered(settings.output, dataset, Steering("cancelled", state.reason, steering.configured))
    if before == "cancelled":
        return f"{name}: it was cancelled already ({state.reason})"
    sentence = (
        f"cancelled; its {counted(state.done, 'record')} {'stays' if state.done == 1 else 'stay'}, "
        f"{counted(withdrawn, 'queued sample')} {'was' if withdrawn == 1 else 'were'} withdrawn, "
        f"{ending(state.in_flight)}"
    )
    tell(settings.output, ledger, make_event("cancelled", sentence, name))
    return f"{name}: {sentence}"


def _retune(settings: Settings, ledger: Ledger, state: DatasetState, key: str, value: float | None) -> str:
    """Change the cap or the weight of a dataset that is as in `state`; answers what the ledger says."""
    dataset, steering = _kept(settings, state)
    dataset = dataset.model_copy(update={key: value})
    after = ledger.retune(state, dataset)
    if after == "cancelled":
        raise UsageError(f"{state.name} is cancelled ({state.reason}); that is final")
    if after != "moved":
        said = configured(settings, dataset, key)
        marks = {name: held for name, held in steering.configured.items() if name != key}
        marks |= {key: said} if said != value else {}
        keep_registered(settings.output, dataset, Steering(steering.state, steering.reason, marks))
    return after


def _kept(settings: Settings, state: DatasetState) -> tuple[DatasetSettings, Steering]:
    """The dataset as its file has it, with the cap and weight that the ledger has."""
    kept = read_kept(settings.output, state.name)
    dataset, steering = kept or (DatasetSettings(**state.spec), Steering())
    return dataset.model_copy(update={"cap_tokens": state.cap_tokens, "weight": state.weight}), steering


def _told_cap(settings: Settings, ledger: Ledger, state: DatasetState, cap_tokens: int | None, after: str) -> str:
    sentence = f"cap {_tokens(state.cap_tokens)} -> {_tokens(cap_tokens)}{_what_follows(state, cap_tokens, after)}"
    tell(settings.output, ledger, make_event("cap", sentence, state.name))
    return f"{state.name}: {sentence}"


def _what_follows(state: DatasetState, cap_tokens: int | None, after: str) -> str:
    if after == "reopened":
        return "; it is open again"
    if after == "exhausted":
        return "; its source has ended, and nothing more comes"
    if after in _STOPPED:
        return f"; it stays {after} until `tokenmill resume {state.name}`"
    if cap_tokens is not None and cap_tokens <= state.spent_tokens:
        return (
            f", and {state.spent_tokens:,} are spent: what is there stays, {ending(state.in_flight)}, and "
            "nothing new is started"
        )
    return "; it stays capped" if after == "capped" else ""


def _tokens(tokens: int | None) -> str:
    return "no cap" if tokens is None else f"{tokens:,} tokens"


def _by(what: str) -> str:
    return f"{what} by {operator()} at {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
