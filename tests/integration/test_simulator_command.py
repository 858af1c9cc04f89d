"""`tokenmill simulate` in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from common.errors import UnavailableError, UsageError
from tests.conftest import PATIENCE_SECONDS, REPO, wait_until
from tests.integration.simulator_steps import (
    Caller,
    with_server,
)
from workers.sglang.simulator.cli import simulate
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

SPEED = 100


def test_an_address_that_is_taken_is_said_in_one_sentence() -> None:
    async def test(caller: Caller) -> None:
        second = Simulator(SimulatorConfig(port=caller.server.port))
        with pytest.raises(UnavailableError, match=str(caller.server.port)):
            await second.start()

    with_server(test)


def test_the_command_refuses_settings_that_make_no_sense() -> None:
    result = CliRunner().invoke(simulate, ["--vocab-size", "10", "--end-token-id", "10"])
    assert isinstance(result.exception, UsageError)


@contextmanager
def command(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the URL that it serves."""
    port_file = tmp_path / "port"
    program = "from workers.sglang.simulator.cli import simulate; simulate()"
    arguments = [sys.executable, "-c", program, "--port-file", str(port_file), *options]
    environment = os.environ | {"PYTHONPATH": str(REPO), "PYTHONWARNINGS": "error"}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_until("the simulator has written its port", lambda: port_file.exists() or process.poll() is not None)
        yield process, f"http://127.0.0.1:{int(port_file.read_text())}"
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        behind = ", behind a router" if "--router" in options else ""
        said = f"simulated SGLang on http://127.0.0.1:{port_file.read_text().strip()}{behind}\n"
        assert (process.returncode, stderr) == (0, said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    async def call(url: str) -> None:
        async with aiohttp.ClientSession() as session, session.post(url, json={"input_ids": [1]}) as response:
            assert response.status == 200
            process.send_signal(number)  # with the connection still open

    with command(tmp_path, "--speed", "inf", "--vocab-size", "1024") as (process, url):
        asyncio.run(call(f"{url}/generate"))


def test_an_interrupt_ends_the_command_while_requests_run(tmp_path: Path) -> None:
    async def call(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 50_000}}
            running = asyncio.create_task(send(session, f"{url}/generate", body))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await running_requests(session, url) == 0:
                    pass
            process.send_signal(signal.SIGINT)
            with pytest.raises(aiohttp.ClientConnectionError):
                await running

    with command(tmp_path, "--mean-tokens", "50000") as (process, url):
        asyncio.run(call(url))


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(url, json=body) as response:
        return len((await response.json()).get("output_ids", ()))


async def running_requests(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/v1/loads") as response:
        return int((await response.json())["loads"][0]["num_running_reqs"])


def test_a_term_lets_the_command_finish_what_runs_and_take_more(tmp_path: Path) -> None:
    """As observed: /health says 503, new requests are served, the process ends when none is left."""

    async def call(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            await slow_down(0.1 * SPEED)  # seconds a step: what runs does not end by itself
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2000}}
            running = asyncio.create_task(send(session, f"{url}/generate", body))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await running_requests(session, url) == 0:
                    pass
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_SECONDS):
                health = 200
                while health == 200:
                    async with session.get(f"{url}/health") as response:
                        health = response.status
            assert health == 503
            assert (
                await send(session, f"{url}/generate", {"input_ids": [2], "sampling_params": {"max_new_tokens": 3}})
                == 3
            )
            await slow_down(None)
            assert await running == 2000

    async def slow_down(seconds: float | None) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/slow_down", json={"forward_sleep_time": seconds}) as response,
        ):
            assert response.status == 200

    with command(tmp_path, "--mean-tokens", "50000", "--speed", str(SPEED)) as (process, url):
        asyncio.run(call(url))


def test_a_death_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    program = "from producer.cli.main import main; main()"
    arguments = [sys.executable, "-c", program, "simulate", "--port-file", str(port_file), "--preset", "instant"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=REPO) as process:
        wait_until("the simulator has written its port", lambda: port_file.exists() or process.poll() is not None)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"

        async def call() -> None:
            async with aiohttp.ClientSession() as session:
                with pytest.raises(aiohttp.ClientConnectionError):
                    await send(session, f"{url}/generate", {"input_ids": [1 << 40]})

        asyncio.run(call())
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 4
        assert "died: it was sent an id that its model does not have" in stderr
        assert "Traceback" not in stderr


def test_a_router_goes_on_when_its_server_has_died(tmp_path: Path) -> None:
    async def call(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/_sim/die", json={}) as response:
                assert response.status == 200
            async with asyncio.timeout(PATIENCE_SECONDS):
                status = 200
                while status == 200:
                    async with session.post(f"{url}/generate", json={"input_ids": [1]}) as response:
                        status = response.status
            assert status in {500, 503}
            async with session.get(f"{url}/health") as response:
                assert response.status == 200

    with command(tmp_path, "--router", "--speed", "inf") as (process, url):
        asyncio.run(call(url))
        process.send_signal(signal.SIGTERM)
