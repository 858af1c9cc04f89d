"""Which record `show` and `top` show, and why there is none where there is none."""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from common.errors import UsageError
from common.ledger import DatasetState, Ledger
from common.registered import registered_names
from common.rejects import Reject, each_reject
from common.segments import Entry
from common.settings import Settings, nearest
from common.turns import row_of
from producer.datasets.cursor import Cursor
from producer.datasets.reasons import REASONS
from producer.monitor.find import Finder, Found


class Looker:
    """Finds samples of one dataset; raises UsageError, with the near ones, if there is none of that name.

    `ledger` may be None: the files then say what there is. Methods raise OSError, and redis.RedisError.
    """

    def __init__(self, settings: Settings, ledger: Ledger | None, dataset: str) -> None:
        known = {*registered_names(settings.output), *(one.name for one in settings.datasets)}
        in_ledger = set(ledger.datasets()) if ledger else set()
        if dataset not in known | in_ledger:
            raise UsageError(f"no dataset is named {dataset!r}{nearest(dataset, known | in_ledger)}")
        self._output = settings.output
        self._dataset = dataset
        self._ledger = ledger if dataset in in_ledger else None

    def by_index(self, index: int) -> Found:
        """The record of a sample, and the attempts that do not count; raises UsageError that says why there is none."""
        found = self._finder().by_index(index)
        if found.entry is None:
            raise UsageError(self._absent(index, found.superseded))
        return found

    def newest(self, flag: str | None = None) -> Entry:
        """The last record, or the last that has `flag`; raises UsageError if there is none."""
        self._check_flag(flag)
        return self._there(self._finder().newest(flag), flag)

    def drawn(self, flag: str | None = None) -> Entry:
        """A record by chance, of those that have `flag` if one is given; raises UsageError if there is none."""
        self._check_flag(flag)
        return self._there(self._finder().drawn(flag), flag)

    def _finder(self) -> Finder:
        return Finder(self._output, self._dataset, self._ledger)

    def _check_flag(self, flag: str | None) -> None:
        """Say at once what the ledger knows: else all segments would be read in vain."""
        if flag is None or self._ledger is None:
            return
        flags = self._ledger.snapshot(self._dataset).flags
        if not flags.get(flag):
            there = ", ".join(f"{name} ({count:,})" for name, count in sorted(flags.items()) if count) or "none at all"
            raise UsageError(f"no answer of {self._dataset} has the flag {flag!r}; its answers have {there}")

    def _there(self, entry: Entry | None, flag: str | None) -> Entry:
        if entry is None:
            raise UsageError(f"{self._dataset} has no answer{f' with the flag {flag!r}' if flag else ''} yet")
        return entry

    def _absent(self, index: int, superseded: Iterable[int]) -> str:
        """Why the sample at `index` has no record."""
        attempts = ", ".join(map(str, superseded))
        also = f"; what attempt {attempts} made of it was superseded, and does not count" if attempts else ""
        return f"{self._dataset}/{index} {self._where(index)}{also}"

    def _where(self, index: int) -> str:
        rejected = _rejected(self._output, self._dataset, index)
        said = f"was rejected: {_why(rejected)}" if rejected else "has no record in the files"
        if self._ledger is None:
            return said
        state, sample = self._ledger.snapshot(self._dataset), self._ledger.sample(self._dataset, index)
        if sample.leased:
            seconds = max(0.0, state.now_ms - sample.attempt) / 1000
            since = time.strftime("%H:%M:%S", time.localtime(sample.attempt / 1000))
            return f"has no answer yet: it is in flight at {sample.owner} since {since} ({seconds:.0f} s)"
        if sample.queued:
            return "has no answer yet: it is queued" + (f", after {sample.lost} lost attempts" if sample.lost else "")
        if rejected or sample.done:
            return said if rejected else f"has ended, and {said[4:]}; `tokenmill verify` says what is wrong"
        return f"is not there: {_rows(state, index)}"


def _rejected(output: Path, dataset: str, index: int) -> Reject | None:
    return next((one for one in each_reject(output, dataset) if isinstance(one, Reject) and one.index == index), None)


def _why(reject: Reject) -> str:
    meaning = REASONS.get(reject.reason, "")
    words = dict.fromkeys(one for one in (reject.reason, meaning, reject.detail) if one)
    return "; ".join(words)


def _rows(state: DatasetState, index: int) -> str:
    """Where the reading of the source is, beside the row that was asked for."""
    all_turns = state.spec.get("turns") == "all"
    row = row_of(index) if all_turns else index
    try:
        read = Cursor.parse(state.cursor).index
    except msgspec.DecodeError:
        read = 0
    if row >= read:
        return f"its source ended after {read:,} rows" if state.ended else f"its source was read up to row {read:,}"
    return "its conversation has no such turn" if all_turns else "its row was passed over"
