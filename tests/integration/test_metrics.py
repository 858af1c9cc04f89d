"""/metrics: its figures are those of `status`, its names those that the dashboard and the alert rules ask for."""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.ledger import Ledger, Settled
from common.sections import ControlSettings, DatasetSettings
from common.settings import Settings
from producer.metrics import Snapshots, metrics_served, snapshot_of
from producer.status import snapshot
from tests.conftest import REPO

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(ledger: Ledger, output: Path) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshots(lambda: snapshot(ledger), output))
    return generate_latest(registry).decode()


@pytest.fixture
def at_work(ledger: Ledger) -> Ledger:
    """Two datasets, a reject, an answer with a flag, a worker and a server."""
    for name, cap in (("A", 1000), ("B.b", None)):
        ledger.register(DatasetSettings(name=name, path=Path("x"), cap_tokens=cap))
    rejected, samples = [(2, "too_long")], [(0, b"p"), (1, b"p")]
    ledger.feed("A", before="", after="1 0", ended=False, rejected=rejected, samples=samples)
    ledger.admit("A", room=10, window=10, tokens_per_second=17.0)
    claimed, _ = ledger.claim("A", "w", 60, [0, 1])
    attempts = {one.index: one.attempt for one in claimed}
    ledger.settle("A", [Settled(0, attempts[0], 7, 300, 2, ("truncated",))], segment="A/w-1.jsonl", committed_bytes=9)
    server = {"url": "http://127.0.0.1:1", "state": "up", "since": 0.0, "reason": None, "in_flight": 1, "answers": 5}
    load = {"running": 3, "waiting": 0, "kv_usage": 0.25, "tokens_per_second": 17.0, "limit": 4, "why": "steady"}
    worker = {"kind": "worker", "concurrency": 8, "limit": 4, "in_flight": 1, "servers": [server | load]}
    ledger.heartbeat("w@host", worker)
    ledger.heartbeat("keeper", {"kind": "keeper"})
    ledger.set_failed_attempts("w@host 1", {"timeout": 2})
    return ledger


def test_the_figures_are_those_of_status(at_work: Ledger, tmp_path: Path) -> None:
    found = scraped(scrape(at_work, tmp_path))
    [a, b] = snapshot(at_work)["datasets"]

    def of(name: str, **labels: str) -> float | None:
        return found.get((f"tokenmill_{name}", tuple(sorted(labels.items()))))

    assert of("up") == 1
    assert of("dataset_spent_tokens_total", dataset="A") == a["spent_tokens"] == 300
    assert of("dataset_prompt_tokens_total", dataset="A") == 7
    assert of("dataset_cap_tokens", dataset="A") == 1000
    assert of("dataset_cap_tokens", dataset="B.b") is None
    assert of("dataset_samples_done_total", dataset="A") == a["done"] == 1
    assert of("dataset_samples_done_total", dataset="B.b") == b["done"] == 0
    assert of("dataset_samples_rejected_total", dataset="A", reason="too_long") == 1
    assert of("dataset_samples_flagged_total", dataset="A", flag="truncated") == 1
    assert of("dataset_in_flight_samples", dataset="A") == a["in_flight"] == 1
    assert of("dataset_state", dataset="A", state="open") == 1
    assert of("dataset_state", dataset="A", state="halted") == 0
    assert of("worker_limit_samples", worker="w@host") == 4
    assert of("server_kv_usage_ratio", server="http://127.0.0.1:1") == 0.25
    assert of("server_state", server="http://127.0.0.1:1", state="up") == 1
    assert of("server_answers_total", server="http://127.0.0.1:1") == 5
    assert of("failed_attempts_total", reason="timeout") == 2
    free = of("output_free_bytes")
    assert free is not None
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_it_is_served_until_the_end_and_a_port_in_use_does_no_harm(
    at_work: Ledger, valkey: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    made = Settings.model_validate({"output": tmp_path, "redis": valkey, "tokenizer": {"path": tmp_path}})
    settings = made.model_copy(update={"control": ControlSettings(metrics=address)})  # the tests' environment has ""
    with metrics_served(settings):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            assert b'tokenmill_dataset_spent_tokens_total{dataset="A"} 300.0' in response.read()
        with metrics_served(settings):
            pass
        assert f"no metrics on {address}" in caplog.text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


def test_without_redis_it_says_so(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshots(lambda: snapshot_of(f"unix://{tmp_path}/nobody"), tmp_path))
    found = scraped(generate_latest(registry).decode())
    assert found["tokenmill_up", ()] == 0
    assert not any(name.startswith("tokenmill_dataset") for name, _ in found)


def queries(node: Any) -> Iterator[str]:
    """Every `expr` and variable query of a dashboard or a file of rules."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in {"expr", "query"} and isinstance(value, str) and value != "prometheus":
                yield value
            else:
                yield from queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from queries(value)


@pytest.mark.parametrize("path", ["deploy/grafana/tokenmill.json", "deploy/prometheus/alerts.yml"])
def test_every_query_asks_for_what_there_is(at_work: Ledger, tmp_path: Path, path: str) -> None:
    text = (REPO / path).read_text(encoding="utf-8")
    asked = [*queries(json.loads(text) if path.endswith(".json") else yaml.safe_load(text))]
    assert len(asked) >= 7
    there = scraped(scrape(at_work, tmp_path))
    labels: dict[str, set[str]] = {}
    for name, pairs in there:
        labels.setdefault(name, {"instance", "job"}).update(key for key, _ in pairs)
    for query in asked:
        names = re.findall(r"\btokenmill_\w+", query)
        assert names or query.startswith("up"), query
        assert [name for name in names if name not in labels] == [], query
        for name, inside in re.findall(r"(tokenmill_\w+)\{([^}]*)\}", query):
            used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", inside))
            assert used <= labels[name], query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not here")
def test_promtool_accepts_names_and_rules(at_work: Ledger, tmp_path: Path) -> None:
    def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["promtool", *arguments], input=given, capture_output=True, text=True, check=False, timeout=60
        )

    names = promtool("check", "metrics", given=scrape(at_work, tmp_path))
    assert (names.returncode, names.stdout + names.stderr) == (0, "")
    rules = promtool("check", "config", str(REPO / "deploy/prometheus/prometheus.yml"))
    assert rules.returncode == 0, rules.stderr
    alerts = promtool("test", "rules", str(REPO / "tests/integration/alerts.promtool.yml"))
    assert alerts.returncode == 0, alerts.stdout + alerts.stderr
