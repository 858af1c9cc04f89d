"""The simulated server over HTTP, on loopback, beside the recorded exchanges of the real one."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from common.errors import UnavailableError, UsageError
from tests.conftest import REPO, SHARED, wait_until
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.cli import simulate
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

CAPTURES = SHARED / "data" / "sglang_captures"
SLOW: dict[str, Any] = {"mean_tokens": 100_000.0, "cv": 0.0}  # answers that outlast every test
INSTANT: dict[str, Any] = {"speed": 0.0}
LONG: dict[str, Any] = {"max_new_tokens": 30_000}


class Caller:
    """A client of one simulated server."""

    def __init__(self, server: Simulator, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.server.url + path, **options) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, msgspec.json.decode(raw) if is_json else raw.decode()

    async def generate(self, input_ids: list[int], *, rid: str | None = None, **params: Any) -> tuple[int, Any]:
        fields: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params}
        return await self.call("POST", "/generate", json=fields if rid is None else fields | {"rid": rid})

    async def load(self) -> dict[str, Any]:
        _, body = await self.call("GET", "/v1/loads")
        [rank] = body["loads"]
        assert isinstance(rank, dict)
        return rank

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the load until it is as wanted."""
        async with asyncio.timeout(30):
            while not condition(load := await self.load()):
                pass
        return load

    async def until_load(self, running: int, waiting: int) -> dict[str, Any]:
        return await self.until(lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting))


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Caller]:
    defaults = {"vocab_size": 1024, "context_length": 32_768, "max_total_tokens": 65_536}
    config = SimulatorConfig(**{**defaults, **settings})
    connector = aiohttp.TCPConnector(limit=0)
    async with Simulator(config) as server, aiohttp.ClientSession(connector=connector) as session:
        yield Caller(server, session)


