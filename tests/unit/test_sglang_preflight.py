"""What a server says of itself, and which servers are refused before any work is sent to them."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from common.errors import ServerRefused, ServerUnavailable
from tests.conftest import SHARED
from tests.over_httpx import OverHttpx
from tests.unit.preflight_steps import INFO, URL, answering, facts_of, no_key, paths_of, server, several, sglang
from workers.sglang.inquiry import MOST_BYTES
from workers.sglang.preflight import ServerFacts, preflight, warnings_of


def unusable(http: OverHttpx, *urls: str, kind: type[ServerUnavailable] = ServerRefused) -> str:
    """The one sentence of a preflight that ends in `kind`."""
    with pytest.raises(ServerUnavailable) as caught:
        preflight(urls or (URL,), no_key, http)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_facts_of_a_server() -> None:
    assert preflight([URL + "/"], no_key, sglang()) == (
        [
            ServerFacts(
                url=URL,
                version="0.5.23",
                model_path="models/a",
                tokenizer_path="models/a",
                served_model_name="a",
                weight_version="default",
                context_length=2048,
                max_req_input_len=2042,
                vocab_size=None,
                max_total_num_tokens=4096,
                max_running_requests=8,
                max_queued_requests=None,
                dp_size=1,
                kv_cache_dtype="auto",
                reasoning_parser=None,
                preferred_sampling_params=None,
                skip_tokenizer_init=False,
                allow_auto_truncate=False,
                stream_mode="cumulative",
                router=False,
                takes_aborts=True,
            )
        ],
        [],
    )


def test_each_server_gets_its_own_key_and_none_is_kept() -> None:
    keys = set()

    def answer(request: httpx.Request) -> httpx.Response:
        keys.add((request.url.host, request.headers.get("authorization")))
        return httpx.Response(200, json=INFO | {"admin_api_key": "nor-this"})

    of = {URL: "sesame", "http://two:30000": None}
    servers, _ = preflight(list(of), of.__getitem__, answering(answer))
    assert keys == {("one", "Bearer sesame"), ("two", None)}
    for secret in ("sesame", "never-to-be-stored", "nor-this"):
        assert secret not in repr(servers)


def test_the_facts_can_be_written_to_a_file() -> None:
    facts = msgspec.to_builtins(facts_of(sglang()))
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["url"], facts["context_length"], facts["weight_version"]) == (URL, 2048, "default")


def test_a_context_length_set_at_launch_wins() -> None:
    assert facts_of(sglang(context_length=1000)).context_length == 1000


def test_weights_updated_since_the_launch_are_seen() -> None:
    updated = server({"/server_info": INFO, "/model_info": {"model_path": "models/a", "weight_version": "v2"}})
    assert facts_of(updated).weight_version == "v2"


@pytest.mark.parametrize("where", ["/server_info", "/model_info"])
def test_a_vocabulary_that_is_told_is_read(where: str) -> None:
    paths = paths_of()
    paths[where] = paths[where] | {"vocab_size": 163_840}
    assert facts_of(server(paths)).vocab_size == 163_840


def test_the_old_names_of_the_endpoints_are_tried() -> None:
    old = server({"/get_server_info": INFO | {"version": "0.5.5", "internal_states": []}, "/get_model_info": {}})
    facts = facts_of(old)
    assert (facts.version, facts.max_running_requests, facts.context_length) == ("0.5.5", 4000, None)


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"incremental_streaming_output": True}, "delta"),
        ({"incremental_streaming_output": None, "stream_output": True}, "delta"),
        ({"incremental_streaming_output": None, "stream_output": False}, "cumulative"),
        ({"incremental_streaming_output": None}, None),
        ({"version": "0.5.9", "incremental_streaming_output": None, "stream_output": False}, "cumulative"),
        ({"version": "0.5.5.post3", "incremental_streaming_output": None, "stream_output": False}, "delta"),
        ({"version": "0.5.5", "stream_output": False, "skip_tokenizer_init": True}, "cumulative"),
        ({"version": "0.5.5", "stream_output": True, "skip_tokenizer_init": True}, "delta"),
    ],
)
def test_the_stream_mode(changes: dict[str, Any], mode: str | None) -> None:
    assert facts_of(sglang(**changes)).stream_mode == mode


@pytest.mark.parametrize(
    ("workers", "router"), [({"workers": [], "total": 0}, True), ({"message": "no"}, False), (["workers"], False)]
)
def test_a_router_lists_its_workers(workers: Any, router: bool) -> None:
    facts = facts_of(server(paths_of() | {"/workers": workers}))
    assert (facts.router, facts.takes_aborts) == (router, not router)


@pytest.mark.parametrize("status", [401, 403, 500, 502])
def test_a_list_of_workers_that_is_kept_from_us_is_no_router(status: int) -> None:
    assert not facts_of(server(paths_of() | {"/workers": httpx.Response(status)})).router


@pytest.mark.parametrize(
    ("admin_key", "key", "takes_aborts"),
    [(None, "user", True), ("admin", "user", False), ("admin", None, False), ("admin", "admin", True)],
)
def test_where_an_admin_key_is_set_only_that_aborts(admin_key: str | None, key: str | None, takes_aborts: bool) -> None:
    facts = facts_of(sglang(admin_api_key=admin_key), key)
    assert facts.takes_aborts == takes_aborts
    assert any("admin key" in sentence for sentence in warnings_of(facts)) == (not takes_aborts)


def test_fields_of_another_kind_are_left_out() -> None:
    facts = facts_of(
        sglang(
            weight_version=7,
            context_length="2048",
            max_total_num_tokens=-1,
            max_queued_requests=2**60,
            dp_size=True,
            kv_cache_dtype="\x1b[31mauto",
            served_model_name="a" * 2000,
            internal_states=[None, {"effective_max_running_requests_per_dp": "many"}],
        )
    )
    assert (facts.weight_version, facts.context_length, facts.max_total_num_tokens) == ("default", 2048, None)
    assert (facts.max_queued_requests, facts.dp_size, facts.kv_cache_dtype) == (None, 1, None)
    assert (facts.served_model_name, facts.max_running_requests) == (None, 4000)


@pytest.mark.skipif(not (SHARED / "data" / "sglang_captures").exists(), reason="the recorded exchanges are not here")
def test_the_facts_of_the_recorded_server() -> None:
    info = json.loads((SHARED / "data" / "sglang_captures" / "server_info.json").read_text())
    facts = facts_of(server({"/server_info": info}))
    assert (facts.version, facts.max_req_input_len, facts.max_total_num_tokens) == ("0.5.23", 2042, 4096)
    assert (facts.max_running_requests, facts.weight_version, facts.dp_size) == (8, "default", 1)
    assert (facts.vocab_size, facts.kv_cache_dtype, facts.stream_mode) == (None, "auto", "cumulative")
    assert warnings_of(facts) == []


async def no_end() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 65536


BOMB = gzip.compress(bytes(1 << 24))
REFUSED = ServerRefused
NOT_READY = ServerUnavailable


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (httpx.ConnectError("Connection refused"), NOT_READY, "cannot be reached (Connection refused)"),
        (httpx.ConnectTimeout("no route"), NOT_READY, "cannot be reached (no route)"),
        (httpx.ReadError("gone"), NOT_READY, "cannot be reached (gone)"),
        (TimeoutError(), NOT_READY, "did not say within 15 s"),
        (httpx.Response(503, text="loading"), NOT_READY, "the server answered 503: loading"),
        (httpx.Response(429), NOT_READY, "the server answered 429"),
        (httpx.Response(404), REFUSED, "(it has no /server_info)"),
        (httpx.Response(200, text="<html>Hello</html>"), REFUSED, "(/server_info is a page of HTML)"),
        (httpx.Response(200, text="\n<!DOCTYPE html>"), REFUSED, "(/server_info is a page of HTML)"),
        (httpx.Response(200, headers={"content-type": "application/json"}), REFUSED, "is no JSON object"),
        (httpx.Response(200, content=b"\xff\xfe"), REFUSED, "is no JSON object"),
        (httpx.Response(200, text="[" * 100_000), REFUSED, "is no JSON object"),
        (httpx.Response(200, json=[INFO]), REFUSED, "is no JSON object"),
        (httpx.Response(200, json={"vllm_config": {}}), REFUSED, "is JSON of another kind"),
        (httpx.Response(200, stream=httpx.ByteStream(BOMB)), REFUSED, "is compressed (gzip)"),
        (httpx.Response(302, headers={"location": "/login"}), REFUSED, "is a redirect, 302, to another address"),
        (httpx.Response(401, json={"error": "Unauthorized"}), REFUSED, "wants an API key (401)"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(answer: Any, kind: type[ServerUnavailable], words: str) -> None:
    message = unusable(server({"/server_info": answer}), kind=kind)
    assert URL in message
    assert words in message


def test_a_wrong_content_type_is_no_fault() -> None:
    plain = httpx.Response(200, content=json.dumps(INFO), headers={"content-type": "text/html"})
    assert facts_of(server({"/server_info": plain})).version == "0.5.23"


@pytest.mark.parametrize("path", ["/server_info", "/model_info", "/v1/models", "/workers"])
def test_an_answer_without_an_end_is_cut_off(path: str) -> None:
    message = unusable(server(paths_of() | {path: httpx.Response(200, content=no_end())}))
    assert f"{path} does not end within {MOST_BYTES >> 20} MiB" in message


def test_a_key_that_is_refused_is_not_repeated() -> None:
    with pytest.raises(ServerRefused, match=r"refuses the API key \(403\)") as caught:
        facts_of(server({"/server_info": httpx.Response(403)}), "sesame")
    assert "sesame" not in str(caught.value)


def test_a_server_that_is_away_is_a_warning_while_another_answers() -> None:
    two = "http://two:30000"
    servers, warnings = preflight([two, URL], no_key, several({"one": paths_of(version="0.5.13")}))
    assert [facts.url for facts in servers] == [URL]
    away, known = warnings
    assert away.startswith(f"{two} cannot be reached (Connection refused); ")
    assert f"{URL}: SGLang 0.5.13: an abort" in known


def test_when_all_are_away_each_is_named() -> None:
    with pytest.raises(ServerUnavailable) as caught:
        preflight([URL, "http://two:30000"], no_key, several({}))
    assert type(caught.value) is ServerUnavailable
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [URL, "http://two:30000"]


def test_a_server_that_is_refused_ends_it_although_another_answers() -> None:
    hosts = {"one": paths_of(), "two": paths_of(version="0.5.2")}
    assert "http://two:30000 runs SGLang 0.5.2" in unusable(several(hosts), URL, "http://two:30000", "http://three:1")


def test_a_warning_about_several_servers_is_said_once() -> None:
    hosts = {"one": paths_of(version="0.5.19"), "two": paths_of(version="0.5.19")}
    _, warnings = preflight([URL, "http://two:30000"], no_key, several(hosts))
    (sentence,) = warnings
    assert sentence.startswith(f"{URL}, http://two:30000: SGLang 0.5.19: ")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/model_info", {"model_path": "models/a", "weight_version": "v2"}),
        ("/server_info", INFO | {"model_path": "models/b"}),
    ],
)
def test_servers_that_differ_are_refused(path: str, what: dict[str, Any]) -> None:
    hosts = {"one": paths_of(), "two": paths_of() | {path: what}, "three": paths_of()}
    servers, _ = preflight([URL, "http://three:30000"], no_key, several(hosts))
    assert len(servers) == 2
    message = unusable(several(hosts), URL, "http://two:30000")
    assert URL in message
    assert "http://two:30000" in message
