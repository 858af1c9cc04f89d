"""What a run was asked for and what came of it, from its output folder alone: neither Redis nor a server is asked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.flags import UNCOUNTED
from common.records import Record
from common.registered import read_registered
from common.rejects import Reject, each_reject
from common.run_file import read_run_file
from common.sections import DatasetSettings
from common.segments import count, records

# A longer time in which no answer was in flight is no time of work: no worker was up, or no server. In a shorter one
# the next samples are claimed.
_PAUSE_SECONDS = 10.0


@dataclass(slots=True)
class Came:
    """The answers of one dataset that count. Arrays are of one length, in the order of `at` (seconds of the epoch)."""

    name: str
    asked: DatasetSettings | None  # None: it was never registered, and its files are all there is
    at: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    prompt_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    completion_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    latency_seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    counts: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))  # against the cap
    finish_reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    servers: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    faults: int = 0  # lines that are no record, in segments or rejects

    @property
    def samples(self) -> int:
        return len(self.at)

    @property
    def counts_prompts(self) -> bool:
        return self.asked is not None and self.asked.count == "total"

    @property
    def cap_tokens(self) -> int | None:
        return self.asked.cap_tokens if self.asked else None

    def spent(self) -> NDArray[np.int64]:
        """The tokens of each answer that count against the cap."""
        tokens = self.completion_tokens + self.prompt_tokens if self.counts_prompts else self.completion_tokens
        return tokens * self.counts

    @property
    def spent_tokens(self) -> int:
        return int(self.spent().sum())

    def percentile(self, share: float) -> int:
        """The length, in completion tokens, that `share` of the answers do not exceed; 0 without answers."""
        return int(np.quantile(self.completion_tokens, share, method="inverted_cdf")) if self.samples else 0


@dataclass(slots=True)
class Gathered:
    """A whole run: its datasets, and what `run.json` says of the model and the servers."""

    output: Path
    run: dict[str, Any]
    datasets: list[Came]

    def times(self) -> NDArray[np.float64]:
        """When each answer was accepted, over all datasets, ascending."""
        parts = [one.at for one in self.datasets]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0)

    @property
    def work_seconds(self) -> float:
        """From the start of the first answer to the end of the last, without the times in which none was in flight."""
        answers = [(one.at - one.latency_seconds, one.at) for one in self.datasets if one.samples]
        if not answers:
            return 0.0
        starts, ends = (np.concatenate(parts) for parts in zip(*answers, strict=True))
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        idle = starts[1:] - ends[:-1]
        return float(ends[-1] - starts[0] - idle[idle > _PAUSE_SECONDS].sum())


def gather(output: Path, names: Sequence[str] = ()) -> Gathered:
    """Read the datasets of `names` (all that are registered or have a folder of segments, if none). One pass over each.

    Holds 33 bytes an answer. Raises DataError for a run.json, dataset.json or record that cannot be read; OSError.
    """
    asked = {one.name: one for one in read_registered(output)}
    wanted = names or list(asked) or sorted(path.parent.name for path in output.glob("*/*.jsonl"))
    datasets = [_came(output, name, asked.get(name)) for name in dict.fromkeys(wanted)]
    return Gathered(output, read_run_file(output) or {}, datasets)


def _came(output: Path, name: str, asked: DatasetSettings | None) -> Came:
    came = Came(name, asked)
    counted = count(output, name)
    came.faults = sum(not fault.torn for fault in counted.faults)
    figures = np.fromiter(
        _figures(records(output, name, counted), came),
        dtype=np.dtype([("at", "f8"), ("prompt", "i8"), ("completion", "i8"), ("latency", "f8"), ("counts", "?")]),
    )
    figures.sort(order="at")
    came.at, came.latency_seconds = figures["at"].copy(), figures["latency"].copy()
    came.prompt_tokens, came.completion_tokens = figures["prompt"].copy(), figures["completion"].copy()
    came.counts = figures["counts"].copy()
    for line in each_reject(output, name):
        if isinstance(line, Reject):
            came.rejects[line.reason] += 1
        else:
            came.faults += 1
    return came


def _figures(found: Iterator[Record], came: Came) -> Iterator[tuple[float, int, int, float, bool]]:
    for record in found:
        came.finish_reasons[record.finish_reason] += 1
        came.flags.update(record.flags)
        came.servers[record.server] += 1
        at = datetime.fromisoformat(record.created_at).timestamp()
        counts = UNCOUNTED not in record.flags
        yield at, record.prompt_tokens, record.completion_tokens, record.latency_seconds, counts
