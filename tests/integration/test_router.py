"""SGLang's router in a server's place: its health says nothing of the server behind it, and it cannot abort."""

from pathlib import Path

from common.ledger import Ledger
from tests.integration.worker_steps import Server, assert_books_agree, fill, run, until, working
from workers.sglang.server import Pauses

PAUSES = Pauses(first_seconds=0.01, longest_seconds=0.05, trial_seconds=0.5)


def test_the_server_behind_it_dies_and_comes_back(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 60)
        async with (
            Server(router=True, latency_mean_seconds=0.05) as server,
            working(valkey, tmp_path, server, limit=8, pauses=PAUSES) as worker,
        ):
            worker.ring_all("A", 60, per_message=4)
            await until("some are answered", lambda: ledger.snapshot("A").done >= 10)
            server.die("a test told it to")
            await until("the router has no server", lambda: worker.client.failed_attempts["server_away"] > 0)
            await server.restart()
            assert worker.client.servers()[0].reason is not None
            await until("all ended", lambda: len(worker.summaries) == 15)
            assert worker.client.servers()[0].state == "up"
        state = ledger.snapshot("A")
        assert (state.done, state.rejected) == (60, 0)
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_worker_that_stops_leaves_nothing_running_behind_it(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 12)
        # Plain calls whose caller has left are noticed every 4 s of the server's time.
        async with Server(router=True, latency_mean_seconds=3000.0, speed=20.0) as server:
            async with working(valkey, tmp_path, server, limit=8) as worker:
                worker.ring_all("A", 12, per_message=4)
                await until("eight are at the server", lambda: server.load().running == 8)
                await worker.stop(0.0)
                assert worker.leases.held == 0
            await until("it has nothing to do", lambda: server.load().running == 0)
        state = ledger.snapshot("A")
        assert (state.queued, state.in_flight, state.done, state.rejected) == (12, 0, 0, 0)

    run(test)
