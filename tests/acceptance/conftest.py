"""What the acceptance tests share: one simulated server, in a process of its own."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.acceptance.commands import TOKENMILL, environment
from tests.conftest import PATIENCE_SECONDS, wait_until

Simulate = Callable[..., str]


@pytest.fixture(scope="session")
def simulate() -> Iterator[Simulate]:
    """Starts simulated servers: `simulate("--speed", "0")` answers the address. They end with the session."""
    with TemporaryDirectory(prefix="tm-") as name:
        folder = Path(name)
        servers: list[subprocess.Popen[bytes]] = []

        def start(*options: str) -> str:
            port_file = folder / f"port-{len(servers)}"
            command = [*TOKENMILL, "simulate", "--port", "0", "--port-file", str(port_file), *options]
            with (folder / "server.log").open("ab") as log:
                servers.append(subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log))
            ready = lambda: port_file.exists() or servers[-1].poll() is not None  # noqa: E731
            wait_until(f"the server with {options} has started", ready)
            assert port_file.exists(), (folder / "server.log").read_text()
            return f"http://127.0.0.1:{port_file.read_text().strip()}"

        yield start
        for server in servers:
            server.terminate()
            server.wait(PATIENCE_SECONDS)
