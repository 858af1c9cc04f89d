"""Servers that answer what a preflight asks, and those that are not there."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from tests.over_httpx import OverHttpx
from workers.sglang.preflight import ServerFacts, read_facts

URL = "http://one:30000"
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "models/a",
    "tokenizer_path": "models/a",
    "served_model_name": "a",
    "weight_version": "default",
    "context_length": None,
    "max_req_input_len": 2042,
    "max_total_num_tokens": 4096,
    "max_running_requests": 4000,
    "max_queued_requests": None,
    "dp_size": 1,
    "kv_cache_dtype": "auto",
    "reasoning_parser": None,
    "skip_tokenizer_init": False,
    "allow_auto_truncate": False,
    "incremental_streaming_output": False,
    "internal_states": [{"effective_max_running_requests_per_dp": 8}],
    "api_key": "never-to-be-stored",
}
Answer = Callable[[httpx.Request], httpx.Response]


def answering(answer: Answer) -> OverHttpx:
    return OverHttpx(httpx.MockTransport(answer))


def server(paths: dict[str, Any]) -> OverHttpx:
    """A server with these paths and no others."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = paths.get(request.url.path)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, httpx.Response):
            return found
        return httpx.Response(404, json={"detail": "Not Found"}) if found is None else httpx.Response(200, json=found)

    return answering(answer)


def paths_of(**changes: Any) -> dict[str, Any]:
    return {
        "/server_info": INFO | changes,
        "/model_info": {"model_path": "models/a", "weight_version": "default"},
        "/v1/models": {"object": "list", "data": [{"id": "a", "max_model_len": 2048}]},
    }


def sglang(**changes: Any) -> OverHttpx:
    return server(paths_of(**changes))


def several(hosts: dict[str, dict[str, Any]]) -> OverHttpx:
    """Servers by host name; a host that is not there refuses connections."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host not in hosts:
            raise httpx.ConnectError("Connection refused")
        found = hosts[request.url.host].get(request.url.path)
        return httpx.Response(404) if found is None else httpx.Response(200, json=found)

    return answering(answer)


def no_key(_: str) -> None:
    return None


def facts_of(http: OverHttpx, key: str | None = None) -> ServerFacts:
    """The facts of the one server at URL."""
    return asyncio.run(read_facts(URL, key, http))
