"""What the simulated server says of itself: its settings, its load, its metrics, its books."""

import asyncio
import json
import re
from typing import Any

import pytest

from tests.integration.simulator_steps import (
    CAPTURES,
    SLOW,
    Caller,
    recorded,
    with_server,
)


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
