"""Servers that freeze, pause and die under a worker, and the samples that kill them."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs

from common.ledger import Ledger
from common.rejects import read_rejects
from common.segments import records
from tests.integration.worker_steps import (
    SAMPLING,
    Server,
    Worker,
    assert_books_agree,
    fill,
    prompt_of,
    run,
    until,
    working,
)
from workers.sglang.server import Pauses
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.faults import Fault
from workers.sglang.watch import Patience

# A hundred times faster than life: an answer takes 40 ms, and a dead scheduler breaks its connections after 50, which
# must be within a trial also where the machine stands still for a while. A server that says nothing for 100 ms is asked
# three times whether it lives.
SPEED = 100.0
PAUSES = Pauses(first_seconds=0.002, longest_seconds=0.05, trial_seconds=3.0)
SHORT_TRIALS = structs.replace(PAUSES, trial_seconds=0.2)
PATIENCE = Patience(quiet_seconds=0.1, look_seconds=0.03, alive_seconds=0.5)
POISON = (777, 778)


def server(**settings: Any) -> Server:
    return Server(**({"speed": SPEED, "latency_mean_seconds": 4.0, "restart_seconds": 0.05} | settings))


def poisonous(*indices: int) -> dict[str, list[int]]:
    """The prompts of the samples that kill their server, for `fill`."""
    return {f"_{index}": [index, 5, *POISON, 6] for index in indices}


def ended(ledger: Ledger) -> int:
    state = ledger.snapshot("A")
    return state.done + state.rejected


def check(ledger: Ledger, output: Path, answers: Answers, samples: int, rejected: Sequence[int] = ()) -> None:
    """All samples have the records that belong to their prompts, save those that are rejected as kills_server."""
    assert_books_agree(ledger, output, "A")
    found = {record.index: record for record in records(output, "A")}
    rows = read_rejects(output, "A").rows
    assert {index: row.reason for index, row in rows.items()} == dict.fromkeys(rejected, "kills_server")
    assert all(row.id == f"row {index}" for index, row in rows.items())
    assert set(found) == set(range(samples)) - set(rejected)
    for index, record in found.items():
        answer = answers.answer(prompt_of(index), SAMPLING["max_new_tokens"])
        assert record.output_ids == answer.stream.ids(answer.completion_tokens)
    state = ledger.snapshot("A")
    assert (state.queued, state.in_flight) == (0, 0)


def nothing_runs(*servers: Server) -> bool:
    return all(one.now == one.load().running == one.load().waiting == 0 for one in servers)


def test_a_server_that_freezes_is_found_out_and_its_samples_go_to_the_other(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 80)
        first, second = server(), server()
        async with (
            first,
            second,
            working(valkey, tmp_path, [first, second], pauses=SHORT_TRIALS, patience=PATIENCE) as worker,
        ):
            worker.ring_all("A", 80, per_message=4)
            await until("both answer", lambda: first.totals.finished >= 8 and second.totals.finished >= 8)
            await until("it has some", lambda: first.now >= 3)
            first.faults.set({"frozen": Fault()})
            first.process.obey_faults()
            held = first.now
            await until("all have ended", lambda: ended(ledger) == 80)
            assert worker.client.failed_attempts["stalled"] >= held
            assert set(worker.client.failed_attempts) == {"stalled"}
            states = {state.url: state for state in worker.client.servers()}
            assert "its scheduler does not answer" in (states[first.url].reason or "")
            first.faults.set({"frozen": None})
            first.process.obey_faults()
            # Its calls were aborted when they were given up.
            await until("nothing is left at the servers", lambda: nothing_runs(first, second))
            check(ledger, tmp_path, Answers(first.config), 80)

    run(test)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_server_is_waited_for(valkey: str, ledger: Ledger, tmp_path: Path, mode: str) -> None:
    hour = 3600.0  # twice what a call may take

    async def test() -> None:
        fill(ledger, "A", 24)
        one = server(speed=2000.0, latency_mean_seconds=None)
        async with (
            one,
            working(valkey, tmp_path, one, pauses=PAUSES, patience=Patience(look_seconds=0.01)) as worker,
            aiohttp.ClientSession() as session,
        ):
            await _post(session, one.url + "/pause_generation", {"mode": mode})
            worker.ring_all("A", 24, per_message=4)
            await until("it has some", lambda: one.now == 8)
            calls = list(worker.client._running.values())
            for _ in range(2):
                # As if they had waited so long; and the pause is seen, which is none of their time.
                began = time.monotonic()
                for call in calls:
                    call.counts_from = began - hour
                await until("the pause is seen", lambda: all(call.counts_from > began for call in calls))  # noqa: B023
            assert one.now == 8
            await _post(session, one.url + "/continue_generation", {})
            await until("all have ended", lambda: ended(ledger) == 24)
            assert worker.client.failed_attempts == {}
            assert one.totals.taken == 24
            check(ledger, tmp_path, Answers(one.config), 24)

    run(test)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        assert response.status == 200


async def poisoned_run(
    valkey: str, ledger: Ledger, output: Path, servers: Sequence[Server], poison: Sequence[int], **options: Any
) -> Worker:
    """61 samples, of which some kill their server: those are rejected, and no other is."""
    samples = 61
    fill(ledger, "A", samples, **poisonous(*poison))
    async with working(valkey, output, list(servers), pauses=PAUSES, **options) as worker:
        worker.ring_all("A", samples, per_message=4)
        await until("all have ended", lambda: ended(ledger) == samples)
    await until("nothing is left at the servers", lambda: nothing_runs(*servers))
    check(ledger, output, Answers(servers[0].config), samples, poison)
    return worker


FAULT = f"poison:ids={'+'.join(map(str, POISON))}"


@pytest.mark.parametrize("limit", [1, 8, 40])
def test_a_sample_that_kills_its_server_is_rejected_and_no_other(
    valkey: str, ledger: Ledger, tmp_path: Path, limit: int
) -> None:
    async def test() -> None:
        one = server(faults=(FAULT,))
        async with one:
            worker = await poisoned_run(valkey, ledger, tmp_path, [one], [30], limit=limit)
        assert one.faults.active["poison"].struck == 3
        assert worker.client.failed_attempts["connection_lost"] >= 3
        assert set(worker.client.failed_attempts) <= {"connection_lost", "unreachable"}

    run(test)


def test_a_sample_that_kills_each_of_its_servers_is_rejected_and_no_other(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        one, two = server(faults=(FAULT,)), server(faults=(FAULT,))
        async with one, two:
            await poisoned_run(valkey, ledger, tmp_path, [one, two], [30])
        assert one.faults.active["poison"].struck + two.faults.active["poison"].struck == 3

    run(test)


def test_several_samples_that_kill_their_server_are_rejected_and_no_other(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        one = server(faults=(FAULT,))
        async with one:
            await poisoned_run(valkey, ledger, tmp_path, [one], [20, 23, 30, 31, 50])

    run(test)


def test_a_sample_that_kills_no_server_any_more_is_answered(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    """Two deaths in which all were in flight are no proof against any of them."""

    async def test() -> None:
        fill(ledger, "A", 60)
        one = server()
        async with one, working(valkey, tmp_path, one, pauses=SHORT_TRIALS) as worker:
            worker.ring_all("A", 60, per_message=4)
            for deaths in range(1, 3):
                await until("it is there", lambda: not one.dead.is_set())
                one.process.pause("in_place")  # none of them ends before all have come
                await until("it has some", lambda: one.now == 8)
                one.die("the operator's mistake")
                lost = 8 * deaths
                await until(
                    "all were lost",
                    lambda lost=lost: worker.client.failed_attempts["connection_lost"] >= lost,  # type: ignore[misc]
                )
            await until("all have ended", lambda: ended(ledger) == 60)
            check(ledger, tmp_path, Answers(one.config), 60)

    run(test)


def test_nothing_is_lost_or_used_up_while_the_only_server_is_dead(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 40)
        one = server(restart_seconds=None)
        async with one, working(valkey, tmp_path, one, pauses=SHORT_TRIALS) as worker:
            one.process.pause("in_place")
            worker.ring_all("A", 40, per_message=4)
            await until("it has some", lambda: one.now == 8)
            one.die("power is gone")
            await until("it is down", lambda: worker.client.servers()[0].state == "down")
            await until("all calls have broken", lambda: worker.client.in_flight == 0)
            since = worker.client.servers()[0].since
            refused = worker.client.failed_attempts["unreachable"]
            await asyncio.sleep(0.5)  # ten of its longest pauses
            [state] = worker.client.servers()
            assert (state.state, state.since) == ("down", since)
            assert worker.client.failed_attempts["unreachable"] == refused  # it is probed, and no sample is tried
            await one.restart()
            await until("all have ended", lambda: ended(ledger) == 40)
            check(ledger, tmp_path, Answers(one.config), 40)

    run(test)
