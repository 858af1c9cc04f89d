"""What the contract runs against: a simulated server in every run, and the real one that TOKENMILL_CONTRACT_URL names.

The real one may serve any model; a key, if it wants one, stands in TOKENMILL_SERVER__API_KEY. It should have nothing
else to do: the contract pauses it, slows it down and aborts all that runs. `make contract-real` starts one.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contract.wire import KEY, PATIENCE_SECONDS, REAL_URL
from workers.sglang.preflight import ServerFacts, preflight
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.presets import PRESETS
from workers.sglang.simulator.server import Simulator

# Answers that go on until they are cut, as those of the real server's model do.
SIMULATED: dict[str, Any] = {**PRESETS["tiny"], "mean_tokens": 1e6, "cv": 0.0, "speed": 2.0}


@contextmanager
def simulated(**settings: Any) -> Iterator[Simulator]:
    """A simulated server on a thread of its own, as the tests run event loops of theirs."""
    ready = threading.Event()
    made: dict[str, Any] = {}

    async def serve() -> None:
        async with Simulator(SimulatorConfig(**settings)) as server:
            made.update(server=server, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await made["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(PATIENCE_SECONDS)
    yield made["server"]
    made["loop"].call_soon_threadsafe(made["stop"].set)
    thread.join()


@pytest.fixture(scope="session", params=["simulated", "real"] if REAL_URL else ["simulated"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the server."""
    if request.param == "real":
        yield REAL_URL
    else:
        with simulated(**SIMULATED) as server:
            yield server.url


@pytest.fixture(scope="session")
def facts(url: str) -> ServerFacts:
    (server,), _ = preflight([url], lambda _: KEY)
    return server
