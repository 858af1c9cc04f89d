"""Status tells what the ledger holds, in the form that programs rely on, and in one that fits a terminal."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from common.ledger import Ledger, Settled
from common.ledger._keys import WORKERS
from common.settings import DatasetSettings
from producer import display
from producer.cli import operate
from producer.status import snapshot
from tests.lines import write_config

NUMBER = (int, float)
# The contract of `status --json`: a program may rely on these keys and types, whatever else is there.
DATASET: dict[str, Any] = {
    "name": str,
    "state": str,
    "cap_tokens": (int, type(None)),
    "count": str,
    "spent_tokens": int,
    "prompt_tokens": int,
    "done": int,
    "failed": int,
    "rejected": int,
    "queued": int,
    "in_flight": int,
    "mean_tokens": NUMBER,
    "p50_tokens": int,
    "p95_tokens": int,
    "max_tokens": int,
    "truncated": int,
    "flags": dict,
    "tokens_per_second": NUMBER,
    "eta_seconds": (int, type(None)),
    # And what this version tells beyond the contract.
    "reason": str,
    "rejects": dict,
    "completion_tokens": int,
    "expired_leases": int,
}
WORKER: dict[str, Any] = {"name": str, "concurrency": int, "limit": int, "in_flight": int, "seen_seconds_ago": NUMBER}
SERVER: dict[str, Any] = {
    "url": str,
    "state": str,
    "running": (int, type(None)),
    "waiting": (int, type(None)),
    "kv_usage": (float, type(None)),
    "in_flight": int,
    "since": NUMBER,
    "reason": (str, type(None)),
}
TOTALS: dict[str, Any] = {
    "spent_tokens": int,
    "done": int,
    "failed": int,
    "rejected": int,
    "queued": int,
    "in_flight": int,
    "truncated": int,
    "tokens_per_second": NUMBER,
    "limit": int,
    "failed_attempts": dict,
    "eta_seconds": (int, type(None)),
}


def assert_shape(thing: dict[str, Any], shape: dict[str, Any]) -> None:
    assert set(shape) <= set(thing), set(shape) - set(thing)
    wrong = {
        key: thing[key]
        for key, kind in shape.items()
        if not isinstance(thing[key], kind) or isinstance(thing[key], bool)
    }
    assert wrong == {}


def server(url: str, state: str = "up", in_flight: int = 0, reason: str | None = None, **load: Any) -> dict[str, Any]:
    return {"url": url, "state": state, "in_flight": in_flight, "since": time.time() - 310, "reason": reason, **load}


def worker(limit: int, in_flight: int, *servers: dict[str, Any], trouble: str | None = None) -> dict[str, Any]:
    """What a worker says of itself."""
    return {
        "kind": "worker",
        "concurrency": limit,
        "limit": limit,
        "in_flight": in_flight,
        "trouble": trouble,
        "servers": list(servers),
    }


def say(ledger: Ledger, name: str, facts: dict[str, Any], seconds_ago: float = 0) -> None:
    now = ledger.heartbeat(name, facts)
    if seconds_ago:
        ledger.redis.hset(WORKERS, name, f"{now - round(seconds_ago * 1000)} {json.dumps(facts)}")


def register(ledger: Ledger, name: str, **more: Any) -> None:
    ledger.register(DatasetSettings(name=name, path=Path(f"{name}.jsonl"), **more))


def fill(ledger: Ledger) -> None:
    """Dataset A: of 20 rows 2 bad ones, 6 answered, 1 that could not be, 3 in flight, 8 queued; B and C beside it."""
    register(ledger, "A", cap_tokens=1000)
    ledger.feed(
        "A",
        before="",
        after="end",
        ended=True,
        rejected=[(0, "not_json"), (1, "too_long")],
        samples=[(index, b"prompt") for index in range(2, 20)],
    )
    ledger.admit("A", room=50, window=64, tokens_per_second=25.5)
    claimed, _ = ledger.claim("A", "w1@host", 3600, list(range(2, 12)))
    tokens = [10, 20, 30, 40, 50, 90]
    records = [
        Settled(one.index, one.attempt, 100, n, 60, ("truncated",) if n == 90 else ())
        for one, n in zip(claimed, tokens, strict=False)
    ]
    assert all(ledger.settle("A", records))
    assert ledger.reject("A", [(8, claimed[6].attempt, "bad_request")]) == [True]
    register(ledger, "B", cap_tokens=100_000, count="total")
    ledger.settle("B", [Settled(0, 1, 700, 300, 0, ())], rebuild=True)
    ledger.admit("B", room=9, window=64, tokens_per_second=30)
    register(ledger, "C")
    ledger.transition("C", "failed", ["open"], "its source c.jsonl cannot be read: No such file or directory")


def test_the_figures_are_those_of_the_ledger(ledger: Ledger) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", in_flight=3)))
    seen = snapshot(ledger)

    assert [dataset["name"] for dataset in seen["datasets"]] == ["A", "B", "C"]
    a, b, c = seen["datasets"]
    assert a == {
        "name": "A",
        "state": "open",
        "reason": "",
        "cap_tokens": 1000,
        "count": "completion",
        "spent_tokens": 240,
        "prompt_tokens": 600,
        "completion_tokens": 240,
        "done": 6,
        "failed": 1,
        "rejected": 3,
        "rejects": {"not_json": 1, "too_long": 1, "bad_request": 1},
        "queued": 8,
        "in_flight": 3,
        "mean_tokens": 40.0,
        "p50_tokens": a["p50_tokens"],
        "p95_tokens": a["p95_tokens"],
        "max_tokens": 90,
        "truncated": 1,
        "flags": {"truncated": 1},
        "expired_leases": 0,
        "tokens_per_second": 25.5,
        "eta_seconds": round((1000 - 240) / 25.5),
    }
    assert a["p50_tokens"] == pytest.approx(30, rel=0.08)
    assert a["p95_tokens"] == pytest.approx(90, rel=0.08)
    assert (b["spent_tokens"], b["prompt_tokens"], b["completion_tokens"]) == (1000, 700, 300)
    # With 300 tokens of answers come 700 of prompts, so the cap on both is neared at 100 tokens/s, not at 30.
    assert b["eta_seconds"] == round(99_000 / 100)
    assert (c["state"], c["cap_tokens"], c["eta_seconds"], c["mean_tokens"]) == ("failed", None, None, 0)
    assert c["reason"] == "its source c.jsonl cannot be read: No such file or directory"
    assert seen["totals"] == {
        "spent_tokens": 1240,
        "done": 7,
        "failed": 1,
        "rejected": 3,
        "queued": 8,
        "in_flight": 3,
        "truncated": 1,
        "tokens_per_second": 55.5,
        "limit": 64,
        "eta_seconds": 990,
        "failed_attempts": {},
    }
    assert seen["troubles"] == []


@pytest.mark.parametrize("state", ["paused", "capped", "exhausted", "halted", "failed"])
def test_a_dataset_that_does_not_run_has_no_rate_and_no_end(ledger: Ledger, state: str) -> None:
    register(ledger, "A", cap_tokens=1000)
    ledger.settle("A", [Settled(0, 1, 5, 5, 0, ())], rebuild=True)
    ledger.admit("A", room=9, window=64, tokens_per_second=30)
    ledger.transition("A", state, ["open"])
    (a,) = snapshot(ledger)["datasets"]
    assert (a["tokens_per_second"], a["eta_seconds"]) == (0, None)


def test_a_server_is_down_only_if_all_workers_find_it_down(ledger: Ledger) -> None:
    one, two, three = "http://a:1", "http://b:1", "http://c:1"
    say(ledger, "w1@host", worker(8, 5, server(one, in_flight=3), server(two, "down", 0, "timed out"), server(three)))
    say(ledger, "w2@host", worker(4, 4, server(one, "down", 0, "refused"), server(two, "down"), server(three, "up", 4)))
    say(ledger, "keeper", {"kind": "keeper"})
    seen = snapshot(ledger)
    assert [(w["name"], w["limit"], w["in_flight"]) for w in seen["workers"]] == [("w1@host", 8, 5), ("w2@host", 4, 4)]
    assert [(s["url"], s["state"], s["in_flight"]) for s in seen["servers"]] == [
        (one, "up", 3),
        (two, "down", 0),
        (three, "up", 4),
    ]
    (trouble,) = seen["troubles"]
    assert re.fullmatch(rf"{two} is down since [-0-9]+ [:0-9]+ \(5m[1-5]\ds\): timed out", trouble)
    assert seen["totals"]["limit"] == 12


def test_the_limits_of_the_workers_at_a_server_add_up_and_its_load_is_told_once(ledger: Ledger) -> None:
    one, two = "http://a:1", "http://b:1"
    load: dict[str, Any] = {"running": 40, "waiting": 3, "kv_usage": 0.973, "tokens_per_second": 700.5}
    steady: dict[str, Any] = {"limit": 30, "why": "steady: 3 waiting, 3 wanted"}
    say(ledger, "w1@host", worker(64, 35, server(one, in_flight=29, **steady, **load), server(two, in_flight=6)))
    say(ledger, "w2@host", worker(16, 14, server(one, in_flight=14, **(steady | {"limit": 16}), **load)))
    seen = snapshot(ledger)
    shown = {(s["url"], s["limit"], s["in_flight"], s["running"], s["waiting"], s["kv_usage"]) for s in seen["servers"]}
    assert shown == {(one, 46, 43, 40, 3, 0.973), (two, None, 6, None, None, None)}
    assert render(seen, 120)[-2:] == [
        f"{one}: 43 of at most 46 in flight (steady: 3 waiting, 3 wanted), 40 running, 97% of its KV",
        f"{two}: 6 in flight",
    ]


@pytest.mark.parametrize("datasets", [0, 1])
def test_a_worker_that_fell_silent_is_named_and_its_slots_are_not_counted(ledger: Ledger, datasets: int) -> None:
    for index in range(datasets):
        register(ledger, f"D{index}")
    say(ledger, "w1@host", worker(8, 5, server("http://a:1", "down", 5, "refused")), seconds_ago=100)
    say(ledger, "w2@host", worker(4, 1, server("http://a:1", in_flight=1), trouble="the disk is full"))
    seen = snapshot(ledger)
    assert [(w["name"], w["seen_seconds_ago"]) for w in seen["workers"]] == [
        ("w1@host", pytest.approx(100, abs=9)),
        ("w2@host", pytest.approx(0, abs=9)),
    ]
    assert seen["totals"]["limit"] == 4
    assert [(s["state"], s["in_flight"]) for s in seen["servers"]] == [("up", 1)]
    first, second = seen["troubles"]
    assert first.startswith("w1@host was last heard of 10")
    assert second == "w2@host: the disk is full"


# What programs see


def test_json_keeps_its_contract(ledger: Ledger, tmp_path: Path, valkey: str) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", in_flight=3), server("http://b:1", "down", 0, "refused")))
    config = write_config(tmp_path, valkey)
    result = CliRunner().invoke(operate.status, ["-c", str(config), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    seen = json.loads(result.stdout)
    assert set(seen) == {"datasets", "workers", "servers", "totals", "troubles"}
    assert [len(seen[key]) for key in ("datasets", "workers", "servers")] == [3, 1, 2]
    for key, shape in (("datasets", DATASET), ("workers", WORKER), ("servers", SERVER)):
        for thing in seen[key]:
            assert_shape(thing, shape)
    assert_shape(seen["totals"], TOTALS)
    assert all(isinstance(trouble, str) for trouble in seen["troubles"])
    assert json.loads(json.dumps(snapshot(ledger)["datasets"])) == seen["datasets"]


def test_json_of_an_empty_ledger(ledger: Ledger, tmp_path: Path, valkey: str) -> None:
    result = CliRunner().invoke(operate.status, ["-c", str(write_config(tmp_path, valkey)), "--json"])
    seen = json.loads(result.stdout)
    assert (seen["datasets"], seen["workers"], seen["servers"], seen["troubles"]) == ([], [], [], [])
    assert_shape(seen["totals"], TOTALS)


# What people see


def render(seen: dict[str, Any], width: int) -> list[str]:
    """The table as it is printed where there is no terminal."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(display.table(seen))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    return [line.rstrip() for line in lines]


