"""Fixtures of the fault tests: every process that a test starts ends with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.apart import Apart
from tests.faults.harness import Job, Simulator


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., tuple[Job, Simulator]]]:
    """Makes a job and its servers, which run: `make_job(rows=600, pace=("--latency-mean", "60"), drain_seconds=1)`.

    Answers the job and its first server; `job.servers` are all. `servers=3` is how many there are. A single server
    holds the last rows of a long job until its end is waited for; `hold_after` says otherwise how many requests each
    answers before that.
    """
    jobs: list[Job] = []
    all_servers: list[Simulator] = []

    def make(
        *, rows: int, servers: int = 1, pace: tuple[str, ...] = (), hold_after: int | None = None, **worker: Any
    ) -> tuple[Job, Simulator]:
        if hold_after is None and servers == 1 and rows > 150:
            hold_after = rows - 60
        made = [Simulator(tmp_path, *pace, name=f"server-{n}", hold_after=hold_after) for n in range(servers)]
        for server in made:
            all_servers.append(server)
            server.start()
        jobs.append(Job(tmp_path, made, rows=rows, **worker))
        return jobs[-1], made[0]

    yield make
    for job in jobs:
        job.end_all()
    for server in [*all_servers, *(server for job in jobs for server in job.servers)]:
        server.kill()


@pytest.fixture
def make_apart(tmp_path: Path) -> Iterator[Callable[..., Apart]]:
    """Makes a job of parts on a Redis of its own, and its server, which runs: `make_apart(rows=300, hold_after=9)`."""
    jobs: list[Apart] = []

    def make(*, rows: int, pace: tuple[str, ...] = (), hold_after: int | None = None, **worker: Any) -> Apart:
        server = Simulator(tmp_path, *pace, hold_after=hold_after).start()
        jobs.append(Apart(tmp_path, [server], rows=rows, **worker))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end_all()
        for server in job.servers:
            server.kill()
