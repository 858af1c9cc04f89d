"""Checks of what a server says of itself: each is a function of one server's facts that yields findings."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from workers.doctor.found import Found
from workers.doctor.of_tokenizer import fp8_kv_file
from workers.doctor.report import Said
from workers.sglang.preflight import ServerFacts, named_warnings, refusals_of

ServerCheck = Callable[[ServerFacts, Found], Iterator[Said]]


def _warned(name: str, server: ServerFacts) -> list[Said]:
    return [Said.of("warning", sentence) for of, sentence in named_warnings(server) if of == name]


def _release(server: ServerFacts, found: Found) -> Iterator[Said]:
    yield from (
        Said.of("wrong", str(error).removeprefix(f"{server.url} "))
        for error in refusals_of(found.servers)
        if str(error).startswith(f"{server.url} runs ")
    )
    known = _warned("release", server)
    yield from known
    if not known:
        version = f"SGLang {server.version}" if server.version else "it does not say which SGLang it is"
        yield Said("ok", f"{version}; no fault of it is known" if server.version else version)


def _model(server: ServerFacts, found: Found) -> Iterator[Said]:
    wrong = [
        Said.of("wrong", str(error).removeprefix(f"{server.url} "))
        for error in refusals_of(found.servers)
        if str(error).startswith(f"{server.url} serves ")
    ]
    yield from wrong or [Said("ok", f"{_or_unsaid(server.model_path)}, weights {_or_unsaid(server.weight_version)}")]


def _context(server: ServerFacts, found: Found) -> Iterator[Said]:
    length = found.settings.server.context_length or server.context_length
    if length is None:
        yield Said("ok", "it does not say how long its context is")
        return
    short = False
    for asked, where in dict.fromkeys(found.asked(cut=False)):
        if asked >= length:
            short = True
            yield Said(
                "wrong",
                f"it has a context of {length:,} tokens, where max_new_tokens {asked:,} leaves no room for a prompt",
                f"lower {where}, or start it with a longer --context-length",
            )
    asked, _ = found.most_asked
    if not short:
        yield Said("ok", f"{length:,} tokens: prompts of up to {max(length - asked, 0):,} beside the longest answers")


def _kv_pool(server: ServerFacts, found: Found) -> Iterator[Said]:
    pool = server.max_total_num_tokens
    if pool is None:
        yield Said("ok", "it does not say how large its KV pool is")
        return
    asked, where = found.most_asked
    each = f" on each of {server.dp_size} ranks" if server.dp_size > 1 else ""
    if asked >= pool:
        yield Said(
            "warning",
            f"it has a KV pool of {pool:,} tokens and cuts off answers that do not fit, which may have {asked:,} here",
            f"lower {where}, or start it with more memory for its KV pool",
        )
        return
    yield Said("ok", f"{pool:,} tokens{each}: {_carried(server, pool, asked)}")


def _carried(server: ServerFacts, pool: int, asked: int) -> str:
    """What a pool carries: at worst answers of full length, at best as many as may run."""
    full = max(1, pool // asked) * server.dp_size
    half = max(1, pool // max(asked // 2, 1)) * server.dp_size
    runs = (server.max_running_requests or half) * server.dp_size
    limit = f", and it runs {runs:,} at most" if runs < half else ""
    return f"{full:,} answers of {asked:,} tokens in flight, or {half:,} of half that{limit}"


def _kv_cache_dtype(server: ServerFacts, found: Found) -> Iterator[Said]:
    if warned := _warned("kv_cache_dtype", server):
        yield from warned
    elif server.kv_cache_dtype in (None, "auto") and (name := fp8_kv_file(found.settings.tokenizer.path)):
        yield Said(
            "warning",
            f"kv_cache_dtype is {server.kv_cache_dtype or 'not told'}, and {name} beside the tokenizer asks for fp8 "
            "then, which can make the model's answers worse than its weights are",
            "start it with --kv-cache-dtype bfloat16 if the data shall be the model's best",
        )
    else:
        yield Said("ok", _or_unsaid(server.kv_cache_dtype))


def _quantization(server: ServerFacts, _: Found) -> Iterator[Said]:
    if server.quantization is None:
        yield Said("ok", "none set at launch: the weights are used as their files have them")
    else:
        yield Said("ok", f"{server.quantization}: the answers are those of the quantized model, as its users get them")


def _hierarchical_cache(server: ServerFacts, _: Found) -> Iterator[Said]:
    if not server.hicache:
        yield Said("ok", "off")
        return
    ranks = server.ranks_a_host
    size, how = server.hicache_gb, "--hicache-size"
    if size is None and server.hicache_ratio is not None and server.kv_gb is not None:
        size, how = server.hicache_ratio * server.kv_gb, f"--hicache-ratio {server.hicache_ratio:g}"
    if size is None:
        times = "" if server.hicache_ratio is None else f", {server.hicache_ratio:g} times as large as its KV pool"
        yield Said("ok", f"on, on each of {ranks} ranks of a host{times}; how many GB that is it does not say")
        return
    total = f"{size:,.0f} GB" if ranks == 1 else f"{size:,.0f} GB on each of {ranks} ranks, {size * ranks:,.0f} GB"
    if ranks == 1:
        yield Said("ok", f"{total} of the host's memory ({how})")
    else:
        yield Said(
            "warning",
            f"{how} is per rank: {total} of a host's memory in all",
            f"see that this is meant, or start it with {size / ranks:,.0f} GB (--hicache-size) for {size:,.0f} in all",
        )


def _auto_truncate(server: ServerFacts, _: Found) -> Iterator[Said]:
    yield from _warned("auto_truncate", server) or [Said("ok", "off: a prompt that is too long is refused")]


def _parsers(server: ServerFacts, _: Found) -> Iterator[Said]:
    given = [
        f"{name} {value}"
        for name, value in (
            ("reasoning_parser", server.reasoning_parser),
            ("tool_call_parser", server.tool_call_parser),
        )
        if value
    ]
    if given:
        yield Said("ok", f"{', '.join(given)}: harmless, /generate answers with ids and no parser touches them")
    else:
        yield Said("ok", "none; none is needed, since reasoning and tool calls are read from the ids")


def _preferred_sampling(server: ServerFacts, _: Found) -> Iterator[Said]:
    yield from _warned("preferred_sampling", server)


def _router(server: ServerFacts, _: Found) -> Iterator[Said]:
    yield from _warned("router", server)


def _aborts(server: ServerFacts, _: Found) -> Iterator[Said]:
    yield from _warned("aborts", server)


def _vocabulary(server: ServerFacts, found: Found) -> Iterator[Said]:
    if found.tokenizer is None:
        return
    ours = found.tokenizer.vocab_size
    if server.vocab_size is not None and server.vocab_size != ours:
        yield Said(
            "warning",
            f"it knows {server.vocab_size:,} ids and the tokenizer in {found.settings.tokenizer.path} {ours:,}; "
            "none above the smaller number is sent",
            "see that [tokenizer] path is this model's own folder",
        )
    elif server.vocab_size is not None:
        yield Said("ok", f"{ours:,} ids on both sides")
    else:
        yield Said("ok", f"{ours:,} ids by the tokenizer's files; the server does not say how many it knows")


def _or_unsaid(value: str | None) -> str:
    return "(it does not say)" if value is None else value


SERVER_CHECKS: Mapping[str, ServerCheck] = MappingProxyType(
    {
        "release": _release,
        "model": _model,
        "vocabulary": _vocabulary,
        "context": _context,
        "kv_pool": _kv_pool,
        "kv_cache_dtype": _kv_cache_dtype,
        "quantization": _quantization,
        "hierarchical_cache": _hierarchical_cache,
        "auto_truncate": _auto_truncate,
        "parsers": _parsers,
        "preferred_sampling": _preferred_sampling,
        "router": _router,
        "aborts": _aborts,
    }
)
