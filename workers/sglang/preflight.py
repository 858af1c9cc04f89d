"""What a server is, asked before work is sent to it, and whether it can be used at all."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from common.errors import ServerUnavailable
from workers.sglang.answer import refusal

# /server_info asks the scheduler, which answers between two steps, and not at all when it hangs.
ANSWER_SECONDS = 15.0
MOST_BYTES = 16 << 20
# The first release whose output_ids are right with a tokenizer in the server (sgl-project/sglang#12628).
FIRST_GOOD = (0, 5, 5)
FIRST_WITH_OUTPUT_IDS = (0, 5, 1)
CONNECT_SECONDS = 5.0

Shape = TypeVar("Shape")


class ServerFacts(msgspec.Struct, frozen=True):
    """What one server says of itself; None where it does not say. The API key, which it also says, is left out."""

    url: str
    version: str | None
    model_path: str | None
    tokenizer_path: str | None
    served_model_name: str | None
    weight_version: str | None
    context_length: int | None  # tokens, prompt and answer together
    max_req_input_len: int | None  # tokens; a prompt must be shorter
    max_total_num_tokens: int | None  # tokens in the KV pool of one data-parallel rank
    max_running_requests: int | None  # of one data-parallel rank
    max_queued_requests: int | None  # of one data-parallel rank; None: no limit
    dp_size: int
    kv_cache_dtype: str | None
    reasoning_parser: str | None
    skip_tokenizer_init: bool
    allow_auto_truncate: bool


class _InternalState(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None


class _ServerInfo(msgspec.Struct):
    version: str | None = None
    model_path: str | None = None
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    weight_version: str | None = None
    context_length: int | None = None
    max_req_input_len: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    dp_size: int | None = None
    kv_cache_dtype: str | None = None
    reasoning_parser: str | None = None
    skip_tokenizer_init: bool = False
    allow_auto_truncate: bool = False
    internal_states: list[_InternalState] = []


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    weight_version: str | None = None


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def preflight(
    urls: Sequence[str], api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
) -> list[ServerFacts]:
    """The facts of every server, in order; raises ServerUnavailable if one cannot be used, or they differ.

    `transport` stands in for the network in tests.
    """

    async def all_facts() -> list[ServerFacts]:
        return await asyncio.gather(*(read_facts(url, api_key, transport) for url in urls))

    facts = asyncio.run(all_facts())
    for server in facts:
        _refuse_version(server)
    for server in facts[1:]:
        _refuse_difference(facts[0], server)
    return facts


def facts_as_dicts(servers: Sequence[ServerFacts]) -> list[dict[str, Any]]:
    """The facts under their names, for run.json and the ledger."""
    return [msgspec.structs.asdict(server) for server in servers]


async def read_facts(url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None) -> ServerFacts:
    """Ask one server; raises ServerUnavailable if it does not answer as SGLang does."""
    url = url.rstrip("/")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Timeout(None, connect=CONNECT_SECONDS)
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            httpx.AsyncClient(transport=transport, headers=headers, timeout=limits, trust_env=False) as client,
        ):
            info = await _ask(client, url, ("/server_info", "/get_server_info"), _ServerInfo)
            if info is None or (info.version is None and info.max_total_num_tokens is None):
                raise ServerUnavailable(
                    f"{url} answers, but not as SGLang does (no /server_info); correct the address in [server] urls"
                )
            model = await _ask(client, url, ("/model_info", "/get_model_info"), _ModelInfo) or _ModelInfo()
            models = await _ask(client, url, ("/v1/models",), _Models) or _Models()
    except TimeoutError:
        raise ServerUnavailable(
            f"{url} takes connections but did not say within {ANSWER_SECONDS:.0f} s what it is; "
            "wait until it has loaded its model, or restart it if it hangs"
        ) from None
    except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
        raise ServerUnavailable(
            f"{url} cannot be reached ({str(error) or type(error).__name__}); "
            "start the server there, or correct the address in [server] urls"
        ) from None
    return _facts(url, info, model, models)


async def _ask(client: httpx.AsyncClient, url: str, paths: tuple[str, ...], shape: type[Shape]) -> Shape | None:
    """What the first of `paths` that this release has says; None if it has none, or says something else there."""
    for path in paths:
        status, body = await _get(client, url + path)
        if status in {401, 403}:
            raise ServerUnavailable(
                f"{url} refuses the API key ({status}); set it with TOKENMILL_SERVER__API_KEY or [server] api_key_file"
            )
        if status >= 500:
            raise ServerUnavailable(
                f"{url}{path}: {refusal(status, body).detail}; wait until the server is ready, or restart it"
            )
        if status == 200:
            try:
                return msgspec.json.decode(body, type=shape)
            except (msgspec.DecodeError, RecursionError):
                return None
    return None


async def _get(client: httpx.AsyncClient, url: str) -> tuple[int, bytes]:
    async with client.stream("GET", url) as response:
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_BYTES:
                break  # cut off, it is no JSON
        return response.status_code, body


def _facts(url: str, info: _ServerInfo, model: _ModelInfo, models: _Models) -> ServerFacts:
    # context_length is null unless it was set at launch; /v1/models has what the model's own configuration says.
    served = next((entry.max_model_len for entry in models.data if entry.max_model_len), None)
    effective = next((state.effective_max_running_requests_per_dp for state in info.internal_states), None)
    return ServerFacts(
        url=url,
        version=info.version,
        model_path=info.model_path or model.model_path,
        tokenizer_path=info.tokenizer_path,
        served_model_name=info.served_model_name,
        # /update_weights changes the one in /model_info; the launch arguments in /server_info may be older.
        weight_version=model.weight_version or info.weight_version,
        context_length=info.context_length or served,
        max_req_input_len=info.max_req_input_len,
        max_total_num_tokens=info.max_total_num_tokens,
        max_running_requests=effective or info.max_running_requests,
        max_queued_requests=info.max_queued_requests,
        dp_size=info.dp_size or 1,
        kv_cache_dtype=info.kv_cache_dtype,
        reasoning_parser=info.reasoning_parser,
        skip_tokenizer_init=info.skip_tokenizer_init,
        allow_auto_truncate=info.allow_auto_truncate,
    )


def _refuse_version(server: ServerFacts) -> None:
    """Raises ServerUnavailable for a release whose output_ids are absent or wrong (sglang_protocol, section 1.3)."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", server.version or "")
    release = tuple(int(number) for number in numbers.groups()) if numbers else (0, 0, 0)
    # A build from source without tags calls itself 0.0.0; what it answers is checked like any other's.
    if release == (0, 0, 0) or release >= FIRST_GOOD or server.skip_tokenizer_init:
        return
    fault = (
        "returns text without output_ids"
        if release < FIRST_WITH_OUTPUT_IDS
        else "puts ids of the prompt into output_ids (fixed in 0.5.5)"
    )
    raise ServerUnavailable(
        f"{server.url} runs SGLang {server.version}, which {fault}; "
        "upgrade it to 0.5.5 or later, or start it with --skip-tokenizer-init"
    )


def _refuse_difference(first: ServerFacts, other: ServerFacts) -> None:
    for what, one, two in (
        ("model", first.model_path, other.model_path),
        ("weight version", first.weight_version, other.weight_version),
    ):
        if one != two:
            raise ServerUnavailable(
                f"{first.url} serves {what} {one!r} and {other.url} {two!r}; "
                "all [server] urls of a run must serve the same model and weights"
            )
