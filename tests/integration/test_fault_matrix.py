"""Each fault of the simulated server, against a worker: every sample ends in one place, for the right reason.

`MATRIX` says for each fault what is right where it strikes twice, where it strikes always, and where a server without
it stands beside.
"""

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

from common.ledger import Ledger
from common.rejects import read_rejects
from common.segments import records
from tests.conftest import PATIENCE_SECONDS
from tests.integration.worker_steps import SAMPLING, Server, Worker, assert_books_agree, fill, prompt_of, until, working
from workers.sglang.answer import REASONS, Outcome
from workers.sglang.client import MAX_TRIES
from workers.sglang.server import Pauses
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.faults import OF_REQUESTS, OF_THE_SERVER
from workers.sglang.watch import Patience

SAMPLES = 60
LIMIT = 8
MANY = 160  # so that a breaker has time to open
FEW = 12  # where each is tried ten times
STRIKES = 2  # fewer than any sample is tried
MAX_NEW_TOKENS = int(SAMPLING["max_new_tokens"])
# The server's own time, two thousand times faster: a token takes 15 us, its death 2.5 ms, a frozen /health 10 ms.
SPEED = 2000.0
PAUSES = Pauses(first_seconds=0.001, longest_seconds=0.004)
# Beside another server pauses double as they do in life: whoever failed at one is back before it is taken again.
BESIDE = Pauses(first_seconds=0.005, longest_seconds=5.0)
# A call that its server has lost is given up after 100 ms, and all of them if the scheduler does not live.
LOST = Patience(least_seconds=0.1, quiet_seconds=100.0, look_seconds=0.02, assumed_tokens_per_second=1e6)
STALLED = Patience(quiet_seconds=0.05, look_seconds=0.02, alive_seconds=0.25)

End = Literal["record", "reject", "halt", "wait"]


@dataclass(frozen=True)
class Line:
    """One fault. `reason` is that of an attempt that was struck, None where it still gives an answer."""

    fault: str  # its name, and settings
    reason: str | None
    struck: End = "record"  # what becomes of a sample that was struck less often than it is tried
    always: End = "reject"
    rejected: str = ""  # where it is not for `reason`
    breaker: bool = True  # whether a server that always has it is found out, beside one that has not
    server: dict[str, Any] = field(default_factory=dict)
    patience: Patience | None = None
    trial_seconds: float = 0.2

    @property
    def name(self) -> str:
        return self.fault.partition(":")[0]


DIES = {"restart_seconds": 0.02}
MATRIX = {
    "status": Line("status", "server_error"),
    "status 400": Line("status:status=400", "bad_request", "reject", breaker=False),
    "status 401": Line("status:status=401", "unauthorized", "halt", "halt"),
    "status 404": Line("status:status=404", "not_sglang", "halt", "halt"),
    "status 408": Line("status:status=408", "request_timeout", breaker=False),
    "status 429": Line("status:status=429", "rate_limited", always="wait", breaker=False),
    "status 500": Line("status:status=500", "server_error"),
    "status 502": Line("status:status=502", "bad_gateway", rejected="kills_server"),
    "status 504": Line("status:status=504", "gateway_timeout"),
    "reset": Line("reset", "connection_lost", rejected="kills_server"),
    "hang": Line("hang", "timeout", patience=LOST, trial_seconds=0.03),
    "html": Line("html", "not_json"),
    "redirect": Line("redirect", "not_sglang", "halt", "halt"),
    "endless": Line("endless", "answer_too_large"),
    "gzip_bomb": Line("gzip_bomb:megabytes=4", "not_json"),
    "cut": Line("cut", "connection_lost", rejected="kills_server"),
    "late_reset": Line("late_reset", "connection_lost", rejected="kills_server"),
    "garbled": Line("garbled", "not_json"),
    "wrong_type": Line("wrong_type", None, always="record"),
    "clipped": Line("clipped", None, always="record"),
    "truncated_prompt": Line("truncated_prompt", "prompt_mismatch", "reject", breaker=False),
    "nan": Line("nan", "nan"),
    "abort": Line("abort", "aborted", breaker=False),
    "wrong_rid": Line("wrong_rid", "wrong_rid"),
    "weight_version": Line("weight_version", "weight_version_changed", "halt", "halt"),
    "no_output_ids": Line("no_output_ids", "no_output_ids", "halt", "halt"),
    "prompt_leak": Line("prompt_leak", "length_mismatch"),
    "lost_id": Line("lost_id", "length_mismatch"),
    "bad_output_id": Line("bad_output_id", "token_out_of_range"),
    "die": Line("die", "connection_lost", rejected="kills_server", server=DIES),
    "poison": Line("poison:ids=10+11", "connection_lost", rejected="kills_server", server=DIES),
    "false_health": Line("false_health", None, always="record"),
    "stale_loads": Line("stale_loads", None, always="record"),
    "frozen": Line("frozen", "stalled", always="wait", patience=STALLED, trial_seconds=0.03),
}