def test_the_table_shows_every_dataset_and_what_is_wrong(ledger: Ledger) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", "down", 0, "refused")))
    lines = [re.sub(r"[-0-9]+ [:0-9]+ \(5m[1-5]\ds\)", "THEN (5m)", line) for line in render(snapshot(ledger), 120)]
    assert lines == [
        "dataset  state   samples  tokens  of cap  mean  trunc  rej  flight  tok/s     eta",
        "A        open          6     240   24.0%    40      1    3       3     26     30s",
        "B        open          1   1,000    1.0%   300      0    0       0     30  16m30s",
        "C        failed        0       0  no cap     0      0    0       0      0       -",
        "all                    7   1,240                    1    3       3     56  16m30s",
        "! C: its source c.jsonl cannot be read: No such file or directory",
        "! no server can be used since THEN (5m); the workers wait, and no sample loses a try",
        "! http://a:1 is down since THEN (5m): refused",
    ]


def big(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": "exhausted",
        "reason": "",
        "cap_tokens": 10_000_000,
        "done": 123_456,
        "spent_tokens": 9_999_999,
        "mean_tokens": 8100.4,
        "truncated": 1234,
        "rejected": 1234,
        "in_flight": 1500,
        "tokens_per_second": 1234.5,
        "eta_seconds": 360_000,
    }


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_table_with_large_figures_shows_each_of_them_whole(width: int) -> None:
    names = ["B1_glaive", "B2_OpenCodeInstruct", "x" * 64]
    totals = {key: value for key, value in big("all").items() if key not in {"name", "state", "reason", "cap_tokens"}}
    totals |= {"spent_tokens": 29_999_997}
    lines = render({"datasets": [big(name) for name in names], "totals": totals, "servers": [], "troubles": []}, width)
    text = "\n".join(lines)
    assert "…" not in text
    assert text.count("x") == 64 + text.count("exhausted")
    heads = lines[0].split()
    assert {"dataset", "state", "samples", "tokens", "rej", "eta"} <= set(heads)
    assert ("mean" in heads) == (width >= 100)
    for name in names[:2]:
        (line,) = [line for line in lines if line.startswith(name)]
        assert line.split()[1:5] == ["exhausted", "123,456", "9,999,999", "100.0%"]
        assert line.endswith("100h00m")
    (sums,) = [line for line in lines if line.startswith("all")]
    assert "29,999,997" in sums.split()


