"""What the servers really are, and what is wrong with them and with what is asked of them.

A check is one function of what was found that yields sentences; it stands in WARNINGS if the work can be done all the
same, and in REFUSALS if it cannot.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.errors import TokenizerUnavailable, UnavailableError
from common.settings import Settings
from common.special_ids import SpecialIds
from workers.sglang.http import Http
from workers.sglang.preflight import ServerFacts, ask_all, refusals_of, shared_warnings


class Found(msgspec.Struct, frozen=True):
    """What the checks look at."""

    settings: Settings
    servers: list[ServerFacts]  # those that answered
    tokenizer: Tokenizer | None  # None if it does not load
    failures: list[UnavailableError]  # why what is missing here is missing


class Report(msgspec.Struct, frozen=True):
    """What `doctor` says; all can be used if there are no refusals."""

    servers: list[ServerFacts]
    special_ids: SpecialIds | None  # of the tokenizer: the tokens that steer an answer; None if it does not load
    warnings: list[str]
    refusals: list[str]


Check = Callable[[Found], Iterable[str]]


def examine(settings: Settings, http: Http | None = None) -> Report:
    """Ask every configured server, and check what is found. `http` stands in for the network in tests."""
    servers, unavailable = asyncio.run(ask_all(settings.server.urls, settings.api_key_of, http))
    failures: list[UnavailableError] = list(unavailable)
    tokenizer = None
    try:
        tokenizer = Tokenizer(settings.tokenizer)
    except TokenizerUnavailable as error:
        failures.append(error)
    found = Found(settings, servers, tokenizer, failures)
    return Report(
        servers,
        special_ids=tokenizer.special_ids if tokenizer else None,
        warnings=[sentence for check in WARNINGS for sentence in check(found)],
        refusals=[sentence for check in REFUSALS for sentence in check(found)],
    )


def known_faults(found: Found) -> Iterable[str]:
    """What is known of the servers' releases and launch arguments."""
    return shared_warnings(found.servers)


def vocabulary(found: Found) -> Iterator[str]:
    """Where the tokenizer's vocabulary and a server's differ; an id that a server does not know kills it."""
    if found.tokenizer is None:
        return
    ours = found.tokenizer.vocab_size
    for server in found.servers:
        if server.vocab_size is not None and server.vocab_size != ours:
            yield (
                f"{server.url} knows {server.vocab_size:,} ids and the tokenizer in {found.settings.tokenizer.path} "
                f"{ours:,}; none above the smaller number is sent; see that [tokenizer] path is this model's own folder"
            )


def pool(found: Found) -> Iterator[str]:
    """Answers that the KV pool is too small for; the server ends them early without a word."""
    asked, where = _most_asked(found.settings)
    for server in found.servers:
        if server.max_total_num_tokens is not None and asked >= server.max_total_num_tokens:
            yield (
                f"{server.url} has a KV pool of {server.max_total_num_tokens:,} tokens and cuts off answers that do "
                f"not fit, which may have {asked:,} here; lower {where}"
            )


def missing(found: Found) -> Iterator[str]:
    """What cannot be reached or read, and servers that refuse to be asked."""
    return map(str, found.failures)


def unusable(found: Found) -> Iterator[str]:
    """Releases whose ids are wrong, and servers of another model than the first."""
    return map(str, refusals_of(found.servers))


def context(found: Found) -> Iterator[str]:
    """A context that leaves no room for a prompt."""
    asked, where = _most_asked(found.settings)
    for server in found.servers:
        length = found.settings.server.context_length or server.context_length
        if length is not None and asked >= length:
            yield (
                f"{server.url} has a context of {length:,} tokens, where max_new_tokens {asked:,} leaves no room for a "
                f"prompt; lower {where}, or start it with a longer --context-length"
            )


def template(found: Found) -> Iterable[str]:
    """What the tokenizer's files do not say alike, and arguments of the template that change nothing."""
    if found.tokenizer is None:
        return []
    unread = (found.tokenizer.unread(dataset) for dataset in found.settings.datasets)
    return [*found.tokenizer.warnings, *(sentence for sentences in unread for sentence in sentences)]


def _most_asked(settings: Settings) -> tuple[int, str]:
    """The largest max_new_tokens of any dataset, and where it is configured."""
    asked = [
        (settings.sampling_of(one).max_new_tokens, f"max_new_tokens of {one.name}")
        for one in settings.datasets
        if one.max_new_tokens is not None
    ]
    if len(asked) < len(settings.datasets) or not asked:
        asked.append((settings.sampling.max_new_tokens, "[sampling] max_new_tokens"))
    return max(asked)


WARNINGS: tuple[Check, ...] = (known_faults, vocabulary, pool, template)
REFUSALS: tuple[Check, ...] = (missing, unusable, context)


def lines(report: Report) -> Iterator[str]:
    """The report as a person reads it: servers that say the same share a table; then warnings, then refusals."""
    tables: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for server in report.servers:
        tables.setdefault(_table(server), []).append(server.url)
    for rows, urls in tables.items():
        yield from urls
        yield from (f"  {name:<15} {value}" for name, value in rows)
        yield ""
    if report.special_ids is not None:
        yield "special ids of the tokenizer"
        yield from (f"  {name:<15} {value}" for name, value in _special(report.special_ids))
        yield ""
    yield from (f"warning: {sentence}" for sentence in report.warnings)
    yield from (f"cannot be used: {sentence}" for sentence in report.refusals)
    if not report.refusals:
        count = len(report.servers)
        yield "the server can be used" if count == 1 else f"all {count} servers can be used"


def _table(server: ServerFacts) -> tuple[tuple[str, str], ...]:
    ranks = f" on each of {server.dp_size} ranks" if server.dp_size > 1 else ""
    return (
        ("version", _said(server.version)),
        ("model", _said(server.model_path)),
        ("weight version", _said(server.weight_version)),
        ("context", _said(server.context_length, " tokens")),
        ("vocabulary", _said(server.vocab_size, " ids")),
        ("KV pool", _said(server.max_total_num_tokens, f" tokens{ranks}")),
        ("running limit", _said(server.max_running_requests, f" requests{ranks}")),
        ("kv_cache_dtype", _said(server.kv_cache_dtype)),
        ("stream mode", _said(server.stream_mode)),
        ("router", "yes" if server.router else "no"),
    )


def _special(ids: SpecialIds) -> Iterator[tuple[str, str]]:
    yield "think", "(none)" if ids.think is None else str(ids.think)
    yield "end of think", "(none)" if ids.think_end is None else str(ids.think_end)
    yield "end of answer", ", ".join(map(str, ids.end)) or "(none)"
    yield from (("tool", f"{one} {name}") for name, one in ids.tools.items())


def _said(value: Any, unit: str = "") -> str:
    if value is None:
        return "(does not say)"
    return f"{value:,}{unit}" if isinstance(value, int) else str(value)
