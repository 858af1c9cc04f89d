"""Which record `show` and `top` show, and why there is none where there is none."""

from collections.abc import Iterable

from common.errors import UsageError
from common.ledger import Ledger
from common.registered import registered_names
from common.segments import Entry
from common.settings import Settings, nearest
from producer.monitor.absent import why_absent
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
        return f"{self._dataset}/{index} {why_absent(self._output, self._dataset, index, self._ledger)}{also}"
