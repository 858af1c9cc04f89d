"""What a server is, asked before work is sent to it, and whether it can be used at all."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from common.errors import ServerRefused, ServerUnavailable
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.inquiry import Inquiry, cause

# /server_info asks the scheduler, which answers between two steps, and not at all when it hangs.
ANSWER_SECONDS = 15.0
# What a server says goes to terminals and into run.json.
MOST_CHARACTERS = 1000

Release = tuple[int, int, int]
FIRST_WITH_OUTPUT_IDS: Release = (0, 5, 1)
# The first release whose output_ids are right with a tokenizer in the server (sgl-project/sglang#12628).
FIRST_GOOD: Release = (0, 5, 5)
# The first release whose streams repeat the ids from the start unless told otherwise.
FIRST_CUMULATIVE: Release = (0, 5, 6)


class KnownFault(NamedTuple):
    """What the releases from `first` to `last` do to a client that does not stream, and uses no rid twice."""

    first: Release
    last: Release
    sentence: str


KNOWN_FAULTS = (
    KnownFault(  # sgl-project/sglang#19881
        (0, 0, 1),
        (0, 5, 9),
        "when its KV pool runs full, the whole server dies with all that it is at; "
        "upgrade it to 0.5.10 or later, or send it fewer requests at once",
    ),
    KnownFault(  # sgl-project/sglang#21173, #28341
        (0, 0, 1),
        (0, 5, 13),
        "an abort that meets the end of its request kills the whole server; "
        "upgrade it to 0.5.14 or later, or leave timeouts and drains long, so that little is aborted",
    ),
    KnownFault(  # sgl-project/sglang#36333, #37833
        (0, 5, 18),
        (0, 5, 19),
        "a stream that its client has left goes on as a ghost to its last token, and holds a slot and KV tokens; "
        "tokenmill does not stream, but others on this server may; upgrade it to 0.5.20 or later",
    ),
)


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one server says of itself; None where it does not say. The API keys, which it also says, are left out."""

    url: str
    version: str | None
    model_path: str | None
    tokenizer_path: str | None
    served_model_name: str | None
    weight_version: str | None
    context_length: int | None  # tokens, prompt and answer together
    max_req_input_len: int | None  # tokens; a prompt must be shorter
    vocab_size: int | None  # ids that the model knows; SGLang itself, up to 0.5.23, does not say
    max_total_num_tokens: int | None  # tokens in the KV pool of one data-parallel rank
    max_running_requests: int | None  # of one data-parallel rank
    max_queued_requests: int | None  # of one data-parallel rank; None: no limit
    dp_size: int
    kv_cache_dtype: str | None
    reasoning_parser: str | None
    preferred_sampling_params: str | None  # JSON; they stand for parameters that a request leaves out
    skip_tokenizer_init: bool
    allow_auto_truncate: bool
    stream_mode: Literal["cumulative", "delta"] | None  # what the output_ids in an event of a stream are
    router: bool  # SGLang's router (model gateway), with servers behind it
    takes_aborts: bool  # whether /abort_request does anything for the key that is used
    tool_call_parser: str | None = None
    quantization: str | None = None  # None: the weights are as they are, or the server does not say
    tp_size: int = 1
    ranks_a_host: int = 1  # processes that each have a hicache of their own
    hicache: bool = False  # KV of what has ended is kept in the memory of the host
    hicache_gb: float | None = None  # of one rank, decimal
    hicache_ratio: float | None = None  # to the KV pool of its rank, where hicache_gb is not set
    kv_gb: float | None = None  # what the KV pool of one rank takes