def test_every_fault_of_the_simulator_has_its_line() -> None:
    assert {line.name for line in MATRIX.values()} == {*OF_REQUESTS, *OF_THE_SERVER}
    for line in MATRIX.values():
        assert line.reason in {None, *REASONS}
        assert STRIKES < MAX_TRIES


def faulty(line: Line, more: str = "") -> Server:
    """A server that has the fault from its start."""
    fault = line.fault + more if ":" in line.fault else line.fault + more.replace(",", ":", 1)
    return Server(speed=SPEED, faults=(fault,), **line.server)


@dataclass
class Found:
    """Where the samples are after a run."""

    output: Path
    answers: Answers
    ends: dict[int, str]  # by index: "record", "queued", or the reason of its reject
    clipped: set[int]
    state: str
    why: str
    failed: dict[str, int]


@contextlib.asynccontextmanager
async def run_of(
    ledger: Ledger, output: Path, line: Line, servers: Sequence[Server], samples: int, pauses: Pauses = PAUSES
) -> AsyncIterator[Worker]:
    """A worker at `samples` samples, on servers that run; nothing may be left at those that live, at the end."""
    pauses = structs.replace(pauses, trial_seconds=line.trial_seconds)
    fill(ledger, "A", samples)
    valkey = f"unix://{ledger.redis.connection_pool.connection_kwargs['path']}"
    async with working(valkey, output, list(servers), limit=LIMIT, pauses=pauses, patience=line.patience) as worker:
        worker.ring_all("A", samples, per_message=4)
        yield worker
        await worker.stop()
    for server in servers:
        await until(
            "nothing is left at the servers",
            lambda server=server: server.now == 0 and server.load().running == server.load().waiting == 0,  # type: ignore[misc]
        )


def found(ledger: Ledger, output: Path, worker: Worker, answers: Answers, samples: int) -> Found:
    """The place of every sample: exactly one, and every record holds the ids that belong to its prompt."""
    assert_books_agree(ledger, output, "A")
    state = ledger.snapshot("A")
    ends: dict[int, str] = {}
    clipped = set()
    for record in records(output, "A"):
        whole = answers.answer(prompt_of(record.index), MAX_NEW_TOKENS)
        ids = whole.stream.ids(whole.completion_tokens)
        if "clipped" in record.flags:
            clipped.add(record.index)
            ids = ids[: MAX_NEW_TOKENS // 2]
        assert record.input_ids == prompt_of(record.index)
        assert record.output_ids == ids
        assert record.index not in ends
        ends[record.index] = "record"
    rejects = read_rejects(output, "A")
    assert rejects.faults == []
    for index, row in rejects.rows.items():
        assert index not in ends
        assert row.detail.isprintable()
        ends[index] = row.reason
    assert state.in_flight == 0
    assert state.rejects == {reason: n for reason in set(ends.values()) - {"record"} if (n := _count(ends, reason))}
    assert set(ends) <= set(range(samples))
    assert len(ends) + state.queued == samples
    ends |= dict.fromkeys(set(range(samples)) - set(ends), "queued")
    return Found(output, answers, ends, clipped, state.state, state.reason or "", dict(worker.client.failed_attempts))


def run(test: Callable[[], Awaitable[Found]]) -> Found:
    return asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE_SECONDS))


def within_memory(test: Callable[[], Awaitable[Found]]) -> Found:
    """Client and server together: eight answers of 1 MB, as parts and as a whole, and what lies in their buffers."""
    tracemalloc.start()
    try:
        seen = run(test)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    return seen


