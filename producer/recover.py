"""Builds the ledger anew from the segments and rejects, which are the truth; Redis may have been lost.

The source is then read from its start: the feed skips the rows that are done, and queues those that are not. While it
lasts the dataset is paused, and stays so if the recovery is killed: half a ledger would spend tokens a second time.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import redis

from common.errors import RedisUnavailable, UsageError
from common.ledger import Ledger
from common.records import Head
from common.registered import Steering, read_kept
from common.rejects import Rejects, read_rejects
from common.sections import DatasetSettings
from common.segments import Counted, Entry, Fault, count
from common.settings import Settings
from common.settled import settled_of
from common.turns import TURNS, is_followed
from producer.dedupe import remember_answered
from producer.in_force import in_force, put_in_force

# A worker says every 15 s that it lives; one that is silent for longer than its lease is dead.
LIVE_SECONDS = 60.0
# Samples a call to the ledger: bounds what is held beside the books.
_BATCH = 5000
_UNDER_WAY = "a recovery was cut short; run `tokenmill recover` again"
# What a quality gate decided is not in the files, and is kept where the old ledger still knows it.
_KEPT_STATES = ("paused", "halted")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the ledger holds of a dataset after its recovery, and what was done to its files."""

    name: str
    state: str
    records: int
    prompt_tokens: int
    completion_tokens: int
    rejects: int
    superseded: int
    torn_bytes: int
    faults: int  # lines that are no record and were passed over


def recover(
    settings: Settings,
    ledger: Ledger,
    *,
    force: bool = False,
    on_recovered: Callable[[Recovered], None] = lambda _: None,
) -> list[Recovered]:
    """Rebuild `ledger` for every configured dataset; `on_recovered` is called as each is done.

    Raises UsageError while processes are at work on the ledger, unless `force`; RedisUnavailable; OSError.
    """
    try:
        live = live_processes(ledger)
        if live and not force:
            _refuse(live)
        done = []
        for dataset in settings.datasets:
            held, _ = in_force(settings, dataset)
            done.append(recover_dataset(settings.output, held, ledger, cut_torn=not live))
            on_recovered(done[-1])
    except redis.RedisError as error:
        raise RedisUnavailable(
            f"Redis failed within the recovery ({error}); the files are safe: run `tokenmill recover` again"
        ) from error
    return done


def live_processes(ledger: Ledger) -> dict[str, float]:
    """The workers and control processes that were seen within a minute: name -> seconds ago, by Redis's clock."""
    now_ms = ledger.now_ms()
    # One that was seen in the future was so before the clock was set back; a live one has told of itself since.
    ages = {name: abs(now_ms - seen_ms) / 1000 for name, (seen_ms, _) in ledger.processes().items()}
    return {name: age for name, age in ages.items() if age < LIVE_SECONDS}


def _refuse(live: Mapping[str, float]) -> NoReturn:
    names = ", ".join(f"{name} (seen {age:.0f} s ago)" for name, age in sorted(live.items()))
    raise UsageError(
        f"the ledger is in use by {names}; stop them first, or, if they are dead, wait "
        f"{LIVE_SECONDS:.0f} s or add --force"
    )


def recover_dataset(output: Path, dataset: DatasetSettings, ledger: Ledger, *, cut_torn: bool = False) -> Recovered:
    """Build one dataset's books anew. Raises OSError and redis.RedisError.

    `cut_torn` cuts torn last lines off; only where no worker lives, since it may be in the middle of that very line.
    """
    # All is read before anything is changed: a folder that cannot be read costs nothing.
    counted, rejects = count(output, dataset.name), read_rejects(output, dataset.name)
    _, steering = read_kept(output, dataset.name) or (dataset, Steering())
    torn_bytes = _cut([*counted.faults, *rejects.faults]) if cut_torn else 0
    before = ledger.snapshot(dataset.name)
    ledger.forget(dataset.name)
    ledger.register(dataset)
    ledger.transition(dataset.name, "paused", ["open"], _UNDER_WAY)
    _rebuild(dataset.name, counted, rejects, ledger)
    if dataset.dedupe:
        remember_answered(dataset, counted, ledger)
    if steering.state:
        put_in_force(ledger, dataset.name, steering)
    elif before.state in _KEPT_STATES and before.reason != _UNDER_WAY:
        ledger.transition(dataset.name, before.state, ["paused"], before.reason)
    else:
        ledger.transition(dataset.name, "open", ["paused"])
        if dataset.cap_tokens is not None and ledger.snapshot(dataset.name).spent_tokens >= dataset.cap_tokens:
            ledger.admit(dataset.name, room=0, window=1, tokens_per_second=0)  # as the keeper's next tick would
    after = ledger.snapshot(dataset.name)
    return Recovered(
        name=dataset.name,
        state=after.state,
        records=after.done,
        prompt_tokens=after.prompt_tokens,
        completion_tokens=after.completion_tokens,
        rejects=after.rejected,
        superseded=counted.superseded,
        torn_bytes=torn_bytes,
        faults=sum(not fault.torn for fault in (*counted.faults, *rejects.faults)),
    )


def cut_short(ledger: Ledger, dataset: str) -> bool:
    """Whether the dataset's books are half built: whoever was at it was killed, or still is at it."""
    state = ledger.snapshot(dataset)
    return state.state == "paused" and state.reason == _UNDER_WAY


def _cut(faults: Sequence[Fault]) -> int:
    """Cut torn last lines off their files; answers the bytes cut. Nothing was ever settled from them."""
    cut = 0
    for fault in faults:
        # A file that has grown since it was read has a writer that the ledger, just emptied, does not know.
        if fault.torn and fault.path.stat().st_size == fault.end:
            with fault.path.open("r+b") as file:
                file.truncate(fault.offset)
                os.fsync(file.fileno())
            cut += fault.end - fault.offset
    return cut


def _rebuild(name: str, counted: Counted, rejects: Rejects, ledger: Ledger) -> None:
    going_on = _going_on(counted, rejects)
    settled = (settled_of(entry, goes_on=index in going_on) for index, entry in counted.entries.items())
    while batch := list(itertools.islice(settled, _BATCH)):
        ledger.settle(name, batch, rebuild=True)
    # After the records, so that a record wins: the ledger ends a sample once.
    left = {row.index: row.turns_left for row in rejects.rows.values() if row.turns_left}
    rejected = ((row.index, 0, row.reason) for row in rejects.rows.values())
    while rows := list(itertools.islice(rejected, _BATCH)):
        ledger.reject(name, rows, turns_left=left, rebuild=True)
    for path, end in counted.ends.items():
        ledger.set_committed(f"{name}/{path.name}", end)


def _going_on(counted: Counted, rejects: Rejects) -> set[int]:
    """Of conversations whose every turn is made anew, the turns of those that go on, and the last of those that do not.

    The feed needs the answers of the former, from the first turn on, when it reads their row again. Of the latter the
    ledger counts what is not made. All else of them is history.
    """
    found: set[int] = set()
    for index, entry in counted.entries.items():
        head = entry.what
        if not isinstance(head, Head) or head.turn is None:
            continue
        if "truncated" in head.flags:
            found.add(index)
        elif head.turn == 0:
            turns = list(itertools.takewhile(counted.entries.__contains__, range(index, index + TURNS)))
            if _is_open(counted.entries[turns[-1]]) and turns[-1] + 1 not in rejects.rows:
                found.update(turns)
    return found


def _is_open(entry: Entry) -> bool:
    head = entry.what
    return isinstance(head, Head) and is_followed(head.turns_left, head.flags)