def preflight(
    urls: Sequence[str], api_key_of: Callable[[str], str | None], http: Http | None = None
) -> tuple[list[ServerFacts], list[str]]:
    """The facts of the servers that answer, in order, and warnings: one sentence each.

    A server that cannot be reached is a warning while another can be used. Raises ServerUnavailable if none answers,
    and ServerRefused if one must not be used, or serves another model than the first. `http` stands in for the
    network in tests.
    """
    servers, failures = asyncio.run(ask_all(urls, api_key_of, http))
    refusals = [failure for failure in failures if isinstance(failure, ServerRefused)] or list(refusals_of(servers))
    if refusals:
        raise ServerRefused("\n".join(map(str, refusals)))
    sentences = [str(failure) for failure in failures]
    if not servers:
        raise ServerUnavailable("\n".join(sentences))
    return servers, sentences + shared_warnings(servers)


async def ask_all(
    urls: Sequence[str], api_key_of: Callable[[str], str | None], http: Http | None = None
) -> tuple[list[ServerFacts], list[ServerUnavailable]]:
    """The facts of those that answer and can be read, and why the others cannot; all are asked at once."""
    keys = [api_key_of(url) for url in urls]
    network = http or AiohttpHttp(len(urls))

    async def ask(url: str, key: str | None) -> ServerFacts | ServerUnavailable:
        try:
            return await read_facts(url, key, network)
        except ServerUnavailable as error:
            return error

    try:
        told = await asyncio.gather(*(ask(url, key) for url, key in zip(urls, keys, strict=True)))
    finally:
        if http is None:
            await network.aclose()
    return (
        [each for each in told if isinstance(each, ServerFacts)],
        [each for each in told if isinstance(each, ServerUnavailable)],
    )


