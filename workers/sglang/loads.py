"""What a server says of its load: /v1/loads (since 0.5.8), else /get_load (0.4.9 to 0.5.20), else /metrics.

Observed on 0.5.23, whose /v1/loads is a snapshot that the scheduler publishes every few steps, 0.1 s old at most:

- `generation_tokens_total` of /metrics counts an answer when it ends, so it is no clock and is not read.
- `realtime_tokens_total{mode="decode"}` of /metrics counts every step, all decoded tokens but the first of each answer,
  exactly; it stands still while the server is paused or idle, and is there only with --enable-metrics.
- `decode_moments[5]` of /v1/loads counts the same without that flag, save for the steps next to a prefill: 1 % less
  with long answers, 8 % with answers of 70 tokens. Older releases do not have it.
- `gen_throughput` is the mean of the last 40 decode steps (2 s at 20 steps/s); idle it is 0; in a pause it keeps its
  last value, and so does all of the snapshot, whose own time stamp then falls behind that of the response.
- /metrics is 90 kB and takes 20 ms of the server's one HTTP process, /v1/loads 1 kB and 3 ms. So where /v1/loads has no
  counter, /metrics is read beside it but seldom.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime

import aiohttp
import msgspec

from workers.governor import Load
from workers.sglang.answer import BadAnswer
from workers.sglang.http import Http

READ_SECONDS = 5.0
# 8 ranks take 10 kB of /v1/loads and 0.5 MB of /metrics.
MOST_BYTES = 4 << 20
# A source that failed so often in a row may be gone, with the release that had it: all are tried again.
FAILURES_TO_FORGET = 3
# A server without any source is asked again after so many reads: it may have been restarted as another release.
READS_TO_RETRY = 15
READS_A_COUNTER = 5
_MOST_REQUESTS = 1e9
_BROKEN = (TimeoutError, BadAnswer, aiohttp.ClientError, OSError)


class _Rank(msgspec.Struct):
    """One data-parallel rank in /v1/loads."""

    num_running_reqs: float
    num_waiting_reqs: float
    num_used_tokens: float | None = None
    max_total_num_tokens: float | None = None
    gen_throughput: float | None = None
    timestamp: float | None = None
    decode_moments: list[float] | None = None


class _Loads(msgspec.Struct):
    loads: list[_Rank]
    timestamp: str | None = None


class _OldRank(msgspec.Struct):
    """One rank in /get_load; those that wait are among its num_reqs."""

    num_reqs: float
    num_waiting_reqs: float
    num_tokens: float | None = None  # of those that run and those that wait


class LoadReader:
    """Reads one server's load, again and again; `source` is the path that works, None while none is known."""

    def __init__(self, url: str, headers: Mapping[str, str], http: Http) -> None:
        self._url = url
        self._headers = headers
        self._http = http
        self.source: str | None = None
        self._failures = 0
        self._pause = 0  # reads until all sources are tried again
        self._to_counter = 0  # reads until /metrics is looked at for the counter

    def forget(self) -> None:
        """The server was down: it may come back as another release."""
        self.source = None
        self._failures = self._pause = self._to_counter = 0

    async def read(self) -> Load | None:
        """The load now; None where the server does not tell it, or not in time. Never raises for what it says."""
        if self.source is None:
            return await self._find()
        load, gone = await self._from(self.source)
        if load is None:
            self._failures += 1
            if gone or self._failures >= FAILURES_TO_FORGET:
                self.forget()
            return None
        self._failures = 0
        return await self._with_counter(load)

    async def _find(self) -> Load | None:
        if self._pause:
            self._pause -= 1
            return None
        answered = True
        for path in _SOURCES:
            load, gone = await self._from(path)
            answered = answered and gone
            if load is not None:
                self.source = path
                return await self._with_counter(load)
        # One that gave no answer at all is asked again at once: it is down, or starts.
        self._pause = READS_TO_RETRY if answered else 0
        return None

    async def _from(self, path: str) -> tuple[Load | None, bool]:
        """What one source says; and whether the server answered that it has no such thing."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                status, body = await self._http.request("GET", self._url + path, self._headers, None, MOST_BYTES)
        except _BROKEN:
            return None, False
        load = _SOURCES[path](body) if status == 200 else None
        return load, load is None and status < 500

    async def _with_counter(self, load: Load) -> Load:
        """Add the counter of /metrics where the source has none."""
        if load.generated_tokens is not None or self.source == "/metrics":
            return load
        if self._to_counter:
            self._to_counter -= 1
            return load
        self._to_counter = READS_A_COUNTER - 1
        metrics, gone = await self._from("/metrics")
        if metrics is None:
            self._to_counter = READS_TO_RETRY if gone else self._to_counter
            return load
        return replace(load, generated_tokens=metrics.generated_tokens)


def from_v1_loads(body: bytes) -> Load | None:
    """The load in a body of /v1/loads."""
    try:
        told = msgspec.json.decode(body, type=_Loads)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not told.loads:
        return None
    moments = [rank.decode_moments[5] for rank in told.loads if rank.decode_moments and len(rank.decode_moments) > 5]
    capacity = _sum([rank.max_total_num_tokens for rank in told.loads])
    used = _sum([rank.num_used_tokens for rank in told.loads])
    return _load(
        sum(rank.num_running_reqs for rank in told.loads),
        sum(rank.num_waiting_reqs for rank in told.loads),
        capacity_tokens=capacity,
        generated_tokens=sum(moments) if moments else None,
        tokens_per_second=_sum([rank.gen_throughput for rank in told.loads]),
        kv_usage=used / capacity if used is not None and capacity else None,
        age_seconds=_age(told),
    )


def from_get_load(body: bytes) -> Load | None:
    """The load in a body of /get_load, which knows the requests alone."""
    try:
        ranks = msgspec.json.decode(body, type=list[_OldRank])
    except (msgspec.DecodeError, RecursionError):
        return None
    if not ranks:
        return None
    waiting = sum(rank.num_waiting_reqs for rank in ranks)
    return _load(sum(rank.num_reqs for rank in ranks) - waiting, waiting)


# With a colon; some exporters in between write it as an underscore.
_SAMPLE = re.compile(
    rb"^sglang[:_](num_running_reqs|num_queue_reqs|max_total_num_tokens|token_usage|gen_throughput"
    rb"|realtime_tokens_total)(?:\{(.*)\})? +(\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(dp_rank|mode)="([^"]*)"')


def from_metrics(body: bytes) -> Load | None:
    """The load in the text of /metrics.

    A rank may show a figure several times: once for each of its schedulers (--enable-metrics-for-all-schedulers), or by
    priority besides the total. The largest is the rank's.
    """
    ranks: defaultdict[bytes, dict[bytes, float]] = defaultdict(dict)
    for name, labels, text in _SAMPLE.findall(body):
        about = dict(_LABEL.findall(labels))
        value = _number(text)
        if value is None or (name == b"realtime_tokens_total" and about.get(b"mode") != b"decode"):
            continue
        figures = ranks[about.get(b"dp_rank", b"")]
        figures[name] = max(figures.get(name, value), value)
    known = [figures for figures in ranks.values() if b"num_running_reqs" in figures and b"num_queue_reqs" in figures]
    if not known:
        return None

    def total(name: bytes) -> float | None:
        return _sum([figures.get(name) for figures in known])

    usage = total(b"token_usage")
    counters = [figures[b"realtime_tokens_total"] for figures in known if b"realtime_tokens_total" in figures]
    return _load(
        total(b"num_running_reqs") or 0.0,
        total(b"num_queue_reqs") or 0.0,
        capacity_tokens=total(b"max_total_num_tokens"),
        generated_tokens=sum(counters) if counters else None,
        tokens_per_second=total(b"gen_throughput"),
        kv_usage=None if usage is None else usage / len(known),
    )


_SOURCES: Mapping[str, Callable[[bytes], Load | None]] = {
    "/v1/loads": from_v1_loads,
    "/get_load": from_get_load,
    "/metrics": from_metrics,
}


def _load(
    running: float,
    waiting: float,
    *,
    capacity_tokens: float | None = None,
    generated_tokens: float | None = None,
    tokens_per_second: float | None = None,
    kv_usage: float | None = None,
    age_seconds: float = 0.0,
) -> Load | None:
    """None if the requests cannot be counts; what else makes no sense is left out."""
    if not (0 <= running < _MOST_REQUESTS and 0 <= waiting < _MOST_REQUESTS):
        return None
    return Load(
        running=round(running),
        waiting=round(waiting),
        capacity_tokens=round(capacity_tokens) if capacity_tokens and 1 <= capacity_tokens < math.inf else None,
        generated_tokens=_sane(generated_tokens),
        tokens_per_second=_sane(tokens_per_second),
        kv_usage=_sane(kv_usage),
        age_seconds=_sane(age_seconds) or 0.0,
    )


def _sane(value: float | None) -> float | None:
    return value if value is not None and 0 <= value < math.inf else None


def _sum(values: list[float | None]) -> float | None:
    """None unless every rank says it."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _age(told: _Loads) -> float:
    """How far the snapshot of a rank that is at work lies behind the response, by the server's own clock.

    An idle rank that sleeps (--sleep-on-idle) publishes nothing, and nothing is missed.
    """
    stamps = [rank.timestamp for rank in told.loads if rank.timestamp and rank.num_running_reqs + rank.num_waiting_reqs]
    if told.timestamp is None or not stamps:
        return 0.0
    try:
        now = datetime.fromisoformat(told.timestamp)
    except ValueError:
        return 0.0
    return now.timestamp() - min(stamps) if now.tzinfo else 0.0