def with_server(test: Callable[[Caller], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with serving(**settings) as caller:
            await test(caller)

    asyncio.run(run())


def recorded(name: str) -> dict[str, Any]:
    captures = CAPTURES / "sglang_0.5.23.jsonl"
    if not captures.exists():
        pytest.skip(f"the recorded exchanges are not at {captures}")
    with captures.open() as lines:
        exchanges = [json.loads(line) for line in lines]
    return next(one for one in exchanges if one["name"] == name and one.get("status"))


@pytest.mark.parametrize("speed", [0.0, 1000.0])
@pytest.mark.parametrize(("name", "tokens"), [("basic", 4), ("max_new_tokens_0", 0), ("logit_bias_eos", 1)])
def test_an_answer_has_the_recorded_fields(speed: float, name: str, tokens: int) -> None:
    real = json.loads(recorded(name)["body"])

    async def test(caller: Caller) -> None:
        status, body = await caller.generate([10, 20, 30, 40, 50], max_new_tokens=tokens)
        assert status == 200
        assert body.keys() == real.keys()
        assert body["meta_info"].keys() == real["meta_info"].keys()
        for field, value in real["meta_info"].items():
            if field != "cached_tokens_details":  # null, or where they were cached
                assert type(body["meta_info"][field]) is type(value), field

    with_server(test, speed=speed, mean_tokens=100.0, cv=0.0)


@pytest.mark.parametrize("speed", [0.0, 1000.0])
def test_the_answer_is_the_models_and_its_meta_info_is_true(speed: float) -> None:
    settings: dict[str, Any] = {"vocab_size": 1024, "mean_tokens": 30.0, "seed": 5}
    model = Answers(SimulatorConfig(**settings))

    async def test(caller: Caller) -> None:
        for prompt in range(20):
            status, body = await caller.generate([prompt, 9, 9], rid=f"r{prompt:03d}", max_new_tokens=40)
            expected = model.answer([prompt, 9, 9], 40)
            meta = body["meta_info"]
            assert status == 200
            assert body["output_ids"] == expected.stream.ids(expected.completion_tokens)
            assert meta["finish_reason"] == expected.finish_reason
            assert (meta["id"], meta["prompt_tokens"]) == (f"r{prompt:03d}", 3)
            assert meta["completion_tokens"] == len(body["output_ids"])
            assert (meta["cached_tokens"], meta["num_retractions"], meta["weight_version"]) == (0, 0, "w7")
            assert meta["weight_versions"] == [{"version": "w7", "start": 0, "end": len(body["output_ids"])}]
            assert meta["request_received_ts"] <= meta["prefill_finished_time"] <= meta["request_finished_ts"]

    with_server(test, speed=speed, weight_version="w7", **settings)


def test_whitespace_in_the_body_changes_nothing() -> None:
    async def test(caller: Caller) -> None:
        headers = {"Content-Type": "application/json"}
        answers = []
        for raw in (b'{"input_ids":[1,2,3]}', b'{ "input_ids" : [ 1,\n2,\t3 ] }'):
            _, body = await caller.call("POST", "/generate", data=raw, headers=headers)
            answers.append(body["output_ids"])
        assert answers[0] == answers[1]

    with_server(test, **INSTANT)


@pytest.mark.parametrize("name", ["empty_input_ids", "too_long", "unknown_sp_field", "get_generate", "/nonexistent"])
def test_an_error_is_the_recorded_one(name: str) -> None:
    exchange = recorded(name)

    async def test(caller: Caller) -> None:
        found = await caller.call(
            exchange["method"],
            exchange["path"],
            data=exchange["request"],
            headers={"Content-Type": "application/json"},
        )
        assert found == (exchange["status"], json.loads(exchange["body"]))

    with_server(test, context_length=2048)


def test_a_body_that_is_not_declared_as_json_is_refused() -> None:
    async def test(caller: Caller) -> None:
        status, body = await caller.call("POST", "/generate", data=b'{"input_ids":[1,2]}')
        assert (status, body["object"], body["type"], body["code"]) == (400, "error", "Bad Request", 400)

    with_server(test)


def test_malformed_json_is_refused_in_the_third_shape() -> None:
    async def test(caller: Caller) -> None:
        headers = {"Content-Type": "application/json"}
        for path in ("/generate", "/abort_request"):
            status, body = await caller.call("POST", path, data=b'{"input_ids": [1,2', headers=headers)
            assert status == 400
            assert body.keys() == {"object", "message", "type", "param", "code"}

    with_server(test)


def test_without_the_key_only_health_and_metrics_are_open() -> None:
    async def test(caller: Caller) -> None:
        unauthorized = (401, {"error": "Unauthorized"})
        assert await caller.generate([1]) == unauthorized
        for path in ("/v1/models", "/server_info", "/v1/loads", "/ping"):
            assert await caller.call("GET", path) == unauthorized
        for path in ("/health", "/health_generate", "/ready", "/metrics"):
            assert (await caller.call("GET", path))[0] == 200
        caller.session.headers["Authorization"] = "Bearer wrong"
        assert await caller.generate([1]) == unauthorized
        caller.session.headers["Authorization"] = "Bearer secret"
        assert (await caller.generate([1]))[0] == 200

    with_server(test, api_key="secret", **INSTANT)


def test_an_id_outside_the_vocabulary_breaks_the_connection() -> None:
    async def test(caller: Caller) -> None:
        for input_ids in ([5, 1024], [5, -1]):
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await caller.generate(input_ids)
        assert (await caller.generate([5, 1023]))[0] == 200

    with_server(test, die_on_bad_id=False, **INSTANT)


def test_a_rid_in_flight_cannot_be_used_again_until_it_has_ended() -> None:
    async def test(caller: Caller) -> None:
        first = asyncio.create_task(caller.generate([1, 2], rid="dup", **LONG))
        await caller.until_load(1, 0)
        error = {"error": {"message": "Duplicate request ID detected: dup"}}
        assert await caller.generate([1, 2], rid="dup") == (400, error)
        await caller.call("POST", "/abort_request", json={"rid": "dup"})
        assert (await first)[0] == 200
        assert (await caller.generate([1, 2], rid="dup", max_new_tokens=2))[0] == 200

    with_server(test, speed=100.0, **SLOW)


def test_a_full_queue_refuses_with_503() -> None:
    async def test(caller: Caller) -> None:
        calls = [asyncio.create_task(caller.generate([n], rid=f"q{n}", **LONG)) for n in (1, 2)]
        await caller.until_load(1, 1)
        status, body = await caller.generate([3])
        assert (status, body["message"], body["code"]) == (503, "The request queue is full.", 503)
        real = recorded("q2")
        assert (status, body) == (real["status"], json.loads(real["body"]))
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]

    with_server(test, max_running_requests=1, max_queued_requests=1, **SLOW)


def test_an_abort_ends_all_whose_rid_begins_so_with_what_they_have() -> None:
    model = Answers(SimulatorConfig(vocab_size=1024, **SLOW))

    async def test(caller: Caller) -> None:
        calls = {
            rid: asyncio.create_task(caller.generate([number], rid=rid, **LONG))
            for number, rid in enumerate(("p1", "p10", "q1"))
        }
        await caller.until_load(2, 1)
        await caller.until(lambda load: load["num_used_tokens"] >= 12)  # a few tokens each
        assert await caller.call("POST", "/abort_request", json={"rid": "p1"}) == (200, "")
        for number, rid in enumerate(("p1", "p10")):
            status, body = await calls[rid]
            meta = body["meta_info"]
            assert status == 200
            assert meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert body["output_ids"] == model.answer([number], 30_000).stream.ids(meta["completion_tokens"])
            assert 0 < len(body["output_ids"]) < 30_000
        await caller.until_load(1, 0)
        await caller.call("POST", "/abort_request", json={"rid": "q1"})
        assert (await calls["q1"])[1]["meta_info"]["finish_reason"]["type"] == "abort"

    with_server(test, speed=50.0, max_running_requests=2, **SLOW)


def test_an_abort_in_the_queue_gives_an_empty_answer_with_the_recorded_fields() -> None:
    real = json.loads(recorded("queued")["body"])

    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.generate([1], rid="running", **LONG))
        await caller.until_load(1, 0)
        queued = asyncio.create_task(caller.generate([2], rid="queued-1", **LONG))
        await caller.until_load(1, 1)
        await caller.call("POST", "/abort_request", json={"rid": "queued-1"})
        status, body = await queued
        assert status == 200
        for answer in (body, real):
            del answer["meta_info"]["e2e_latency"], answer["meta_info"]["response_sent_to_client_ts"]
        assert body == real
        await caller.call("POST", "/abort_request", json={"rid": "running"})
        await running

    with_server(test, max_running_requests=1, **SLOW)


