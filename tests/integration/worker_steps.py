"""A worker without Celery: real ledger, real segments, and a server that is simulated or played by the test."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from common.ledger import Ledger
from common.payload import Packer
from common.records import Head
from common.sections import DatasetSettings
from common.segments import count
from tests.conftest import PATIENCE_SECONDS
from tests.over_httpx import OverHttpx
from workers.commits import Commits
from workers.generation import Generation
from workers.leases import Leases
from workers.marking import Marker
from workers.samples import Doorbell
from workers.segment_writer import SegmentWriter
from workers.sglang.answer import Acceptance
from workers.sglang.client import SGLangClient
from workers.sglang.server import Pauses
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator
from workers.sglang.watch import Patience

VOCAB_SIZE = 1024
SAMPLING: dict[str, Any] = {"max_new_tokens": 64, "temperature": 0.0}


class Server(Simulator):
    """A simulated server that knows how many requests it has at once, and how many it had at most."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(SimulatorConfig(vocab_size=VOCAB_SIZE, mean_tokens=20.0, **settings))
        self.now = 0
        self.most = 0

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super()._generate(request)
        finally:
            self.now -= 1


def prompt_of(index: int) -> list[int]:
    """The prompt of sample `index`: its first id says which one it is."""
    return [index, *range(10, 20 + index % 7)]


def fill(ledger: Ledger, dataset: str, samples: int, **prompts: list[int]) -> None:
    """Register `dataset`, queue samples 0 to `samples - 1`, and give them room; `_<index>` replaces a prompt."""
    packer = Packer()
    ledger.register(DatasetSettings(name=dataset, path=Path(f"{dataset}.jsonl")))
    rows = [(i, packer.pack(prompts.get(f"_{i}", prompt_of(i)), {"id": f"row {i}"})) for i in range(samples)]
    ledger.feed(dataset, before="", after=str(samples), ended=True, rejected=[], samples=rows)
    ledger.admit(dataset, room=10**6, window=64, tokens_per_second=0)


def play(answer: Callable[[int], Any], url: str = "http://one:30000") -> tuple[list[str], httpx.AsyncBaseTransport]:
    """A server played by the test: `answer` gets the index of a sample, and answers or raises; awaited if it must be.

    It answers with a list of output ids, or with a whole response.
    """

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200)
        sent = json.loads(request.content)
        given = answer(sent["input_ids"][0])
        given = await given if asyncio.iscoroutine(given) else given
        if isinstance(given, httpx.Response):
            return given
        meta = {
            "id": sent["rid"],
            "finish_reason": {"type": "stop", "matched": given[-1]},
            "prompt_tokens": len(sent["input_ids"]),
            "completion_tokens": len(given),
            "cached_tokens": 1,
            "weight_version": "default",
        }
        return httpx.Response(200, json={"text": "", "output_ids": given, "meta_info": meta})

    return [url], httpx.MockTransport(handle)


@dataclass
class Worker:
    """The parts of one worker, and what its messages said."""

    generation: Generation
    commits: Commits
    leases: Leases
    client: SGLangClient
    acked: Counter[str] = field(default_factory=Counter)
    summaries: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    def ring(self, dataset: str, indices: Sequence[int]) -> str:
        """Send one message; answers its name."""
        name = f"{dataset} {indices[0]}"
        self.generation.ring(
            Doorbell(
                dataset,
                indices,
                on_claimed=lambda: self.acked.update([name]),
                # Without the servers, whose ports are new each time.
                on_ended=lambda summary: self.summaries.update({name: summary.partition("; ")[0]}),
            )
        )
        return name

    def ring_all(self, dataset: str, samples: int, per_message: int) -> None:
        """Send messages for the samples 0 to `samples - 1`."""
        for first in range(0, samples, per_message):
            self.ring(dataset, range(first, min(first + per_message, samples)))

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """What the service does on TERM."""
        self.stopped = True
        await self.generation.drain(drain_seconds)
        await self.client.aclose()
        await asyncio.get_running_loop().run_in_executor(None, self.leases.stop)
        self.commits.close()


@contextlib.asynccontextmanager
async def working(
    redis_url: str,
    output: Path,
    servers: Simulator | list[Simulator] | tuple[list[str], httpx.AsyncBaseTransport],
    *,
    limit: int = 8,
    owner: str = "w1@host",
    claims: type[Ledger] = Ledger,
    segment_bytes: int = 2**20,
    pauses: Pauses | None = None,
    patience: Patience | None = None,
    vocab_size: int = VOCAB_SIZE,
    sampling: dict[str, Any] = SAMPLING,
    marker_of: Callable[[str, bytes], Marker | None] = lambda *_: None,
    load_seconds: float = 2.0,
) -> AsyncIterator[Worker]:
    """A worker at work on `servers`; stopped at the end, unless the test did."""
    if isinstance(servers, Simulator):
        servers = [servers]
    urls, transport = servers if isinstance(servers, tuple) else ([server.url for server in servers], None)
    client = SGLangClient(
        urls,
        acceptance=Acceptance(vocab_size, "default"),
        sampling_params=sampling,
        load_seconds=load_seconds,
        max_connections=256,
        http=OverHttpx(transport) if transport else None,
        pauses=pauses or Pauses(first_seconds=0.001, longest_seconds=0.002),
        patience=patience,
    )
    writer = SegmentWriter(output, owner.replace("@", "-"), segment_bytes)
    commits = Commits(ledger=Ledger.connect(redis_url), writer=writer, output=output, commit_seconds=0.005)
    leases = Leases(Ledger.connect(redis_url), owner, 60.0)
    generation = Generation(
        owner=owner,
        concurrency=limit,
        lease_seconds=60.0,
        vocab_size=vocab_size,
        client=client,
        ledger=claims.connect(redis_url),
        commits=commits,
        leases=leases,
        marker_of=marker_of,
    )
    commits.on_committed = generation.committed
    leases.start(generation.facts, generation.clocks)
    worker = Worker(generation, commits, leases, client)
    try:
        yield worker
    finally:
        if not worker.stopped:
            await worker.stop()


async def until(what: str, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Let the loop run until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain until {what}")
        await asyncio.sleep(0.005)


def run(test: Callable[[], Any]) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(test(), 2 * PATIENCE_SECONDS))


def assert_books_agree(ledger: Ledger, output: Path, dataset: str) -> None:
    """The ledger says what the files say: each index once, and the same tokens."""
    state, books = ledger.snapshot(dataset), count(output, dataset)
    heads = [entry.what for entry in books.entries.values() if isinstance(entry.what, Head)]
    assert not books.faults
    assert state.done == len(heads)
    assert state.completion_tokens == sum(head.completion_tokens for head in heads)
    assert state.prompt_tokens == sum(head.prompt_tokens for head in heads)
    sizes = {f"{dataset}/{path.name}": path.stat().st_size for path in books.ends}
    assert {name: size for name, size in ledger.committed().items() if name.startswith(f"{dataset}/")} == sizes
