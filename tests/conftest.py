"""Real parts for every test that needs them: a Valkey of its own, an output folder, a wait with a deadline.

A deadline is there for what will never come. It is long, as a busy machine takes its time, and costs nothing where what
is waited for comes.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from common.ledger import Ledger
from producer.embedded import EmbeddedRedis

REPO = Path(__file__).parents[1]
SHARED = REPO.parent / "shared"
# Jobs that run side by side would want one port. For the processes that the tests start, too.
os.environ["TOKENMILL_CONTROL__METRICS"] = ""
PATIENCE_SECONDS = 180.0
# Ignored where a shell has started the tests in the background, and then by every process that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# By itself hypothesis fails what takes longer than 200 ms once, and what is slow to make its examples.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """The URL of a real Valkey for the whole session of this test process."""
    with TemporaryDirectory(prefix="tm-") as folder:
        socket = Path(folder) / "s"
        server = EmbeddedRedis(Path(folder), socket).start()
        yield f"unix://{socket}"
        server.stop()


@pytest.fixture
def ledger(valkey: str) -> Iterator[Ledger]:
    """An empty ledger."""
    ledger = Ledger.connect(valkey)
    ledger.redis.flushall()
    yield ledger
    ledger.close()


def wait_until(what: str, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until `condition` is true; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.02)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for minutes begins first, or the last process would be at it alone while the others are done."""
    items.sort(key=lambda item: not {"faults", "acceptance"}.intersection(item.path.parts))