@pytest.mark.parametrize("body", [{"rid": "nobody"}, {"rid": ""}, {}])
def test_an_abort_of_nobody_is_200_and_empty(body: dict[str, Any]) -> None:
    async def test(caller: Caller) -> None:
        running = asyncio.create_task(caller.generate([1], rid="running", **LONG))
        await caller.until_load(1, 0)
        assert await caller.call("POST", "/abort_request", json=body) == (200, "")
        assert (await caller.load())["num_running_reqs"] == 1
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        await running

    with_server(test, speed=100.0, **SLOW)


def test_a_caller_that_leaves_is_noticed_and_its_request_is_aborted() -> None:
    async def test(caller: Caller) -> None:
        call = asyncio.create_task(caller.generate([1], **LONG))
        await caller.until_load(1, 0)
        call.cancel()
        await caller.until_load(0, 0)
        totals = caller.server.totals
        assert (totals.taken, totals.finished, totals.aborted, totals.refused) == (1, 0, 1, 0)

    with_server(test, speed=50.0, **SLOW)


def metric(text: str, name: str) -> float:
    [value] = re.findall(rf"^sglang:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("settings", [{}, {"latency_mean_seconds": 1000.0}])
def test_loads_and_metrics_are_true_while_requests_run(settings: dict[str, Any]) -> None:
    async def test(caller: Caller) -> None:
        calls = [asyncio.create_task(caller.generate([n] * 100, max_new_tokens=1000)) for n in range(7)]
        load = await caller.until_load(3, 4)
        assert (load["max_running_requests"], load["max_total_num_tokens"]) == (3, 65_536)
        assert load["num_waiting_uncached_tokens"] == 400
        assert load["gen_throughput"] > 0
        _, before = await caller.call("GET", "/metrics")
        load = await caller.load()
        _, after = await caller.call("GET", "/metrics")
        used = load["num_used_tokens"]
        assert metric(before, "num_used_tokens") <= used <= metric(after, "num_used_tokens")
        assert 100 <= used < 300 + 7000
        assert load["token_usage"] == used / 65_536
        assert (metric(after, "num_running_reqs"), metric(after, "num_queue_reqs")) == (3, 4)
        await caller.call("POST", "/abort_request", json={"abort_all": True})
        bodies = [body for _, body in await asyncio.gather(*calls)]
        assert (await caller.until_load(0, 0))["num_used_tokens"] == 0
        _, text = await caller.call("GET", "/metrics")
        assert metric(text, "num_aborted_requests_total") == 7
        assert metric(text, "generation_tokens_total") == sum(len(body["output_ids"]) for body in bodies)

    with_server(test, max_running_requests=3, **SLOW, **settings)


@pytest.mark.parametrize(
    "settings", [{"speed": 0.0}, {"speed": 500.0}, {"latency_mean_seconds": 0.02, "latency_cv": 1.0}]
)
def test_every_request_is_answered_once_and_the_books_balance(settings: dict[str, Any]) -> None:
    async def test(caller: Caller) -> None:
        prompts = [[number % 1000, number // 1000] for number in range(300)]
        answers = await asyncio.gather(*(caller.generate(prompt, max_new_tokens=60) for prompt in prompts))
        refused = await asyncio.gather(*(caller.generate([]) for _ in range(5)))
        assert {status for status, _ in answers} == {200}
        assert {status for status, _ in refused} == {400}
        assert len({body["meta_info"]["id"] for _, body in answers}) == 300
        totals = caller.server.totals
        assert (totals.taken, totals.finished, totals.aborted, totals.refused) == (305, 300, 0, 5)
        assert totals.prompt_tokens == 600
        assert totals.completion_tokens == sum(len(body["output_ids"]) for _, body in answers)
        load = await caller.load()
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)

    with_server(test, mean_tokens=30.0, max_running_requests=20, max_total_tokens=1000, context_length=1000, **settings)


def test_the_server_tells_its_limits_in_the_recorded_words() -> None:
    real_info = CAPTURES / "server_info.json"

    async def test(caller: Caller) -> None:
        _, info = await caller.call("GET", "/server_info")
        assert (info["max_total_num_tokens"], info["max_req_input_len"], info["version"]) == (4096, 2042, "0.5.23")
        [state] = info["internal_states"]
        assert state["effective_max_running_requests_per_dp"] == 8
        assert info["port"] == caller.server.port
        assert (await caller.call("GET", "/get_server_info"))[1].keys() == info.keys()
        _, model = await caller.call("GET", "/model_info")
        assert await caller.call("GET", "/get_model_info") == (200, model)
        assert model["model_path"] == "m"
        _, models = await caller.call("GET", "/v1/models")
        assert models["data"][0]["max_model_len"] == 2048
        if not real_info.exists():
            pytest.skip(f"the recorded server_info is not at {real_info}")
        real = json.loads(real_info.read_text())
        assert info.keys() <= real.keys()
        assert state.keys() <= real["internal_states"][0].keys()
        assert model.keys() <= json.loads(recorded("/model_info")["body"]).keys()
        assert models["data"][0].keys() == json.loads(recorded("/v1/models")["body"])["data"][0].keys()
        load = json.loads(recorded("/v1/loads")["body"])
        _, loads = await caller.call("GET", "/v1/loads?include=all")
        assert loads.keys() == load.keys()
        assert loads["loads"][0].keys() <= load["loads"][0].keys()

    with_server(test, model_path="m", context_length=2048, max_total_tokens=4096, max_running_requests=8)


def test_every_metric_is_one_of_the_recorded() -> None:
    recorded_metrics = CAPTURES / "metrics_idle.txt"
    if not recorded_metrics.exists():
        pytest.skip(f"the recorded metrics are not at {recorded_metrics}")
    real = set(re.findall(r"^# TYPE (\S+ \S+)$", recorded_metrics.read_text(), re.MULTILINE))

    async def test(caller: Caller) -> None:
        _, text = await caller.call("GET", "/metrics")
        found = re.findall(r"^# TYPE (\S+ \S+)$", text, re.MULTILINE)
        assert len(found) > 10
        assert set(found) <= real

    with_server(test)


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
        _, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (0, f"simulated SGLang on http://127.0.0.1:{port_file.read_text()}")


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
            async with asyncio.timeout(30):
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
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 200}}
            running = asyncio.create_task(send(session, f"{url}/generate", body))
            async with asyncio.timeout(30):
                while await running_requests(session, url) == 0:
                    pass
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                health = 200
                while health == 200:
                    async with session.get(f"{url}/health") as response:
                        health = response.status
            assert health == 503
            assert (
                await send(session, f"{url}/generate", {"input_ids": [2], "sampling_params": {"max_new_tokens": 3}})
                == 3
            )
            assert await running == 200

    with command(tmp_path, "--mean-tokens", "50000", "--speed", "4") as (process, url):
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
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 4
        assert "died: it was sent an id that its model does not have" in stderr
        assert "Traceback" not in stderr
