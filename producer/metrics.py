"""`/metrics` for Prometheus, from the same read model as `status` and `top` (producer/status.py).

Names and units follow Prometheus's conventions: counters end in `_total`, times are seconds, sizes bytes, shares
ratios.
Counters are the ledger's: when it is built anew they may fall, which Prometheus takes for a restart.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import TokenmillError
from common.ledger import ENDED_STATES, OPEN_STATES, Ledger
from common.settings import Settings
from producer.status import SERVER_STATES, snapshot

log = logging.getLogger(__name__)
_STATES = (*OPEN_STATES, "paused", *ENDED_STATES)

# name, help, key of the snapshot's entry
_DATASET_COUNTERS = (
    ("spent_tokens", "Tokens that count against the cap.", "spent_tokens"),
    ("prompt_tokens", "Prompt tokens of the accepted answers.", "prompt_tokens"),
    ("completion_tokens", "Completion tokens of the accepted answers.", "completion_tokens"),
    ("samples_done", "Samples with an accepted answer.", "done"),
    ("expired_leases", "Samples taken back from workers that were not heard of.", "expired_leases"),
)
_DATASET_GAUGES = (
    ("cap_tokens", "The cap; absent where there is none.", "cap_tokens"),
    ("queued_samples", "Samples that wait for a worker.", "queued"),
    ("in_flight_samples", "Samples claimed by a worker.", "in_flight"),
    ("tokens_per_second", "Completion tokens a second of late.", "tokens_per_second"),
    ("cap_eta_seconds", "Until the cap at this rate; absent where it cannot be told.", "eta_seconds"),
    ("answer_mean_tokens", "Mean length of the accepted answers.", "mean_tokens"),
    ("answer_p50_tokens", "Median length of the accepted answers.", "p50_tokens"),
    ("answer_p95_tokens", "95th percentile of the lengths of the accepted answers.", "p95_tokens"),
    ("answer_max_tokens", "The longest accepted answer.", "max_tokens"),
    ("weight", "Its share of the servers, beside the other datasets' weights.", "weight"),
)
_WORKER_GAUGES = (
    ("in_flight_samples", "Answers in flight.", "in_flight"),
    ("limit_samples", "Answers that the governors allow in flight now.", "limit"),
    ("concurrency_samples", "Answers in flight at most.", "concurrency"),
    ("seen_seconds_ago", "Since it was last heard of.", "seen_seconds_ago"),
)
_SERVER_GAUGES = (
    ("running_requests", "Requests that decode there, by its own word.", "running"),
    ("waiting_requests", "Requests that wait there, by its own word.", "waiting"),
    ("kv_usage_ratio", "Share of its KV pool in use.", "kv_usage"),
    ("tokens_per_second", "Tokens a second that it generates.", "tokens_per_second"),
    ("in_flight_requests", "Requests that our workers have there.", "in_flight"),
    ("limit_requests", "Requests that the governors allow there now.", "limit"),
)


class Snapshots(Collector):
    """Asks for a snapshot at each scrape. `snapshot` raises redis.RedisError where Redis is away: `tokenmill_up` 0."""

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]], output: Path) -> None:
        self._snapshot = snapshot
        self._output = output

    def describe(self) -> Iterator[Metric]:
        """Nothing: else the registry would collect once at its start to learn the names."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tokenmill_build", "The release that runs.", value={"version": version("tokenmill")})
        started = time.perf_counter()
        try:
            seen = self._snapshot()
        except (redis.RedisError, TokenmillError) as error:
            log.warning("no metrics: Redis does not answer (%s)", error)
            yield GaugeMetricFamily("tokenmill_up", "Whether the ledger answers.", 0)
            return
        seconds = time.perf_counter() - started
        yield GaugeMetricFamily("tokenmill_up", "Whether the ledger answers.", 1)
        yield GaugeMetricFamily("tokenmill_snapshot_seconds", "What reading the ledger took.", seconds)
        yield from _disk(self._output)
        yield _backlog(seen["datasets"])
        yield from _datasets(seen["datasets"])
        yield from _workers(seen["workers"])
        yield from _servers(seen["servers"])
        failed = CounterMetricFamily(
            "tokenmill_failed_attempts", "Calls that gave no answer and were made again, by reason.", labels=["reason"]
        )
        for reason, count in seen["totals"]["failed_attempts"].items():
            failed.add_metric([reason], count)
        yield failed
        yield GaugeMetricFamily("tokenmill_troubles", "Sentences of `status` on what is wrong.", len(seen["troubles"]))


