"""Fixtures of the fault tests: every process that a test starts ends with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Job, Simulator


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., tuple[Job, Simulator]]]:
    """Makes a job and its server, which runs: `make_job(rows=600, pace=("--latency-mean", "60"), drain_seconds=1)`."""
    jobs: list[Job] = []
    servers: list[Simulator] = []

    def make(*, rows: int, pace: tuple[str, ...] = (), **worker: Any) -> tuple[Job, Simulator]:
        servers.append(Simulator(tmp_path, *pace))
        servers[-1].start()
        jobs.append(Job(tmp_path, servers[-1], rows=rows, **worker))
        return jobs[-1], servers[-1]

    yield make
    for job in jobs:
        job.end_all()
    for server in servers:
        server.kill()
