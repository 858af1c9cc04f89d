"""Status tells what the ledger holds, in the form that programs rely on, and in one that fits a terminal."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.events import make_event
from common.ledger import Ledger, Settled
from producer.cli import operate
from producer.status import snapshot
from tests.integration.status_steps import at_work, fill, register, say, server, worker
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
    "uncounted_tokens": int,
    "tokens_per_second": NUMBER,
    "eta_seconds": (int, type(None)),
    # And what this version tells beyond the contract.
    "weight": NUMBER,
    "cached_tokens": int,
    "no_think_end": int,
    "attempts": int,
    "reason": str,
    "rejects": dict,
    "completion_tokens": int,
    "expired_leases": int,
}
WORKER: dict[str, Any] = {
    "name": str,
    "state": str,
    "concurrency": int,
    "limit": int,
    "in_flight": int,
    "seen_seconds_ago": NUMBER,
}
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
    "no_think_end": int,
    "expired_leases": int,
    "retries": int,
    "cap_tokens": (int, type(None)),
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
        "gate": None,
        "cap_tokens": 1000,
        "count": "completion",
        "weight": 1.0,
        "spent_tokens": 240,
        "prompt_tokens": 600,
        "completion_tokens": 240,
        "cached_tokens": 360,
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
        "no_think_end": 0,
        "flags": {"truncated": 1},
        "uncounted_tokens": 0,
        "stopped": {},
        "attempts": 10,
        "expired_leases": 0,
        "tokens_per_second": 25.5,
        "eta_seconds": round(11 * 40 / 25.5),  # its source has ended: 11 more answers of 40 tokens each
    }
    assert a["p50_tokens"] == pytest.approx(30, rel=0.08)
    assert a["p95_tokens"] == pytest.approx(90, rel=0.08)
    assert (b["spent_tokens"], b["prompt_tokens"], b["completion_tokens"]) == (1000, 700, 300)
    # With 300 tokens of answers come 700 of prompts, so that 29,700 more are wanted of it: at 30 tokens/s until A has
    # ended, then at the 55.5 of both.
    assert b["eta_seconds"] == round(440 / 25.5 + (29_700 - 30 * 440 / 25.5) / 55.5)
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
        "no_think_end": 0,
        "expired_leases": 0,
        "tokens_per_second": 55.5,
        "cap_tokens": None,  # C has none
        "limit": 64,
        "eta_seconds": b["eta_seconds"],
        "failed_attempts": {},
        "retries": 0,
    }
    assert [(event["what"], event["dataset"]) for event in seen["events"]] == []
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


@pytest.mark.parametrize("datasets", [0, 1])
def test_a_worker_that_fell_silent_is_named_and_its_slots_are_not_counted(ledger: Ledger, datasets: int) -> None:
    for index in range(datasets):
        register(ledger, f"D{index}")
    say(ledger, "keeper", {"kind": "keeper"})
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


def test_datasets_that_share_the_servers_end_in_the_order_of_what_is_to_come_at_their_rates(ledger: Ledger) -> None:
    for name, cap_tokens, rate in (("A", 1000, 10.0), ("B", 3000, 20.0), ("C", None, 10.0)):
        register(ledger, name, cap_tokens=cap_tokens)
        ledger.settle(name, [Settled(0, 1, 5, 100, 0, ())], rebuild=True)
        ledger.admit(name, room=9, window=64, tokens_per_second=rate)
    at_work(ledger)
    seen = snapshot(ledger)
    # A needs 90 s at its rate. B has then 2900 - 1800 tokens to come, at 20 of the 30 tokens/s that share all 40.
    assert [dataset["eta_seconds"] for dataset in seen["datasets"]] == [90, 90 + round(1100 / (20 * 40 / 30)), None]
    assert seen["totals"]["eta_seconds"] is None  # nobody knows how long C's source is
    ledger.transition("C", "paused", ["open"])
    assert snapshot(ledger)["totals"]["eta_seconds"] == round((900 + 2900) / 30)


def test_a_dataset_far_over_its_cap_is_named(ledger: Ledger) -> None:
    for name, tokens in (("A", 1200), ("B", 1009)):
        register(ledger, name, cap_tokens=1000)
        ledger.settle(name, [Settled(i, 1, 5, tokens // 100, 0, ()) for i in range(100)], rebuild=True)
    at_work(ledger)
    assert snapshot(ledger)["troubles"] == ["A is at 1,200 tokens, 20% over its cap"]


def test_the_last_events_are_told_and_workers_that_fell_silent_are_called_so(ledger: Ledger) -> None:
    for number in range(30):
        ledger.add_event(make_event("paused", f"number {number}", "A"))
    say(ledger, "w1@host", worker(8, 5) | {"state": "draining"})
    say(ledger, "w2@host", worker(8, 5), seconds_ago=100)
    seen = snapshot(ledger)
    assert [event["detail"] for event in seen["events"]] == [f"number {number}" for number in range(10, 30)]
    assert [one["state"] for one in seen["workers"]] == ["draining", "silent"]
    assert [event["detail"] for event in snapshot(ledger, events=2)["events"]] == ["number 28", "number 29"]


# Whether anybody works


def test_a_job_that_nobody_works_on_says_so_and_has_no_rate(ledger: Ledger) -> None:
    """The rates are those of the last tick of a keeper: they stood there frozen, with a time until the end."""
    register(ledger, "A", cap_tokens=1000)
    ledger.settle("A", [Settled(0, 1, 5, 5, 0, ())], rebuild=True)
    ledger.admit("A", room=9, window=64, tokens_per_second=271)
    seen = snapshot(ledger)
    (trouble,) = seen["troubles"]
    assert trouble == (
        "neither control nor a worker is heard of: nothing will start until `tokenmill run` is started, or `tokenmill "
        "control` and `tokenmill worker`"
    )
    (a,) = seen["datasets"]
    assert (a["tokens_per_second"], a["eta_seconds"], seen["totals"]["tokens_per_second"]) == (0, None, 0)
    at_work(ledger)
    seen = snapshot(ledger)
    assert seen["troubles"] == []
    assert seen["datasets"][0]["tokens_per_second"] == 271


@pytest.mark.parametrize(
    ("there", "gone", "said"),
    [
        ("keeper", "worker", "no worker is heard of: nothing will start until `tokenmill worker` is started"),
        ("worker", "keeper", "control is not heard of: nothing more is fed or sent; start `tokenmill control`"),
    ],
)
def test_which_of_them_is_missing_is_said(ledger: Ledger, there: str, gone: str, said: str) -> None:
    register(ledger, "A")
    ledger.admit("A", room=9, window=64, tokens_per_second=271)
    say(ledger, there, worker(8, 0) | {"kind": there})
    say(ledger, gone, worker(8, 0) | {"kind": gone}, seconds_ago=11)
    seen = snapshot(ledger)
    assert seen["troubles"][0] == said
    assert seen["datasets"][0]["tokens_per_second"] == 0


def test_nobody_is_missed_who_is_being_started_or_has_nothing_to_do(ledger: Ledger) -> None:
    register(ledger, "A", cap_tokens=1000)
    assert snapshot(ledger, at_end=True)["troubles"] == []
    ledger.expect_processes(60)
    assert snapshot(ledger)["troubles"] == []
    ledger.redis.flushall()
    register(ledger, "A")
    assert len(snapshot(ledger)["troubles"]) == 1
    ledger.transition("A", "exhausted", ["open"])
    assert snapshot(ledger)["troubles"] == []


def test_a_worker_whose_process_is_gone_is_dead_and_has_nothing_in_flight(ledger: Ledger) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    here = {"host": socket.gethostname(), "pid": ended.pid, "began": "some time"}
    say(ledger, "w1@here", worker(8, 9) | here, seconds_ago=70)
    say(ledger, "w2@there", worker(8, 9) | here | {"host": "elsewhere"}, seconds_ago=70)
    seen = snapshot(ledger)
    assert [(one["state"], one["in_flight"]) for one in seen["workers"]] == [("dead", 0), ("silent", 9)]
    assert re.fullmatch(r"w1@here was last heard of 7\d s ago; its process is gone", seen["troubles"][0])
    assert re.fullmatch(r"w2@there was last heard of 7\d s ago", seen["troubles"][1])


# What programs see


def test_json_keeps_its_contract(ledger: Ledger, tmp_path: Path, valkey: str) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", in_flight=3), server("http://b:1", "down", 0, "refused")))
    config = write_config(tmp_path, valkey)
    result = CliRunner().invoke(operate.status, ["-c", str(config), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    seen = json.loads(result.stdout)
    assert set(seen) == {"at", "datasets", "workers", "servers", "totals", "troubles", "events"}
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