def snapshot_of(redis_url: str) -> Mapping[str, Any]:
    """A snapshot over a connection of its own: a ledger is for one thread, and each scrape has its own."""
    ledger = Ledger.connect(redis_url, attempts=1)
    try:
        return snapshot(ledger)
    finally:
        ledger.close()


@contextmanager
def metrics_served(settings: Settings) -> Iterator[None]:
    """Serve `/metrics` where [control] metrics says, from threads, until the block ends. A port in use is a warning.

    The job does not depend on being watched, and a second `control` on one machine finds the port taken.
    """
    address = settings.control.metrics
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshots(lambda: snapshot_of(settings.redis_url), settings.output))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        log.warning('no metrics on %s: %s; set [control] metrics to another address, or to ""', address, error.strerror)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _disk(output: Path) -> Iterator[Metric]:
    try:
        free = shutil.disk_usage(output).free
    except OSError:  # the folder is not there yet, or its disk is away
        return
    yield GaugeMetricFamily("tokenmill_output_free_bytes", "Free space where the answers are written.", free)


def _backlog(datasets: list[Mapping[str, Any]]) -> Metric:
    """What workers are wanted for: deploy/kubernetes/keda.yaml scales them by it."""
    waiting = sum(dataset["queued"] for dataset in datasets if dataset["state"] in OPEN_STATES)
    in_flight = sum(dataset["in_flight"] for dataset in datasets)
    text = "Samples that wait or are in flight, of the datasets that are not paused and have not ended."
    return GaugeMetricFamily("tokenmill_backlog_samples", text, waiting + in_flight)


def _datasets(datasets: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text, key in _DATASET_COUNTERS:
        yield _family(CounterMetricFamily, f"tokenmill_dataset_{name}", text, "dataset", datasets, key)
    for name, text, key in _DATASET_GAUGES:
        yield _family(GaugeMetricFamily, f"tokenmill_dataset_{name}", text, "dataset", datasets, key)
    rejected = CounterMetricFamily(
        "tokenmill_dataset_samples_rejected", "Samples that have no answer, by reason.", labels=["dataset", "reason"]
    )
    flagged = CounterMetricFamily(
        "tokenmill_dataset_samples_flagged", "Accepted answers that carry a flag.", labels=["dataset", "flag"]
    )
    state = GaugeMetricFamily(
        "tokenmill_dataset_state", "1 for the state that the dataset is in.", labels=["dataset", "state"]
    )
    gate = GaugeMetricFamily(
        "tokenmill_dataset_gate", "1 for the gate that has stopped the dataset.", labels=["dataset", "gate"]
    )
    for dataset in datasets:
        if dataset["gate"]:
            gate.add_metric([dataset["name"], dataset["gate"]], 1)
        for reason, count in dataset["rejects"].items():
            rejected.add_metric([dataset["name"], reason], count)
        for flag, count in dataset["flags"].items():
            flagged.add_metric([dataset["name"], flag], count)
        for one in _STATES:
            state.add_metric([dataset["name"], one], dataset["state"] == one)
    yield from (rejected, flagged, state, gate)


def _workers(workers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text, key in _WORKER_GAUGES:
        yield _family(GaugeMetricFamily, f"tokenmill_worker_{name}", text, "worker", workers, key)


def _servers(servers: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text, key in _SERVER_GAUGES:
        yield _family(GaugeMetricFamily, f"tokenmill_server_{name}", text, "server", servers, key, "url")
    answers = "Answers that our workers took from it since they started."
    yield _family(CounterMetricFamily, "tokenmill_server_answers", answers, "server", servers, "answers", "url")
    state = GaugeMetricFamily(
        "tokenmill_server_state", "1 for the state that the server is in.", labels=["server", "state"]
    )
    for server in servers:
        for one in SERVER_STATES:
            state.add_metric([server["url"], one], server["state"] == one)
    yield state


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    entries: list[Mapping[str, Any]],
    key: str,
    label_key: str = "name",
) -> Metric:
    """One sample an entry that has a figure under `key`."""
    family = kind(name, text, labels=[label])
    for entry in entries:
        if entry.get(key) is not None:
            family.add_metric([entry[label_key]], entry[key])
    return family
