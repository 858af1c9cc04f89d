"""What a job, and a worker that joins it, look at before they work: cheap checks always, and one short try.

The try runs beside the loading of the tokenizer, which takes longer, and is let go after three seconds.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from common.chat_template import Tokenizer
from common.errors import ServerRefused, ServerUnavailable, UnavailableError
from common.sections import DatasetSettings
from common.settings import Settings
from workers.doctor.examine import report_on
from workers.doctor.found import Found
from workers.doctor.live import BRIEF_SECONDS, Live, brief, try_all
from workers.doctor.of_live import LIVE_CHECKS
from workers.doctor.of_servers import SERVER_CHECKS
from workers.doctor.report import Check, Report, Said
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.preflight import ServerFacts, ask_all, refusals_of

# Beside BRIEF_SECONDS for the answers, what a server may take to tell its load.
MOST_SECONDS = BRIEF_SECONDS + 1.0
# What `doctor` says, and gates find out in a job's first answers; a job does not repeat it each time it starts.
_NOT_AT_START = frozenset({"answer_length"})
# By what servers differ for whoever trains on their answers, and for what they can do.
_TELLING = (
    "version",
    "model_path",
    "weight_version",
    "context_length",
    "vocab_size",
    "kv_cache_dtype",
    "quantization",
    "skip_tokenizer_init",
    "allow_auto_truncate",
    "preferred_sampling_params",
    "router",
)


class Beginning:
    """The checks of a job that begins: the servers are asked at once and tried meanwhile, then the report is made."""

    def __init__(
        self, settings: Settings, datasets: Sequence[DatasetSettings], *, force: bool = False, http: Http | None = None
    ) -> None:
        """Ask the servers. Raises ServerUnavailable if none can be used, ServerRefused if one must not be used.

        With `force` those that must not be used are left out, as long as there are others.
        """
        self._settings, self._datasets, self._force = settings, datasets, force
        self.servers, unavailable = asyncio.run(ask_all(settings.server.urls, settings.api_key_of, http))
        self._failures: list[UnavailableError] = list(unavailable)
        self._live: dict[str, Live] = {}
        self._leave_out_refused()
        self._trying = threading.Thread(target=self._try, args=(http,), name="doctor", daemon=True)
        self._trying.start()

    def _leave_out_refused(self) -> None:
        refusals = [failure for failure in self._failures if isinstance(failure, ServerRefused)]
        refusals = refusals or list(refusals_of(self.servers))
        refused = {str(error).partition(" ")[0] for error in refusals}
        left = [server for server in self.servers if server.url not in refused]
        if refusals and not (self._force and left):
            raise ServerRefused("\n".join(map(str, refusals)))
        if not left:
            raise ServerUnavailable("\n".join(map(str, self._failures)))
        self._failures += [error for error in refusals if error not in self._failures]
        self.servers = left

    def _try(self, http: Http | None) -> None:
        keys = [self._settings.api_key_of(server.url) for server in self.servers]
        self._live = asyncio.run(try_all(self.servers, keys, http, in_time))

    def report(self, tokenizer: Tokenizer) -> Report:
        """What was found; a server that cannot be reached is a warning while there are others."""
        self._trying.join()
        found = Found(
            self._settings, self._datasets, self.servers, tokenizer, self._failures, self._live, at_start=True
        )
        report = report_on(found)
        return Report([_at_start(check) for check in report.checks if check.name not in _NOT_AT_START], report.servers)

    def warnings(self, report: Report) -> list[str]:
        """What to tell, one sentence each. Raises UnavailableError, with what is wrong, unless it is forced."""
        wrong = [check.sentence for check in report.of("wrong")]
        if wrong and not self._force:
            raise UnavailableError("\n".join(wrong) + "; or go on all the same with --force")
        return [check.sentence for check in report.checks if check.state == "warning"] + [
            f"forced: {sentence}" for sentence in wrong
        ]


async def in_time(facts: ServerFacts, api_key: str | None, http: Http) -> Live:
    """A brief try that ends, whatever the server does."""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            return await brief(facts, api_key, http)
    except TimeoutError:
        return Live(skipped=f"it does not say within {MOST_SECONDS:.0f} s how much it has to do")


def _at_start(check: Check) -> Check:
    """The same as a job that begins takes it: it can wait for a server, and goes on with the others."""
    if check.name == "reachable" and check.state == "wrong":
        return Check(check.name, "warning", check.says, check.do)
    return check


def forced(report: Report) -> list[dict[str, str]]:
    """What is wrong in a report, for run.json: the job goes on in spite of it."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return [{"at": at, "name": check.name, "says": check.says} for check in report.of("wrong")]


def is_known(facts: ServerFacts, servers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the start of the job has looked at a server like this one, so that a worker need not."""
    return not servers or any(all(one.get(name) == getattr(facts, name) for name in _TELLING) for one in servers)


async def look_at(
    facts: ServerFacts, api_key: str | None, http: Http, settings: Settings, context_length: int | None = None
) -> list[Check]:
    """What a worker finds of a server that is not known to the job; it has no tokenizer, and needs none.

    `context_length` is the one that the job's prompts are made for, tokens.
    """
    live = await in_time(facts, api_key, http)
    found = Found(settings, settings.datasets, [facts], None, [], {facts.url: live}, at_start=True)
    said = [(name, one) for name, check in SERVER_CHECKS.items() for one in check(facts, found)]
    said += [(name, one) for name, tried in LIVE_CHECKS.items() for one in tried(facts, live, found)]
    if context_length and facts.context_length and facts.context_length < context_length:
        short = f"it has a context of {facts.context_length:,} tokens, and the job's prompts are made for "
        said.append(("context", Said("wrong", f"{short}{context_length:,}", "start it with that --context-length")))
    return [Check(name, one.state, f"{facts.url}: {one.says}", one.do) for name, one in said if one.state != "ok"]


def look_before(facts: ServerFacts, settings: Settings) -> list[str]:
    """The same for whoever adds a server: warnings, one sentence each; raises ServerRefused for what is wrong."""

    async def look() -> list[Check]:
        http = AiohttpHttp(8)
        try:
            return await look_at(facts, settings.api_key_of(facts.url), http, settings)
        finally:
            await http.aclose()

    checks = asyncio.run(look())
    if wrong := [check.sentence for check in checks if check.state == "wrong"]:
        raise ServerRefused("\n".join(wrong))
    return [check.sentence for check in checks]
