"""The worker's heart with real parts: every sample that is fed ends exactly once, whatever the servers say."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.ledger import Ledger
from common.payload import Packer
from common.rejects import read_rejects
from common.sections import DatasetSettings
from common.segments import count, records
from tests.integration.ledger_steps import lapse_all
from tests.integration.worker_steps import (
    SAMPLING,
    Server,
    assert_books_agree,
    fill,
    play,
    prompt_of,
    run,
    until,
    working,
)
from workers.sglang.simulator.answers import Answers


def test_every_sample_ends_once_with_the_ids_that_the_server_gave(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 150)
        fill(ledger, "B", 50)
        async with Server(speed=0.0) as server, working(valkey, tmp_path, server, segment_bytes=20_000) as worker:
            worker.ring_all("A", 80, per_message=8)
            await until("a segment is full", lambda: len(worker.summaries) == 10)
            for first in range(80, 150, 8):
                worker.ring("A", range(first, min(first + 8, 150)))
            worker.ring_all("B", 50, per_message=1)
            await until("all ended", lambda: len(worker.summaries) == 19 + 50)
            assert server.totals.taken == 200
            answers = Answers(server.config)
        assert set(worker.acked.values()) == {1}
        assert len(worker.acked) == 19 + 50
        for dataset, samples in (("A", 150), ("B", 50)):
            found = {record.index: record for record in records(tmp_path, dataset)}
            assert sorted(found) == list(range(samples))
            for index, record in found.items():
                answer = answers.answer(prompt_of(index), SAMPLING["max_new_tokens"])
                assert record.input_ids == prompt_of(index)
                assert record.output_ids == answer.stream.ids(answer.completion_tokens)
                assert record.meta == {"id": f"row {index}"}
            assert_books_agree(ledger, tmp_path, dataset)
            state = ledger.snapshot(dataset)
            assert (state.queued, state.in_flight, state.done) == (0, 0, samples)
            assert ledger.redis.exists(f"tokenmill:d:{dataset}:payloads") == 0
        assert len(count(tmp_path, "A").ends) > 1  # several segments

    run(test)


def test_a_sample_with_less_room_asks_for_less_and_says_so(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        packer = Packer()
        ledger.register(DatasetSettings(name="A", path=Path("a.jsonl")))
        samples = [(index, packer.pack(prompt_of(index), {}, most)) for index, most in enumerate((2, None, 63))]
        ledger.feed("A", before="", after="3", ended=True, rejected=[], samples=samples)
        ledger.admit("A", room=10**6, window=64, tokens_per_second=0)
        async with Server(speed=0.0) as server, working(valkey, tmp_path, server) as worker:
            worker.ring_all("A", 3, per_message=3)
            await until("all ended", lambda: len(worker.summaries) == 1)
            full = [Answers(server.config).answer(prompt_of(index), 64).completion_tokens for index in range(3)]
        found = {record.index: record for record in records(tmp_path, "A")}
        assert [found[index].completion_tokens for index in range(3)] == [2, full[1], min(63, full[2])]
        assert (found[0].finish_reason, found[0].flags) == ("length", ["truncated", "max_new_tokens_cut"])
        assert "max_new_tokens_cut" not in found[1].flags
        assert "max_new_tokens_cut" in found[2].flags
        assert ledger.snapshot("A").flags["max_new_tokens_cut"] == 2
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_the_limit_is_never_exceeded_and_can_change_in_flight(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 120)
        server = Server(latency_mean_seconds=0.05)
        async with server, working(valkey, tmp_path, server, limit=4) as worker:
            worker.ring_all("A", 120, per_message=5)
            server.process.pause("in_place")  # or on a busy machine the first may end before the last begins
            await until("4 are in flight", lambda: server.now == 4)
            server.process.unpause()
            await until("some are done", lambda: server.totals.finished >= 12)
            assert server.most == 4
            worker.generation.set_concurrency(9)
            server.process.pause("in_place")
            await until("9 are in flight", lambda: server.now == 9)
            server.process.unpause()
            await until("more are done", lambda: server.totals.finished >= 40)
            assert server.most == 9
            worker.generation.set_concurrency(2)
            await until("no more than 2 are in flight", lambda: worker.generation.facts()["in_flight"] <= 2)
            server.most = 0
            server.process.pause("in_place")
            await until("2 are in flight", lambda: server.now == 2)
            server.process.unpause()
            await until("more are done", lambda: server.totals.finished >= 60)
            assert server.most == 2
            worker.generation.set_concurrency(0)
            assert worker.generation.concurrency == 1
            worker.generation.set_concurrency(50)
            await until("all are done", lambda: ledger.snapshot("A").done == 120)
            assert server.most <= 50
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_slow_sample_holds_its_own_slot_alone(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 16)
        go = asyncio.Event()

        async def slow(index: int) -> list[int]:
            if index == 0:
                await go.wait()
            return [5, 6, index]

        async with working(valkey, tmp_path, play(slow), limit=2) as worker:
            name = worker.ring("A", range(8))
            other = worker.ring("A", range(8, 16))
            await until("the others of its message are settled", lambda: worker.generation.facts()["ended"] == 15)
            assert (ledger.snapshot("A").done, ledger.snapshot("A").in_flight) == (15, 1)
            assert worker.summaries == {other: "24 tokens: 8 stop"}
            assert worker.acked[name] == 1  # the lease guards what the message does no longer
            go.set()
            await until("the message ended", lambda: name in worker.summaries)
            assert worker.summaries[name] == "24 tokens: 8 stop"

    run(test)


def test_samples_are_claimed_only_for_slots_that_are_free(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 40)
        go = asyncio.Event()

        async def wait(index: int) -> list[int]:
            await go.wait()
            return [index]

        async with working(valkey, tmp_path, play(wait), limit=6) as worker:
            worker.ring_all("A", 40, per_message=4)
            await until("the slots are full", lambda: worker.client.in_flight == 6)
            # Two whole messages cover six slots; another worker may have the rest.
            assert ledger.snapshot("A").in_flight == 8
            assert worker.leases.held == 8
            assert len(worker.acked) == 2
            go.set()
            await until("all are done", lambda: ledger.snapshot("A").done == 40)

    run(test)


def test_a_message_whose_samples_are_gone_says_so_and_does_nothing(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 4)
        ledger.claim("A", "other", 60, [2])
        asked: list[int] = []

        def note(index: int) -> list[int]:
            asked.append(index)
            return [index, 5]

        async with working(valkey, tmp_path, play(note)) as worker:
            names = [worker.ring("A", [2]), worker.ring("nobody", [7]), worker.ring("A", [99])]
            await until("all ended", lambda: len(worker.summaries) == 3)
            assert {worker.summaries[name] for name in names} == {"nothing to do: done, leased or closed"}
            first, again = worker.ring("A", [0, 1, 3]), worker.ring("A", [1, 0, 3])
            await until("all ended", lambda: len(worker.summaries) == 5)
            assert worker.summaries[first] == "6 tokens: 3 stop"
            assert worker.summaries[again] == "nothing to do: done, leased or closed"
            assert sorted(asked) == [0, 1, 3]

    run(test)


def test_what_gets_no_answer_is_rejected_on_disk_and_in_the_ledger(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    async def test() -> None:
        fill(ledger, "A", 6, _1=[1, 5000, 3], _4=[4, 1024])

        def refuse(index: int) -> Any:
            if index == 2:
                text = "The input (99 tokens) is longer than the model's context length (50 tokens)."
                return httpx.Response(400, json={"error": {"message": text}})
            return [index, 7]

        async with working(valkey, tmp_path, play(refuse)) as worker:
            name = worker.ring("A", range(6))
            await until("the message ended", lambda: name in worker.summaries)
            assert worker.summaries[name] == "6 tokens: 3 stop, 2 id_out_of_range, 1 over_context"
        rejects = read_rejects(tmp_path, "A").rows
        assert {index: (row.reason, row.id) for index, row in rejects.items()} == {
            1: ("id_out_of_range", "row 1"),
            2: ("over_context", "row 2"),
            4: ("id_out_of_range", "row 4"),
        }
        state = ledger.snapshot("A")
        assert (state.done, state.rejected, state.in_flight, state.queued) == (3, 3, 0, 0)
        assert state.rejects == {"id_out_of_range": 2, "over_context": 1}
        assert_books_agree(ledger, tmp_path, "A")

    run(test)


def test_a_prompt_that_cannot_be_unpacked_is_rejected_and_holds_up_nobody(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 4)
        ledger.redis.hset("tokenmill:d:A:payloads", "1", b"no payload")
        async with working(valkey, tmp_path, play(lambda index: [index])) as worker:
            name = worker.ring("A", range(4))
            await until("the message ended", lambda: name in worker.summaries)
        assert [(i, row.reason) for i, row in read_rejects(tmp_path, "A").rows.items()] == [(1, "bad_payload")]
        state = ledger.snapshot("A")
        assert (state.done, state.rejected, state.in_flight, state.queued) == (3, 1, 0, 0)

    run(test)


def test_a_superseded_attempt_is_voided_and_nothing_is_counted_twice(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    async def test() -> None:
        fill(ledger, "A", 3)
        go = asyncio.Event()

        async def answer(index: int) -> list[int]:
            await go.wait()
            return [1, 2, 3, index]

        quick = play(lambda index: [index] * 9)
        async with (
            working(valkey, tmp_path, play(answer), owner="w1@host") as late,
            working(valkey, tmp_path, quick, owner="w2@host") as other,
        ):
            name = late.ring("A", [0, 1, 2])
            await until("all are asked for", lambda: late.client.in_flight == 3)
            lapse_all(ledger, "A")
            assert [one.owner for one in ledger.expire("A", max_tries=3)[0]] == ["w1@host"] * 3
            other.ring("A", [0])
            await until("another worker has settled one", lambda: ledger.snapshot("A").done == 1)
            go.set()
            await until("the late answers came", lambda: name in late.summaries)
            assert late.summaries[name] == "8 tokens: 2 stop, 1 superseded"
            assert late.commits.superseded == 1
        state = ledger.snapshot("A")
        assert (state.done, state.completion_tokens, state.in_flight, state.queued) == (3, 9 + 4 + 4, 0, 0)
        assert_books_agree(ledger, tmp_path, "A")
        assert {r.index: len(r.output_ids) for r in records(tmp_path, "A")} == {0: 9, 1: 4, 2: 4}
        lines = (tmp_path / "A" / "w1-host-0.jsonl").read_bytes().splitlines()
        assert [json.loads(line).get("void", {}).get("index") for line in lines] == [None, None, None, 0]

    run(test)


def test_an_answer_that_halts_stops_all_datasets_and_gives_the_samples_back(
    valkey: str, ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fill(ledger, "A", 12)
        fill(ledger, "B", 2)
        asked: list[int] = []

        def refuse(index: int) -> httpx.Response:
            asked.append(index)
            return httpx.Response(401, json={"error": "Unauthorized"})

        async with working(valkey, tmp_path, play(refuse), limit=2) as worker:
            worker.ring_all("A", 12, per_message=4)
            await until("all ended", lambda: len(worker.summaries) == 3)
            await until("nothing is held", lambda: worker.leases.held == 0)
        for dataset, samples in (("A", 12), ("B", 2)):
            state = ledger.snapshot(dataset)
            assert (state.state, state.queued, state.in_flight) == ("halted", samples, 0)
            assert "unauthorized" in state.reason
        assert worker.summaries["A 0"] == "0 tokens: 4 released"
        assert set(asked) == {0, 1}  # what was claimed and not started is not tried
        assert count(tmp_path, "A").entries == {}

    with caplog.at_level(logging.ERROR):
        run(test)
    assert len([entry for entry in caplog.records if "halted" in entry.message]) == 1


def test_a_fault_of_our_own_costs_one_sample_its_try_and_no_other_anything(
    valkey: str, ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fill(ledger, "A", 6)

        def answer(index: int) -> list[int]:
            if index == 3:
                raise RuntimeError("a bug")
            return [index, 5]

        async with working(valkey, tmp_path, play(answer), limit=2) as worker:
            name = worker.ring("A", range(6))
            await until("the message ended", lambda: name in worker.summaries)
            assert worker.summaries[name] == "10 tokens: 5 stop, 1 failed"
            # Its lease is not renewed any more: when it runs out, that counts as one of the sample's tries.
            assert worker.leases.held == 0
        assert ledger.snapshot("A").in_flight == 1
        assert_books_agree(ledger, tmp_path, "A")

    run(test)
    assert any("a bug" in str(entry.exc_info) for entry in caplog.records)