def test_an_empty_table_is_its_head() -> None:
    (head,) = render({"datasets": [], "totals": {}, "servers": [], "troubles": []}, 80)
    assert head.startswith("dataset  state")


def test_the_line_for_pipes(ledger: Ledger) -> None:
    fill(ledger)
    assert display.line(snapshot(ledger)) == (
        "7 samples, 1,240 tokens, 56 tokens/s, 3 in flight, 3 rejected, 2 datasets open"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (990, "16m30s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (360_000, "100h00m"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert display.duration(seconds) == text


def test_failed_attempts_are_summed_over_all_lives_of_all_workers(ledger: Ledger) -> None:
    ledger.set_failed_attempts("w1@host 1.0", {"nan": 2, "timeout": 1})
    ledger.set_failed_attempts("w1@host 2.0", {"nan": 1})
    ledger.set_failed_attempts("w1@host 2.0", {"nan": 3})
    ledger.set_failed_attempts("w2@host 1.0", {"stalled": 4})
    assert snapshot(ledger)["totals"]["failed_attempts"] == {"nan": 5, "timeout": 1, "stalled": 4}


def test_a_server_is_as_well_as_the_worker_finds_it_that_finds_it_best(ledger: Ledger) -> None:
    say(
        ledger, "w1@host", worker(8, 0, server("http://a:1", "unfit", 0, "another model"), server("http://b:1", "down"))
    )
    say(ledger, "w2@host", worker(8, 0, server("http://a:1", "down", 0, "refused"), server("http://b:1", "half_open")))
    seen = snapshot(ledger)
    assert [(one["state"], one["reason"]) for one in seen["servers"]] == [("down", "refused"), ("half_open", None)]
    assert seen["troubles"][0].startswith("no server can be used since ")


def test_a_job_whose_servers_are_all_drained_says_so(ledger: Ledger) -> None:
    say(ledger, "w1@host", worker(8, 1, server("http://a:1", "draining", 1)))
    (trouble,) = snapshot(ledger)["troubles"]
    assert trouble.startswith("every server of this job is drained")
