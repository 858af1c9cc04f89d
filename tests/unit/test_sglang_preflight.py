"""What a server says of itself, and which servers are refused before any work is sent to them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from common.errors import ServerUnavailable
from tests.conftest import SHARED
from workers.sglang.preflight import ServerFacts, facts_as_dicts, preflight, read_facts

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
    "internal_states": [{"effective_max_running_requests_per_dp": 8}],
    "api_key": "never-to-be-stored",
}
Answers = Callable[[httpx.Request], httpx.Response]


def server(paths: dict[str, Any]) -> httpx.MockTransport:
    """A server with these paths and no others."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = paths.get(request.url.path)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, httpx.Response):
            return httpx.Response(found.status_code, headers=found.headers, content=found.content)
        return httpx.Response(404, json={"detail": "Not Found"}) if found is None else httpx.Response(200, json=found)

    return httpx.MockTransport(answer)


def sglang(**changes: Any) -> httpx.MockTransport:
    return server(
        {
            "/server_info": INFO | changes,
            "/model_info": {"model_path": "models/a", "weight_version": "default"},
            "/v1/models": {"object": "list", "data": [{"id": "a", "max_model_len": 2048}]},
        }
    )


def refused(transport: httpx.AsyncBaseTransport, *urls: str) -> str:
    with pytest.raises(ServerUnavailable) as caught:
        preflight(urls or (URL,), None, transport)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_facts_of_a_server() -> None:
    assert preflight([URL + "/"], None, sglang()) == [
        ServerFacts(
            url=URL,
            version="0.5.23",
            model_path="models/a",
            tokenizer_path="models/a",
            served_model_name="a",
            weight_version="default",
            context_length=2048,
            max_req_input_len=2042,
            max_total_num_tokens=4096,
            max_running_requests=8,
            max_queued_requests=None,
            dp_size=1,
            kv_cache_dtype="auto",
            reasoning_parser=None,
            skip_tokenizer_init=False,
            allow_auto_truncate=False,
        )
    ]


def test_the_api_key_is_sent_and_not_kept() -> None:
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["authorization"])
        return httpx.Response(200, json=INFO)

    facts = asyncio.run(read_facts(URL, "secret", httpx.MockTransport(answer)))
    assert set(keys) == {"Bearer secret"}
    assert "never-to-be-stored" not in repr(facts)


def test_the_facts_can_be_written_to_a_file() -> None:
    (facts,) = facts_as_dicts(preflight([URL], None, sglang()))
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["url"], facts["context_length"], facts["weight_version"]) == (URL, 2048, "default")


def test_a_context_length_set_at_launch_wins() -> None:
    assert preflight([URL], None, sglang(context_length=1000))[0].context_length == 1000


def test_weights_updated_since_the_launch_are_seen() -> None:
    transport = server({"/server_info": INFO, "/model_info": {"model_path": "models/a", "weight_version": "v2"}})
    assert preflight([URL], None, transport)[0].weight_version == "v2"


def test_the_old_names_of_the_endpoints_are_tried() -> None:
    old = server({"/get_server_info": INFO | {"version": "0.5.5", "internal_states": []}, "/get_model_info": {}})
    facts = preflight([URL], None, old)[0]
    assert (facts.version, facts.max_running_requests, facts.context_length) == ("0.5.5", 4000, None)


@pytest.mark.skipif(not (SHARED / "data" / "sglang_captures").exists(), reason="the recorded exchanges are not here")
def test_the_facts_of_the_recorded_server() -> None:
    info = json.loads((SHARED / "data" / "sglang_captures" / "server_info.json").read_text())
    facts = preflight([URL], None, server({"/server_info": info}))[0]
    assert (facts.version, facts.max_req_input_len, facts.max_total_num_tokens) == ("0.5.23", 2042, 4096)
    assert (facts.max_running_requests, facts.weight_version, facts.dp_size) == (8, "default", 1)


@pytest.mark.parametrize("version", ["0.5.5", "0.5.5.post3", "0.5.10", "0.5.23", "1.0.0", "0.0.0.dev1+g1a2b3c", None])
def test_a_good_or_unknown_version_is_taken(version: str | None) -> None:
    assert preflight([URL], None, sglang(version=version))[0].version == version


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("0.4.4", "without output_ids"),
        ("0.4.10.post2", "without output_ids"),
        ("0.5.1", "ids of the prompt"),
        ("0.5.2rc1", "ids of the prompt"),
        ("v0.5.4.post1", "ids of the prompt"),
    ],
)
def test_a_version_whose_ids_are_wrong_is_refused(version: str, fault: str) -> None:
    message = refused(sglang(version=version))
    assert URL in message
    assert version in message
    assert fault in message
    assert preflight([URL], None, sglang(version=version, skip_tokenizer_init=True))[0].version == version


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (server({"/server_info": httpx.ConnectError("Connection refused")}), "cannot be reached (Connection refused)"),
        (server({"/server_info": httpx.ConnectTimeout("")}), "cannot be reached (ConnectTimeout)"),
        (server({"/server_info": TimeoutError()}), "did not say within 15 s"),
        (server({}), "not as SGLang does"),
        (server({"/server_info": httpx.Response(200, text="<html>Hello</html>")}), "not as SGLang does"),
        (server({"/server_info": httpx.Response(302, headers={"location": "/login"})}), "not as SGLang does"),
        (server({"/server_info": {"vllm_config": {}}}), "not as SGLang does"),
        (server({"/server_info": httpx.Response(401, json={"error": "Unauthorized"})}), "refuses the API key"),
        (server({"/server_info": httpx.Response(503, text="loading")}), "the server answered 503: loading"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(transport: httpx.MockTransport, words: str) -> None:
    message = refused(transport)
    assert URL in message
    assert words in message


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/model_info", {"model_path": "models/a", "weight_version": "v2"}),
        ("/server_info", INFO | {"model_path": "models/b"}),
    ],
)
def test_servers_that_differ_are_refused(path: str, what: dict[str, Any]) -> None:
    both = {"/server_info": INFO, "/model_info": {"model_path": "models/a", "weight_version": "default"}}

    def answer(request: httpx.Request) -> httpx.Response:
        found = both | ({path: what} if request.url.host == "two" else {})
        return httpx.Response(200, json=found.get(request.url.path, {}))

    transport = httpx.MockTransport(answer)
    assert len(preflight([URL, "http://three:30000"], None, transport)) == 2
    message = refused(transport, URL, "http://two:30000")
    assert URL in message
    assert "http://two:30000" in message