def _count(ends: dict[int, str], reason: str) -> int:
    return sum(end == reason for end in ends.values())


async def all_ended(ledger: Ledger, worker: Worker, samples: int) -> None:
    def ended() -> bool:
        state = ledger.snapshot("A")
        return state.done + state.rejected == samples or (state.state == "halted" and worker.leases.held == 0)

    await until("all have ended", ended)


@pytest.mark.parametrize("name", [name for name, line in MATRIX.items() if line.name in OF_REQUESTS])
def test_struck_twice(valkey: str, ledger: Ledger, tmp_path: Path, name: str) -> None:
    line = MATRIX[name]

    async def test() -> Found:
        server = faulty(line, f",next={STRIKES}")
        async with server:
            async with run_of(ledger, tmp_path, line, [server], SAMPLES) as worker:
                await all_ended(ledger, worker, SAMPLES)
            assert server.faults.active[line.name].struck == STRIKES
            return found(ledger, tmp_path, worker, Answers(server.config), SAMPLES)

    seen = run(test)
    states = set(seen.ends.values())
    match line.struck:
        case "record":
            assert states == {"record"}
        case "reject":
            assert states == {"record", line.reason}
            assert _count(seen.ends, line.reason or "") == STRIKES
        case "halt":
            assert seen.state == "halted"
            assert line.reason is not None
            assert line.reason in seen.why
            assert states <= {"record", "queued"}
    if line.reason is None:
        assert seen.failed == {}
    else:
        assert seen.failed[line.reason] >= 1
        # A server that dies breaks what is in flight and cannot be reached for a while; else nothing else goes wrong.
        assert seen.failed.keys() <= {line.reason, *(("unreachable",) if line.server else ())}


@pytest.mark.parametrize("name", MATRIX)
def test_struck_always(valkey: str, ledger: Ledger, tmp_path: Path, name: str) -> None:
    line = MATRIX[name]

    async def test() -> Found:
        server = faulty(line)
        async with server:
            async with run_of(ledger, tmp_path, line, [server], FEW) as worker:
                if line.always == "wait":
                    await until("it is found out", lambda: worker.client.failed_attempts[line.reason or ""] > LIMIT)
                    [state] = worker.client.servers()
                    assert state.state in ({"down", "half_open"} if line.breaker else {"up"})
                else:
                    await all_ended(ledger, worker, FEW)
            return found(ledger, tmp_path, worker, Answers(server.config), FEW)

    seen = within_memory(test) if line.name in {"endless", "gzip_bomb"} else run(test)
    match line.always:
        case "record":
            assert set(seen.ends.values()) == {"record"}
            assert seen.failed == {}
            assert (name == "clipped") == bool(seen.clipped)
        case "reject":
            assert set(seen.ends.values()) == {line.rejected or line.reason}
            assert seen.failed.keys() <= {line.reason, *(("unreachable",) if line.server else ())}
        case "halt":
            assert (seen.state, set(seen.ends.values())) == ("halted", {"queued"})
            assert line.reason is not None
            assert line.reason in seen.why
        case "wait":
            assert (seen.state, set(seen.ends.values())) == ("open", {"queued"})


@pytest.mark.parametrize("name", MATRIX)
def test_beside_a_server_without_the_fault(valkey: str, ledger: Ledger, tmp_path: Path, name: str) -> None:
    line = MATRIX[name]
    found_out = line.reason is not None and line.breaker

    async def test() -> Found:
        bad, good = faulty(line), Server(speed=SPEED / 10)
        async with bad, good:
            async with run_of(ledger, tmp_path, line, [bad, good], MANY, BESIDE) as worker:
                await all_ended(ledger, worker, MANY)
                seen, other = worker.client.servers()
                assert (other.state, other.url) == ("up", good.url)
                if found_out:
                    assert seen.answers == 0
                    assert seen.reason
            answers = Answers(good.config)
            return found(ledger, tmp_path, worker, answers, MANY)

    seen = run(test)
    if line.reason is not None and REASONS[line.reason].outcome is Outcome.REJECT:
        # The same server rejects a sample wherever it goes next; the others have their records.
        assert set(seen.ends.values()) == {"record", line.reason}
    else:
        assert set(seen.ends.values()) == {"record"}