async def read_facts(url: str, api_key: str | None, http: Http) -> ServerFacts:
    """Ask one server.

    Raises ServerUnavailable if it cannot be reached or is not ready, which time may cure, and ServerRefused if it
    refuses the key or is no SGLang, which only a person can.
    """
    server = Inquiry(url.rstrip("/"), api_key, http)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            info = await server.info()
            model = await server.told("/model_info", "/get_model_info")
            models = await server.told("/v1/models")
            router = await server.is_router()
    except aiohttp.ClientResponseError as error:  # of a whole response that is no HTTP
        raise ServerRefused(
            f"{server.url} does not answer in HTTP ({cause(error)}); correct the address in [server] urls"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            raise ServerUnavailable(
                f"{server.url} takes connections but did not say within {ANSWER_SECONDS:.0f} s what it is; "
                "wait until it has loaded its model, or restart it if it hangs"
            ) from None
        raise ServerUnavailable(
            f"{server.url} cannot be reached ({cause(error)}); "
            "start the server there, or correct the address in [server] urls"
        ) from None
    return _facts(server, info, model, models, router=router)


def _facts(
    server: Inquiry, info: Mapping[str, Any], model: Mapping[str, Any], models: Mapping[str, Any], *, router: bool
) -> ServerFacts:
    ranks = [rank for rank in _list(info, "internal_states") if isinstance(rank, dict)]
    served = [entry for entry in _list(models, "data") if isinstance(entry, dict)]
    # context_length is null unless it was set at launch; /v1/models has what the model's own configuration says.
    context = _count(info, "context_length") or _first(_count(entry, "max_model_len") for entry in served)
    running = _first(_count(rank, "effective_max_running_requests_per_dp") for rank in ranks)
    preferred = info.get("preferred_sampling_params") or model.get("preferred_sampling_params")
    admin_key = info.get("admin_api_key")
    memory = next((rank["memory_usage"] for rank in ranks if isinstance(rank.get("memory_usage"), dict)), None)
    return ServerFacts(
        url=server.url,
        version=_text(info, "version"),
        model_path=_text(info, "model_path") or _text(model, "model_path"),
        tokenizer_path=_text(info, "tokenizer_path"),
        served_model_name=_text(info, "served_model_name"),
        # /update_weights changes the one in /model_info; the launch arguments in /server_info may be older.
        weight_version=_text(model, "weight_version") or _text(info, "weight_version"),
        context_length=context,
        max_req_input_len=_count(info, "max_req_input_len"),
        vocab_size=_count(info, "vocab_size") or _count(model, "vocab_size"),
        max_total_num_tokens=_count(info, "max_total_num_tokens"),
        max_running_requests=running or _count(info, "max_running_requests"),
        max_queued_requests=_count(info, "max_queued_requests"),
        dp_size=_count(info, "dp_size") or 1,
        kv_cache_dtype=_text(info, "kv_cache_dtype"),
        reasoning_parser=_text(info, "reasoning_parser"),
        preferred_sampling_params=msgspec.json.encode(preferred).decode()[:MOST_CHARACTERS] if preferred else None,
        skip_tokenizer_init=info.get("skip_tokenizer_init") is True,
        allow_auto_truncate=info.get("allow_auto_truncate") is True,
        stream_mode=_stream_mode(info),
        router=router,
        # Where an admin key is set, /abort_request takes that one alone.
        takes_aborts=not router and (not admin_key or admin_key == server.api_key),
        tool_call_parser=_text(info, "tool_call_parser"),
        quantization=_text(info, "quantization"),
        tp_size=_count(info, "tp_size") or 1,
        ranks_a_host=_ranks_a_host(info),
        hicache=info.get("enable_hierarchical_cache") is True,
        hicache_gb=_amount(info, "hicache_size"),
        hicache_ratio=_amount(info, "hicache_ratio") if info.get("enable_hierarchical_cache") is True else None,
        kv_gb=_amount(memory or {}, "kvcache"),
    )


def _ranks_a_host(info: Mapping[str, Any]) -> int:
    """With DP attention the data-parallel ranks are among those of tensor parallelism; else each has its own."""
    ranks = (_count(info, "tp_size") or 1) * (_count(info, "pp_size") or 1)
    if info.get("enable_dp_attention") is not True:
        ranks *= _count(info, "dp_size") or 1
    return -(-ranks // (_count(info, "nnodes") or 1))


def _stream_mode(info: Mapping[str, Any]) -> Literal["cumulative", "delta"] | None:
    """Set by a flag that was renamed in 0.5.10, which 0.5.1 to 0.5.5 heed only without a tokenizer."""
    flags = [info.get("incremental_streaming_output"), info.get("stream_output")]
    release = release_of(_text(info, "version"))
    if release and FIRST_WITH_OUTPUT_IDS <= release < FIRST_CUMULATIVE and info.get("skip_tokenizer_init") is not True:
        return "delta"
    if flags == [None, None]:
        return None
    return "delta" if True in flags else "cumulative"


def _text(told: Mapping[str, Any], name: str) -> str | None:
    value = told.get(name)
    return value if isinstance(value, str) and value.isprintable() and len(value) <= MOST_CHARACTERS else None


def _count(told: Mapping[str, Any], name: str) -> int | None:
    """A number above 0 that every reader of JSON keeps exact."""
    value = told.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else None


def _amount(told: Mapping[str, Any], name: str) -> float | None:
    """A number above 0 that may have a fraction."""
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        return None
    return float(value)


def _list(told: Mapping[str, Any], name: str) -> list[Any]:
    value = told.get(name)
    return value if isinstance(value, list) else []


def _first(counts: Iterator[int | None]) -> int | None:
    return next((count for count in counts if count is not None), None)


def release_of(version: str | None) -> Release | None:
    """`0.5.5.post3` as (0, 5, 5); None for what has no release: a build from source without tags is 0.0.0."""
    numbers = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version or "")
    release = (int(numbers[1]), int(numbers[2]), int(numbers[3])) if numbers else (0, 0, 0)
    return release if release > (0, 0, 0) else None


def refuse(facts: ServerFacts) -> None:
    """Raises ServerRefused for a release whose output_ids are absent or wrong (with a tokenizer in the server)."""
    release = release_of(facts.version)
    # What answers an unknown release gives is checked like any other's.
    if release is None or release >= FIRST_GOOD or facts.skip_tokenizer_init:
        return
    fault = (
        "returns text without output_ids"
        if release < FIRST_WITH_OUTPUT_IDS
        else "puts ids of the prompt into output_ids (fixed in 0.5.5)"
    )
    raise ServerRefused(
        f"{facts.url} runs SGLang {facts.version}, which {fault}; "
        "upgrade it to 0.5.5 or later, or start it with --skip-tokenizer-init"
    )


def refuse_other_model(facts: ServerFacts, model: Mapping[str, Any], of: str = "this run") -> None:
    """Raises ServerRefused if the server's model_path or weight_version is not that of `model`, where it has one."""
    for name, what, own in (
        ("model_path", "model", facts.model_path),
        ("weight_version", "weight version", facts.weight_version),
    ):
        if name in model and model[name] != own:
            raise ServerRefused(
                f"{facts.url} serves {what} {own!r} and {of} {model[name]!r}; "
                "all servers of a run must serve the same model and weights"
            )


def refusals_of(servers: Sequence[ServerFacts]) -> Iterator[ServerRefused]:
    """Why servers that answer must not be used together, at most once for each; the first says which model it is."""
    for facts in servers:
        try:
            refuse(facts)
            first = servers[0]
            model = {"model_path": first.model_path, "weight_version": first.weight_version}
            refuse_other_model(facts, model, of=first.url)
        except ServerRefused as refused:
            yield refused


def warnings_of(facts: ServerFacts) -> list[str]:
    """What is known to go wrong with a server that can be used: one sentence each, with its address before it."""
    return [f"{facts.url}: {sentence}" for _, sentence in named_warnings(facts)]


def shared_warnings(servers: Sequence[ServerFacts]) -> list[str]:
    """The warnings of all servers, each said once, with the addresses that it is about."""
    urls: dict[str, list[str]] = {}
    for facts in servers:
        for _, sentence in named_warnings(facts):
            urls.setdefault(sentence, []).append(facts.url)
    return [f"{', '.join(of)}: {sentence}" for sentence, of in urls.items()]


def named_warnings(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    """The same as (name of the check in `doctor`, sentence); a sentence ends with what to do, behind a semicolon."""
    release = release_of(facts.version)
    for fault in KNOWN_FAULTS:
        if release is not None and fault.first <= release <= fault.last:
            yield "release", f"SGLang {facts.version}: {fault.sentence}"
    if facts.allow_auto_truncate:
        yield (
            "auto_truncate",
            (
                "allow_auto_truncate is on, so it cuts prompts that are too long, and tokenmill rejects their answers; "
                "start it without --allow-auto-truncate"
            ),
        )
    # Also mxfp8, nvfp4 and fp4_mx_block16.
    if facts.kv_cache_dtype is not None and any(one in facts.kv_cache_dtype for one in ("fp8", "fp4", "int8", "int4")):
        yield (
            "kv_cache_dtype",
            (
                f"kv_cache_dtype is {facts.kv_cache_dtype}, which can make the model's answers worse than its weights "
                "are; start it without --kv-cache-dtype if the data shall be the model's best"
            ),
        )
    if facts.preferred_sampling_params is not None:
        yield (
            "preferred_sampling",
            (
                f"its preferred_sampling_params {facts.preferred_sampling_params} stand for what [sampling] does not "
                "set; set these there too, or start it without --preferred-sampling-params"
            ),
        )
    if facts.router:
        yield (
            "router",
            (
                "this is a router: it cannot abort, its /health says only that itself lives, it may make an answer "
                "twice when it retries, and it drops sampling parameters without a word, logit_bias among them; "
                "name the servers behind it in [server] urls instead"
            ),
        )
    elif not facts.takes_aborts:
        yield (
            "aborts",
            (
                "it takes aborts only with its admin key, so what is given up there goes on to its last token; "
                "start it without --admin-api-key"
            ),
        )
