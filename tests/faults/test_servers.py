"""Model servers that die, come back, are added and drained under a run, and a sample that kills its server."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from common.records import Record
from common.rejects import read_rejects
from tests.conftest import wait_until
from tests.faults.harness import DATASET, TRIED, Job, Simulator

Make = Callable[..., tuple[Job, Simulator]]
# A run of 500 samples, 32 at a time, takes some ten seconds.
PACE = ("--latency-mean", "0.7", "--latency-cv", "0.5")


def states(job: Job) -> dict[str, dict[str, Any]]:
    """What `status --json` says of each server, by its address."""
    return {server["url"]: server for server in job.seen()["servers"]}


def state_of(job: Job, server: Simulator) -> dict[str, Any]:
    """The same of one server; nothing where no worker has told of it, or not for a while."""
    return states(job).get(server.url, {})


def answers_of(kept: dict[int, Record]) -> Counter[str]:
    return Counter(record.server for record in kept.values())


def test_two_of_three_servers_die_and_one_comes_back(make_job: Make) -> None:
    job, first = make_job(rows=500, servers=3, hold_after=80, pace=PACE)
    _, second, third = job.servers
    run = job.start()
    job.wait_for_done(60)
    before = time.time()
    second.kill()
    third.kill()
    first.hold(after=60)
    job.wait_for_done(job_done(job) + 40)  # from the one that is left
    expected = {first.url: "up", second.url: "down", third.url: "down"}
    wait_until("that is seen", lambda: {url: server["state"] for url, server in states(job).items()} == expected)
    seen = job.seen()
    found = {server["url"]: server for server in seen["servers"]}
    for dead in (second, third):
        assert before - 1 <= found[dead.url]["since"] <= time.time()
        assert found[dead.url]["reason"]
        [trouble] = [trouble for trouble in seen["troubles"] if dead.url in trouble]
        assert trouble.startswith(f"{dead.url} is down since 20")
    old = len(job.written_by(second.url))
    second.start()
    wait_until("it is found well again", lambda: state_of(job, second).get("state") in {"up", "half_open"})
    job.finish(run)
    kept = job.check()
    assert answers_of(kept).keys() == {first.url, second.url, third.url}
    assert len(job.written_by(second.url)) > old


def job_done(job: Job) -> int:
    return job.wait_for("the ledger answers", lambda _: True).done


def test_all_servers_die_and_one_comes_back(make_job: Make) -> None:
    job, first = make_job(rows=300, servers=3, hold_after=60, pace=PACE)
    run = job.start()
    job.wait_for_done(60)
    before = time.time()
    for server in job.servers:
        server.kill()
    wait_until("all are down", lambda: {server["state"] for server in states(job).values()} == {"down"})
    seen = job.seen()
    assert seen["troubles"][0].startswith("no server can be used since 20")
    assert all(before - 1 <= server["since"] <= time.time() for server in seen["servers"])
    [dataset] = seen["datasets"]
    assert dataset["state"] in {"open", "exhausted"}
    assert dataset["rejected"] <= len(job.bad)  # rows that are bad from the start
    assert job.command("status").stdout.count(b"no server can be used since") == 1
    assert run.poll() is None
    first.start()
    job.finish(run)
    kept = job.check()
    assert first.url in answers_of(kept)


def test_a_server_is_added_to_a_run_and_another_drained(make_job: Make, tmp_path: Any) -> None:
    # What the servers hold, of 300 rows, keeps the run from its end while it is looked at.
    job, first = make_job(rows=300, hold_after=80, pace=PACE, concurrency=16)
    run = job.start()
    job.wait_for_done(40)
    second = Simulator(tmp_path, *PACE, name="added", hold_after=40).start()
    job.servers.append(second)  # from here on it is looked at, and ended, too; the configuration does not name it
    added = job.command("servers", "add", second.url)
    assert (added.returncode, added.stdout) == (0, b""), added.stderr
    assert f"{second.url}: added".encode() in added.stderr
    wait_until("it is known", lambda: state_of(job, second).get("state") == "up")
    first.hold(after=60)  # what it has held goes on, so that there are slots for both
    wait_until("it answers", lambda: state_of(job, second).get("answers", 0) > 10)
    drained = job.command("servers", "drain", first.url)
    assert (drained.returncode, drained.stdout) == (0, b""), drained.stderr
    wait_until("the worker knows", lambda: state_of(job, first).get("state", "gone") in {"draining", "gone"})
    first.release()
    wait_until("it has nothing left", lambda: listed(job)[first.url]["state"] == "drained")
    wait_until("nothing is at work there", lambda: first.at_work() == 0)
    wait_until("all its answers are written", lambda: len(job.written_by(first.url)) == first.answered() - TRIED)
    left = job.written_by(first.url)
    assert run.poll() is None  # else nothing is shown
    seen = listed(job)
    assert (seen[first.url]["configured"], seen[second.url]["configured"]) == (True, False)
    assert (seen[second.url]["state"], seen[second.url]["version"]) == ("up", "0.5.23")
    assert b"drained" in job.command("servers", "list").stdout
    job.finish(run)
    kept = job.check()
    assert job.written_by(first.url) == left
    assert answers_of(kept).keys() == {first.url, second.url}


def is_left(seen: dict[str, dict[str, Any]], server: Simulator, other: Simulator) -> bool:
    """Whether the worker, which tells of the other one, asks nothing more of `server`."""
    return other.url in seen and seen.get(server.url, {"state": "draining"})["state"] == "draining"


def listed(job: Job) -> dict[str, dict[str, Any]]:
    """What `servers list --json` says, by address."""
    done = job.command("servers", "list", "--json")
    assert done.returncode == 0, done.stderr.decode()
    return {server["url"]: server for server in msgspec.json.decode(done.stdout)["servers"]}


def test_a_sample_that_kills_its_server_is_rejected_with_its_index(make_job: Make) -> None:
    poison = 60
    # Twenty times faster than life: an answer takes 0.2 s, and the dead scheduler breaks its connections after 0.25.
    pace = ("--speed", "20", "--latency-mean", "4", "--restart-seconds", "0.5", "--fault", f"poison:ids=3+{3 + poison}")
    job, _ = make_job(rows=100, pace=pace)
    job.configure(allowed_failures=0.02)
    assert job.rows[poison][:2] == [3, 3 + poison]
    run = job.start()
    job.finish(run, 3)  # three rejects of a hundred, and two are allowed
    rejected = read_rejects(job.output, DATASET).rows
    assert {index: row.reason for index, row in rejected.items() if index not in job.bad} == {poison: "kills_server"}
    assert rejected[poison].id == f"row-{poison}"
    job.bad.add(poison)
    assert len(job.check()) == 100 - len(job.bad)
