"""Why a sample has no record, in a sentence, from what the ledger and the files know."""

import time
from pathlib import Path

import msgspec

from common.ledger import ENDED_STATES, DatasetState, Ledger, SampleState
from common.records import Head
from common.rejects import Reject, each_reject
from common.turns import index_of, row_of, turn_of
from common.words import counted
from producer.conversations import STOPS
from producer.datasets.cursor import Cursor
from producer.datasets.reasons import REASONS
from producer.monitor.find import Finder

_MEANINGS = {**REASONS, **STOPS}


def why_absent(output: Path, dataset: str, index: int, ledger: Ledger | None) -> str:
    """What became of the sample, as the end of a sentence about it; without a ledger by the files alone.

    Raises OSError, redis.RedisError.
    """
    rejected = _rejected(output, dataset, index)
    said = f"was rejected: {_why(rejected)}" if rejected else "has no record in the files"
    if ledger is None:
        return said
    state, sample = ledger.snapshot(dataset), ledger.sample(dataset, index)
    if sample.leased or sample.queued:
        return _in_hand(state, sample)
    if rejected or sample.done:
        return said if rejected else f"has ended, and {said[4:]}; `tokenmill verify` says what is wrong"
    if state.spec.get("turns") == "all":
        return _turn(output, state, index, ledger)
    return f"is not there: {_unread(state, index) or 'its row was passed over'}"


def _in_hand(state: DatasetState, sample: SampleState) -> str:
    if sample.leased:
        seconds = max(0.0, state.now_ms - sample.attempt) / 1000
        since = time.strftime("%H:%M:%S", time.localtime(sample.attempt / 1000))
        return f"has no answer yet: it is in flight at {sample.owner} since {since} ({seconds:.0f} s)"
    lost = f", after {counted(sample.lost, 'lost attempt')}" if sample.lost else ""
    if state.state in ENDED_STATES:
        return f"was not started: {state.name} is {state.state}, and it is still queued{lost}"
    return f"has no answer yet: it is queued{lost}"


def _rejected(output: Path, dataset: str, index: int) -> Reject | None:
    return next((one for one in each_reject(output, dataset) if isinstance(one, Reject) and one.index == index), None)


def _why(reject: Reject) -> str:
    meaning = REASONS.get(reject.reason, "")
    return "; ".join(dict.fromkeys(one for one in (reject.reason, meaning, reject.detail) if one))


def _unread(state: DatasetState, row: int) -> str:
    """That the reading of the source has not come to `row`; empty if it has."""
    try:
        read = Cursor.parse(state.cursor).index
    except msgspec.DecodeError:
        read = 0
    if row < read:
        return ""
    if state.ended:
        return f"its source has {counted(read, 'row')}, counted from 0"
    return f"only the first {counted(read, 'row')} of its source were read so far" if read else "nothing was read yet"


def _turn(output: Path, state: DatasetState, index: int, ledger: Ledger) -> str:
    """The same of a turn of a conversation: what became of the turns before it."""
    row, dataset = row_of(index), state.name
    if unread := _unread(state, row):
        return f"is not there: it is turn {turn_of(index)} of row {row:,}, and {unread}"
    finder = Finder(output, dataset, ledger)
    for turn in range(turn_of(index) - 1, -1, -1):
        before = index_of(row, turn)
        if reject := _rejected(output, dataset, before):
            return f"is not made: turn {turn} of its row was rejected: {_why(reject)}"
        sample = ledger.sample(dataset, before)
        if sample.queued and state.state in ENDED_STATES:
            return f"is not made: {dataset} was {state.state} before turn {turn} of its row was started"
        if sample.queued or sample.leased:
            return f"is not there yet: turn {turn} of its row is {'queued' if sample.queued else 'in flight'}"
        if entry := finder.by_index(before).entry:
            assert isinstance(entry.what, Head)
            return _behind(entry.what, index, state, ledger)
    return "is not there: its row was passed over"


def _behind(head: Head, index: int, state: DatasetState, ledger: Ledger) -> str:
    """Why the sample at `index` is not there, a turn of the conversation that got as far as the record of `head`."""
    turn = turn_of(head.index)
    turns = head.turns or turn + 1
    if turn_of(index) >= turns:
        return f"is not there: its conversation has {counted(turns, 'turn')}, counted from 0"
    if "truncated" in head.flags:
        return f"is not made: the answer of turn {turn} ended by length (truncated), and nothing can follow it"
    if ledger.is_to_be_followed(state.name, head.index):
        if state.state in ENDED_STATES:
            return f"is not made: {state.name} was {state.state} before turn {turn} was followed"
        return f"is not there yet: turn {turn} of its row is answered, and waits to be followed"
    reasons = [reason for reason in state.stopped if reason not in {"truncated", "rejected"}]
    if len(reasons) == 1:
        meaning = _MEANINGS.get(reasons[0])
        why = reasons[0] + (f": {meaning}" if meaning else "")
    else:
        why = " or ".join(reasons) or "nobody knows why"
    return (
        f"is not made: its conversation was stopped behind turn {turn} ({why}); "
        f"`tokenmill show {state.name} {head.index}` shows that answer"
    )
