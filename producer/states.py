"""In which state each dataset is, from its files alone, so that datasets can be chosen by it without Redis."""

from collections.abc import Sequence
from pathlib import Path

from common.errors import UsageError
from common.events import all_events
from common.registered import read_kept
from common.segments import segment_paths

# What an event says of a dataset's state; `closing` is told of by none, and is `open` here.
_STATE_AFTER = {
    **dict.fromkeys(("registered", "resumed", "reopened", "restored"), "open"),
    **{state: state for state in ("paused", "capped", "exhausted", "halted", "failed", "cancelled")},
}


def in_states(output: Path, names: Sequence[str], states: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Those of `names` that are in one of `states`, and the state of each that is not.

    Raises UsageError where none is, or the files do not say of one; DataError for a dataset.json that cannot be read;
    OSError.
    """
    told = {
        event.dataset: _STATE_AFTER[event.what]
        for event in all_events(output)
        if event.dataset is not None and event.what in _STATE_AFTER
    }
    found = {name: _state(output, name, told.get(name, "")) for name in names}
    if unknown := [name for name, state in found.items() if not state]:
        raise UsageError(
            f"{output}/events.jsonl does not say in which state {', '.join(unknown)} "
            f"{'is' if len(unknown) == 1 else 'are'} (an older release did not write it down, or the file was lost); "
            "name the datasets to export, without --state"
        )
    chosen = [name for name in names if found[name] in states]
    others = {name: state for name, state in found.items() if state not in states}
    if not chosen:
        are = ", ".join(f"{name} is {state}" for name, state in others.items())
        raise UsageError(f"no dataset is {' or '.join(states)}: {are}; choose other states")
    return chosen, others


def _state(output: Path, name: str, told: str) -> str:
    """The last state that was told of, or what a person has asked for since; "" if nobody knows."""
    kept = read_kept(output, name)
    if kept is None and not told and not segment_paths(output, name):
        return "not registered"
    asked = kept[1].state if kept is not None else ""
    # A pause holds where the books were built anew, and is not told of again; nothing follows on cancelled.
    return asked if asked == "cancelled" or (asked == "paused" and told in {"", "open"}) else told
