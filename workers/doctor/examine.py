"""`doctor`: everything is looked at and told. What a job looks at as it starts is in workers/doctor/start.py."""

import asyncio
from collections.abc import Iterator, Sequence

from common.chat_template import Tokenizer
from common.errors import TokenizerUnavailable, UnavailableError
from common.settings import Settings
from workers.doctor.found import Found
from workers.doctor.live import full, try_all
from workers.doctor.of_live import LIVE_CHECKS
from workers.doctor.of_servers import SERVER_CHECKS
from workers.doctor.of_tokenizer import OWN_CHECKS
from workers.doctor.report import Check, Report, Said, shared
from workers.sglang.http import Http
from workers.sglang.preflight import ServerFacts, ask_all, refusals_of


def examine(settings: Settings, http: Http | None = None, *, probe: bool = True) -> Report:
    """Ask every configured server, try those that can be used if `probe`, and check what is found.

    `http` stands in for the network in tests.
    """
    servers, unavailable = asyncio.run(ask_all(settings.server.urls, settings.api_key_of, http))
    failures: list[UnavailableError] = list(unavailable)
    tokenizer = None
    try:
        tokenizer = Tokenizer(settings.tokenizer)
    except TokenizerUnavailable as error:
        failures.append(error)
    live = {}
    if probe and (usable := _usable(servers)):
        params = settings.sampling.params()
        live = asyncio.run(
            try_all(
                usable,
                [settings.api_key_of(server.url) for server in usable],
                http,
                lambda server, key, network: full(server, key, network, tokenizer, params),
            )
        )
    return report_on(Found(settings, settings.datasets, servers, tokenizer, failures, live))


def _usable(servers: Sequence[ServerFacts]) -> list[ServerFacts]:
    """Those that are neither of a release that must not be used nor of another model: nothing is to be asked there."""
    refused = {str(error).partition(" ")[0] for error in refusals_of(servers)}
    return [server for server in servers if server.url not in refused]


def report_on(found: Found) -> Report:
    """All checks, in the order in which a person reads them."""
    return Report([*_reachable(found), *_of_servers(found), *_own(found), *_of_live(found)], found.servers)


def _reachable(found: Found) -> Iterator[Check]:
    for failure in found.failures:
        name = "tokenizer_files" if isinstance(failure, TokenizerUnavailable) else "reachable"
        said = Said.of("wrong", str(failure))
        yield Check(name, said.state, said.says, said.do)
    if found.servers:
        yield Check("reachable", "ok", ", ".join(server.url for server in found.servers), "")


def _of_servers(found: Found) -> Iterator[Check]:
    for name, check in SERVER_CHECKS.items():
        told = [(server.url, said) for server in found.servers for said in check(server, found)]
        yield from shared(name, told, len(found.servers))


def _own(found: Found) -> Iterator[Check]:
    for name, check in OWN_CHECKS.items():
        yield from (Check(name, said.state, said.says, said.do) for said in check(found))


def _of_live(found: Found) -> Iterator[Check]:
    tried = [server for server in found.servers if server.url in found.live]
    for name, check in LIVE_CHECKS.items():
        told = [(server.url, said) for server in tried for said in check(server, found.live[server.url], found)]
        yield from shared(name, told, len(tried))
