"""What is read of a server's load: from each source, over ranks, and what is made of bodies that are none."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from tests.over_httpx import OverHttpx
from workers.governor import Load
from workers.sglang import loads
from workers.sglang.loads import LoadReader, from_get_load, from_metrics, from_v1_loads
from workers.sglang.simulator import info
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import Load as EngineLoad

URL = "http://one:30000"
Result = TypeVar("Result")
# As a server of 0.5.23 gave it, cut to what is read.
RANK = {
    "timestamp": 1795982595.75,
    "dp_rank": 0,
    "num_running_reqs": 6,
    "num_waiting_reqs": 2,
    "num_used_tokens": 5000,
    "num_total_tokens": 5100,
    "max_total_num_tokens": 20000,
    "max_running_requests": 32,
    "token_usage": 0.25,
    "gen_throughput": 713.91,
    "decode_moments": [1369.0, 8184.0, 8109290.0, 49074.0, 48503800.0, 8184.0],
}
STAMP = "2026-11-29T20:03:15.756866+00:00"  # 6 ms later
METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m}\\"{",pp_rank="0",tp_rank="0"} 6.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 20000.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:gen_throughput{model_name="m",tp_rank="0"} 713.5
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 26.0
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 8227.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 8.0
sglang:fwd_occupancy{model_name="m",tp_rank="0"} NaN
"""


def v1_loads(*ranks: dict[str, Any], timestamp: str = STAMP) -> bytes:
    return json.dumps({"timestamp": timestamp, "version": "0.5.23", "loads": ranks}).encode()


class TestBodies:
    def test_v1_loads(self) -> None:
        load = from_v1_loads(v1_loads(RANK))
        assert load is not None
        assert (load.running, load.waiting, load.capacity_tokens) == (6, 2, 20000)
        assert (load.generated_tokens, load.tokens_per_second, load.kv_usage) == (8184.0, 713.91, 0.25)
        assert load.age_seconds == pytest.approx(0.007, abs=0.001)

    def test_v1_loads_over_ranks(self) -> None:
        other = RANK | {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 0, "num_used_tokens": 15000}
        load = from_v1_loads(v1_loads(RANK, other))
        assert load is not None
        assert (load.running, load.waiting, load.capacity_tokens, load.kv_usage) == (10, 2, 40000, 0.5)
        assert (load.generated_tokens, load.tokens_per_second) == (16368.0, 1427.82)

    def test_an_older_release_has_no_counter(self) -> None:
        rank = {name: RANK[name] for name in ("num_running_reqs", "num_waiting_reqs")}
        assert from_v1_loads(v1_loads(rank)) == Load(running=6, waiting=2)

    def test_a_snapshot_that_stands_still_has_an_age(self) -> None:
        load = from_v1_loads(v1_loads(RANK, timestamp="2026-11-29T20:04:15.75+00:00"))
        assert load is not None
        assert load.age_seconds == pytest.approx(60)

    def test_an_idle_rank_that_sleeps_has_none(self) -> None:
        idle = RANK | {"num_running_reqs": 0, "num_waiting_reqs": 0, "timestamp": 1795980000.0}
        load = from_v1_loads(v1_loads(RANK, idle))
        assert load is not None
        assert load.age_seconds < 1

    @pytest.mark.parametrize("timestamp", ["now", "2026-11-29T20:04:15"])
    def test_a_stamp_that_cannot_be_read_is_none(self, timestamp: str) -> None:
        load = from_v1_loads(v1_loads(RANK, timestamp=timestamp))
        assert load is not None
        assert load.age_seconds == 0

    def test_get_load_counts_those_that_wait_among_all(self) -> None:
        body = b'[{"dp_rank":0,"num_reqs":8,"num_waiting_reqs":2,"num_tokens":900},{"num_reqs":5,"num_waiting_reqs":1}]'
        assert from_get_load(body) == Load(running=10, waiting=3)

    def test_metrics(self) -> None:
        assert from_metrics(METRICS.encode()) == Load(6, 2, 20000, 8227.0, 713.5, 0.25)

    def test_metrics_over_ranks_and_their_schedulers(self) -> None:
        lines = [
            f'sglang:{name}{{dp_rank="{dp}",priority="{priority}",tp_rank="{tp}"}} {value}'
            for name, value in (("num_running_reqs", 5.0), ("num_queue_reqs", 1.0))
            for dp, tp in ((0, 0), (0, 1), (1, 2), (1, 3))
            for priority in ("", "7")
        ]
        assert from_metrics("\n".join(lines).encode()) == Load(running=10, waiting=2)

    def test_what_the_simulator_says(self) -> None:
        config, load = SimulatorConfig(), EngineLoad(6, 2, 5000, 900, 100.0)
        told = from_v1_loads(json.dumps(info.loads(config, load)).encode())
        assert told is not None
        assert (told.running, told.waiting, told.capacity_tokens) == (6, 2, config.max_total_tokens)
        assert from_get_load(json.dumps(info.get_load(load)).encode()) == Load(running=6, waiting=2)
        measured = from_metrics(info.metrics(config, load, info.Totals()).encode())
        assert measured is not None
        assert (measured.running, measured.waiting, measured.tokens_per_second) == (6, 2, 100.0)

    @pytest.mark.parametrize("parse", [from_v1_loads, from_get_load, from_metrics])
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<html>",
            b"{}",
            b"[]",
            b"null",
            b"[" * 100_000,
            b'{"loads":[]}',
            b'{"loads":{"workers":[]}}',
            b'{"loads":[{"num_running_reqs":"6","num_waiting_reqs":2}]}',
            b'{"loads":[{"num_running_reqs":-6,"num_waiting_reqs":2}]}',
            b'{"loads":[{"num_running_reqs":1e300,"num_waiting_reqs":2}]}',
            b'{"workers":[{"worker":"http://two:30000","load":3}]}',
            b'[{"num_reqs":2,"num_waiting_reqs":5}]',
            b"sglang:num_running_reqs 6.0",
            b"sglang:num_running_reqs NaN\nsglang:num_queue_reqs NaN",
            b"\xff\xfe\x00",
        ],
    )
    def test_a_body_that_is_none(self, parse: Any, body: bytes) -> None:
        assert parse(body) is None

    def test_what_makes_no_sense_is_left_out(self) -> None:
        odd = RANK | {"max_total_num_tokens": -1, "gen_throughput": -5.0, "decode_moments": [1.0], "num_used_tokens": 1}
        load = from_v1_loads(v1_loads(odd))
        assert load is not None
        assert (load.running, load.waiting) == (6, 2)
        assert [load.capacity_tokens, load.generated_tokens, load.tokens_per_second, load.kv_usage] == [None] * 4


