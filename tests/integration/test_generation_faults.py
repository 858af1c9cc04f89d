"""The worker when it stops, when its disk is full, and when Redis is away: no answer is lost, none is made twice."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import redis

from common.ledger import Claimed, Ledger
from common.segments import count
from producer.embedded import EmbeddedRedis
from tests.disk import enlarge, small_disk
from tests.integration.ledger_steps import given_back
from tests.integration.worker_steps import Server, assert_books_agree, fill, play, run, until, working
from workers.governor import Load
from workers.in_flight import told

ENDLESS = 1000.0


@pytest.fixture
def own_valkey() -> Iterator[EmbeddedRedis]:
    """A Valkey that a test may stop and kill."""
    with TemporaryDirectory(prefix="tm-") as folder:
        server = EmbeddedRedis(Path(folder), Path(folder) / "s").start()
        yield server
        server.stop()


def url_of(server: EmbeddedRedis) -> str:
    return f"unix://{server._socket}"


def numbers(ledger: Ledger, dataset: str = "A") -> tuple[int, int, int]:
    """Queued, in flight, done."""
    state = ledger.snapshot(dataset)
    return state.queued, state.in_flight, state.done


# The end of a worker


def test_a_drain_waits_for_what_is_in_flight_and_starts_nothing_more(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 12)
        go = asyncio.Event()

        async def wait(index: int) -> list[int]:
            await go.wait()
            return [index, 5]

        async with working(valkey, tmp_path, play(wait), limit=3) as worker:
            worker.ring_all("A", 12, per_message=4)
            await until("three are asked for", lambda: worker.client.in_flight == 3)
            stopping = asyncio.create_task(worker.stop(drain_seconds=ENDLESS))
            # The fourth of the message was claimed and not started: another worker may have it at once.
            await until("it is given back", lambda: given_back(ledger, "A") == [3])
            assert numbers(ledger) == (9, 3, 0)
            go.set()
            await stopping
        assert numbers(ledger) == (9, 0, 3)
        assert worker.acked == {"A 0": 1}  # the others were never claimed: Celery gives them back
        assert worker.summaries == {"A 0": "6 tokens: 3 stop, 1 released"}
        assert ledger.processes() == {}
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_drain_that_takes_too_long_aborts_on_the_server_and_loses_nothing(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 6)
        async with Server(latency_mean_seconds=ENDLESS) as server:
            async with working(valkey, tmp_path, server, limit=4) as worker:
                worker.ring("A", range(6))
                await until("four are generated", lambda: server.load().running == 4)
                await worker.stop(drain_seconds=0.05)
                assert (server.load().running, server.load().waiting) == (0, 0)
            assert (server.totals.taken, server.totals.aborted, server.totals.finished) == (4, 4, 0)
        assert numbers(ledger) == (6, 0, 0)
        assert given_back(ledger, "A") == list(range(6))
        assert worker.summaries == {"A 0": "0 tokens: 6 released"}
        assert count(tmp_path, "A").ends == {}
        async with Server(speed=0.0) as server, working(valkey, tmp_path, server) as other:
            other.ring("A", range(6))
            await until("another worker has done them", lambda: ledger.snapshot("A").done == 6)
        assert ledger.redis.exists("tokenmill:d:A:tries") == 0  # a worker that stops uses up no try
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_drain_can_be_hurried(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 2)
        server = Server(latency_mean_seconds=ENDLESS)
        async with server, working(valkey, tmp_path, server) as worker:
            worker.ring("A", [0, 1])
            await until("both are generated", lambda: server.load().running == 2)
            stopping = asyncio.create_task(worker.stop(drain_seconds=ENDLESS))
            await until("it waits", lambda: worker.generation._closing)
            worker.generation.hurry()
            await stopping
            assert (server.load().running, server.totals.aborted) == (0, 2)
        assert numbers(ledger) == (2, 0, 0)

    run(test)


def test_an_answer_that_comes_while_the_others_are_aborted_is_kept(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 3)
        aborted: dict[str, asyncio.Event] = {}
        urls, answering = play(lambda index: [index, 5])

        async def handle(request: httpx.Request) -> httpx.Response:
            sent = json.loads(request.content)
            if request.url.path == "/abort_request":
                aborted[sent["rid"]].set()
                return httpx.Response(200)
            aborted[sent["rid"]] = asyncio.Event()
            await aborted[sent["rid"]].wait()
            if sent["input_ids"][0] == 1:  # it was just done
                return await answering.handle_async_request(request)
            raise httpx.ReadError("gone")

        async with working(valkey, tmp_path, (urls, httpx.MockTransport(handle))) as worker:
            worker.ring("A", range(3))
            await until("all are asked for", lambda: len(aborted) == 3)
            await worker.stop()
        assert numbers(ledger) == (2, 0, 1)
        assert given_back(ledger, "A") == [0, 2]
        assert list(count(tmp_path, "A").entries) == [1]
        assert worker.summaries == {"A 0": "2 tokens: 2 released, 1 stop"}
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


# A disk that cannot be written


def test_a_folder_that_cannot_be_written_pauses_the_worker_and_loses_no_answer(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 40, _7=[7, 5000])
        (tmp_path / "A").write_text("in the way")
        server = Server(speed=0.0)
        async with server, working(valkey, tmp_path, server, limit=4) as worker:
            worker.ring_all("A", 20, per_message=4)
            await until("it says so", lambda: worker.commits.trouble)
            await until("what was asked for is there", lambda: worker.generation.facts()["in_flight"] == 0)
            await until("no claim is under way", lambda: worker.generation._claiming is None)
            assert "cannot write to" in worker.generation.facts()["trouble"]
            asked, acked = server.totals.taken, sum(worker.acked.values())
            for first in range(20, 40, 4):
                worker.ring("A", range(first, first + 4))
            for _ in range(100):
                await asyncio.sleep(0)
            assert (server.totals.taken, sum(worker.acked.values())) == (asked, acked)
            assert ledger.snapshot("A").done == 0
            (tmp_path / "A").unlink()
            await until("all ended", lambda: len(worker.summaries) == 10)
            assert worker.generation.facts()["trouble"] == ""
            assert server.totals.taken == 39  # nothing was generated a second time
        assert numbers(ledger) == (0, 0, 39)
        assert ledger.snapshot("A").rejects == {"id_out_of_range": 1}
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_full_disk_pauses_the_worker_until_there_is_space(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test(disk: Path) -> None:
        fill(ledger, "A", 300)
        server = Server(speed=0.0)
        async with server, working(valkey, disk, server) as worker:
            worker.ring("A", range(8))
            await until("there is space for some", lambda: ledger.snapshot("A").done == 8)
            for first in range(8, 300, 8):
                worker.ring("A", range(first, min(first + 8, 300)))
            await until("it says so", lambda: worker.commits.trouble)
            assert "No space left on device" in worker.commits.trouble
            assert 8 <= ledger.snapshot("A").done < 300
            assert not count(disk, "A").faults  # no half line is left
            enlarge(disk)
            await until("all are done", lambda: ledger.snapshot("A").done == 300)
            assert server.totals.taken == 300
        assert_books_agree(ledger, disk, "A")

    with small_disk(tmp_path) as disk:
        run(lambda: test(disk))


def test_a_worker_that_stops_with_its_disk_full_leaves_the_samples_to_others(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 3)
        (tmp_path / "A").write_text("in the way")
        server = Server(speed=0.0)
        async with server, working(valkey, tmp_path, server) as worker:
            worker.ring("A", range(3))
            await until("it says so", lambda: worker.commits.trouble)
            await worker.commits.flush(0.05)
            await worker.stop()
        assert numbers(ledger) == (0, 3, 0)  # their leases run out
        assert ledger.processes() == {}

    run(test)


# Redis away


def test_a_frozen_redis_is_waited_for(own_valkey: EmbeddedRedis, tmp_path: Path) -> None:
    async def test() -> None:
        ledger = Ledger.connect(url_of(own_valkey))
        fill(ledger, "A", 60)
        server = Server(latency_mean_seconds=0.02)
        async with server, working(url_of(own_valkey), tmp_path, server, limit=6) as worker:
            worker.ring_all("A", 60, per_message=6)
            await until("some are done", lambda: ledger.snapshot("A").done >= 12)
            assert own_valkey.pid is not None
            os.kill(own_valkey.pid, signal.SIGSTOP)
            await until("all that was claimed is answered", lambda: worker.client.in_flight == 0)
            os.kill(own_valkey.pid, signal.SIGCONT)
            await until("all are done", lambda: ledger.snapshot("A").done == 60)
            assert server.totals.taken == 60
        assert_books_agree(ledger, tmp_path, "A")
        ledger.close()

    run(test)


def test_a_redis_that_dies_and_returns_costs_no_answer(own_valkey: EmbeddedRedis, tmp_path: Path) -> None:
    async def test() -> None:
        ledger = Ledger.connect(url_of(own_valkey))
        fill(ledger, "A", 60)
        server = Server(latency_mean_seconds=0.05)
        async with server, working(url_of(own_valkey), tmp_path, server, limit=6) as worker:
            worker.ring_all("A", 60, per_message=6)
            await until("some are done", lambda: ledger.snapshot("A").done >= 12)
            server.process.pause("in_place")
            await until("some are in flight", lambda: server.now == 6)
            assert own_valkey.pid is not None
            os.kill(own_valkey.pid, signal.SIGKILL)
            server.process.unpause()
            await until("it says so", lambda: worker.commits.trouble)
            assert worker.commits.trouble.startswith("Redis does not answer")
            assert own_valkey.restart_if_dead()
            await until("all are done", lambda: ledger.snapshot("A").done == 60)
            await until("it says so", lambda: worker.generation.facts()["trouble"] == "")
            assert server.totals.taken == 60
            await until("its leases are kept", lambda: "w1@host" in ledger.processes())
        assert_books_agree(ledger, tmp_path, "A")
        ledger.close()

    run(test)


class Flaky(Ledger):
    """Redis goes away between two claims, once."""

    calls = 0

    def claim(
        self, dataset: str, owner: str, lease_seconds: float, indices: Sequence[int]
    ) -> tuple[list[Claimed], dict[int, str]]:
        self.calls += 1
        if self.calls == 2:
            raise redis.ConnectionError("gone")
        return super().claim(dataset, owner, lease_seconds, indices)


def test_what_was_claimed_before_redis_went_away_is_not_forgotten(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 12)
        async with working(valkey, tmp_path, play(lambda index: [index]), limit=12, claims=Flaky) as worker:
            worker.ring_all("A", 12, per_message=4)
            await until("all ended", lambda: len(worker.summaries) == 3)
            assert worker.acked == {"A 0": 1, "A 4": 1, "A 8": 1}
            assert worker.leases.held == 0
        assert numbers(ledger) == (0, 0, 12)

    run(test)


def test_an_answer_that_is_made_anew_is_told_to_be_as_long_as_the_one_that_was_lost(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    """Else a server that dies near a cap looks, to the budget, as if all its answers began anew and were short."""

    async def test() -> None:
        fill(ledger, "A", 1)
        calls: list[int] = []
        lose, end = asyncio.Event(), asyncio.Event()

        async def answer(index: int) -> httpx.Response | list[int]:
            calls.append(index)
            if len(calls) == 1:
                await lose.wait()
                return httpx.Response(503)
            await end.wait()
            return [index, 5]

        async with working(valkey, tmp_path, play(answer)) as worker:
            worker.ring("A", [0])
            await until("it is asked", lambda: calls)
            (server,) = worker.client._servers
            for tokens in (0.0, 5000.0, 5000.0):  # and no more from then on
                server.clock.advance(time.monotonic(), Load(running=1, waiting=0, generated_tokens=tokens))
            lose.set()
            await until("it is asked again", lambda: len(calls) == 2)
            at_ms = ledger.snapshot("A").now_ms
            await until("that is told", lambda: any(ms > at_ms for ms, _ in ledger.progress("A").clocks.values()))
            assert told(ledger.progress("A"))[0][1] >= 5000
            end.set()
            await until("it is done", lambda: numbers(ledger) == (0, 0, 1))

    run(test)