class Server:
    """Answers by path; the paths that it was asked for are remembered."""

    def __init__(self, **replies: bytes | int | Exception) -> None:
        self.replies = replies
        self.paths: list[str] = []
        self.keys: list[str | None] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.strip("/").replace("/", "_")
        self.paths.append(path)
        self.keys.append(request.headers.get("authorization"))
        reply = self.replies.get(path, 404)
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply) if isinstance(reply, int) else httpx.Response(200, content=reply)

    def reader(self) -> LoadReader:
        return LoadReader(URL, {"authorization": "Bearer key"}, OverHttpx(httpx.MockTransport(self.answer)))

    def reads(self, reader: LoadReader, times: int = 1) -> list[Load | None]:
        async def all_of_them() -> list[Load | None]:
            return [await reader.read() for _ in range(times)]

        return run(all_of_them())


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def old_rank(reqs: int = 8) -> bytes:
    return json.dumps([{"num_reqs": reqs, "num_waiting_reqs": 2}]).encode()


class TestReader:
    def test_remembers_the_source_that_works(self) -> None:
        server = Server(get_load=old_rank())
        reader = server.reader()
        assert server.reads(reader, 3) == [Load(running=6, waiting=2)] * 3
        assert reader.source == "/get_load"
        assert server.paths == ["v1_loads", "get_load", "metrics", "get_load", "get_load"]

    def test_takes_the_first_that_has_figures(self) -> None:
        server = Server(v1_loads=b"{}", get_load=401, metrics=METRICS.encode())
        assert server.reads(server.reader()) == [Load(6, 2, 20000, 8227.0, 713.5, 0.25)]

    def test_sends_the_key(self) -> None:
        server = Server(v1_loads=v1_loads(RANK))
        server.reads(server.reader())
        assert server.keys == ["Bearer key"]

    def test_adds_the_counter_of_the_metrics_now_and_then(self) -> None:
        rank = {name: value for name, value in RANK.items() if name != "decode_moments"}
        server = Server(v1_loads=v1_loads(rank), metrics=METRICS.encode())
        told = server.reads(server.reader(), 2 * loads.READS_A_COUNTER)
        counters = [load.generated_tokens for load in told if load is not None]
        assert counters == ([8227.0] + [None] * (loads.READS_A_COUNTER - 1)) * 2

    def test_does_not_read_the_metrics_where_the_counter_is_told(self) -> None:
        server = Server(v1_loads=v1_loads(RANK), metrics=METRICS.encode())
        server.reads(server.reader(), 10)
        assert "metrics" not in server.paths

    def test_a_server_without_figures_is_asked_seldom(self) -> None:
        server = Server()
        assert server.reads(server.reader(), loads.READS_TO_RETRY + 2) == [None] * (loads.READS_TO_RETRY + 2)
        assert server.paths == ["v1_loads", "get_load", "metrics"] * 2

    @pytest.mark.parametrize("failure", [503, httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
    def test_a_server_that_is_away_is_asked_again(self, failure: int | Exception) -> None:
        server = Server(v1_loads=failure, get_load=failure, metrics=failure)
        reader = server.reader()
        assert server.reads(reader, 2) == [None, None]
        server.replies = {"v1_loads": v1_loads(RANK)}
        (load,) = server.reads(reader)
        assert load is not None
        assert load.running == 6

    def test_another_release_may_come_back(self) -> None:
        server = Server(get_load=old_rank())
        reader = server.reader()
        server.reads(reader)
        server.replies = {"v1_loads": v1_loads(RANK)}
        told = server.reads(reader, 2)
        assert told[0] is None
        assert told[1] is not None
        assert reader.source == "/v1/loads"

    def test_a_source_that_fails_for_a_moment_is_kept(self) -> None:
        server = Server(v1_loads=v1_loads(RANK))
        reader = server.reader()
        server.reads(reader)
        server.replies = {"v1_loads": 500}
        assert server.reads(reader, loads.FAILURES_TO_FORGET - 1) == [None] * (loads.FAILURES_TO_FORGET - 1)
        assert reader.source == "/v1/loads"
        assert server.reads(reader) == [None]
        assert reader.source is None

    def test_a_body_without_end_is_no_figure(self) -> None:
        server = Server(v1_loads=b" " * (loads.MOST_BYTES + 1))
        assert server.reads(server.reader()) == [None]


def test_both_counters_of_the_simulator_are_of_its_decoded_tokens() -> None:
    config, load = SimulatorConfig(), EngineLoad(1, 0, 5, 0, 100.0, decode_steps=7, decoded_tokens=21)
    told = from_v1_loads(json.dumps(info.loads(config, load)).encode())
    measured = from_metrics(info.metrics(config, load, info.Totals()).encode())
    assert told is not None
    assert measured is not None
    assert told.generated_tokens == measured.generated_tokens == 21.0
