"""Some real answers before a job, for `tokenmill plan`: how long they are, and how they end. Nothing is kept of them.

They go through the client that jobs use, and through its governor: it begins with three requests in flight, and adds
none while others wait at the server, so a job that runs there loses little.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import ServerUnavailable
from common.settings import Settings
from workers.governor import Governor, Load
from workers.sglang.answer import Acceptance, BadAnswer
from workers.sglang.client import Sampling, SGLangClient
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.loads import LoadReader
from workers.sglang.preflight import ServerFacts
from workers.sglang.watch import Patience

_TELL_SECONDS = 1.0
# With no server there for so long, a pilot is given up.
_GONE_SECONDS = 60.0
_UNUSABLE = frozenset({"down", "unfit"})


class Ask(msgspec.Struct, frozen=True):
    """A prompt of `dataset`: input_ids is a JSON array of `prompt_tokens` ids that the servers know."""

    dataset: str
    input_ids: bytes
    prompt_tokens: int
    sampling_params: Mapping[str, Any]


class Told(msgspec.Struct, frozen=True):
    """An answer's length and end, or the reason (of workers.sglang.answer) why there is none."""

    dataset: str
    completion_tokens: int = 0
    finish_reason: str = ""
    failure: str = ""


class Pilot(msgspec.Struct, frozen=True):
    """All that was asked, in no order, and how long that took."""

    told: list[Told]
    seconds: float


def speeds(
    servers: Sequence[ServerFacts], api_key_of: Callable[[str], str | None], http: Http | None = None
) -> list[Load | None]:
    """What each server says of its load now; None where it does not."""

    async def read() -> list[Load | None]:
        network = http or AiohttpHttp(2 * len(servers))
        try:
            return await asyncio.gather(*(_load(one.url, api_key_of(one.url), network) for one in servers))
        finally:
            if http is None:
                await network.aclose()

    return asyncio.run(read())


async def _load(url: str, api_key: str | None, http: Http) -> Load | None:
    headers = {"user-agent": "tokenmill", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    return await LoadReader(url, headers, http).read()


def pilot(
    settings: Settings,
    servers: Sequence[ServerFacts],
    vocab_size: int,
    asks: Sequence[Ask],
    say: Callable[[int, int], None] = lambda _ended, _in_flight: None,
) -> Pilot:
    """The same as `answers`, from start to end; Ctrl-C interrupts it."""
    return asyncio.run(answers(settings, servers, vocab_size, asks, say))


async def answers(
    settings: Settings,
    servers: Sequence[ServerFacts],
    vocab_size: int,
    asks: Sequence[Ask],
    say: Callable[[int, int], None] = lambda _ended, _in_flight: None,
) -> Pilot:
    """Ask all and wait for every answer: to leave the long ones out would tell a mean that is too low.

    `say` is called each second with how many have ended and how many are in flight. What is in flight when this is
    interrupted is aborted on its server. Raises ServerUnavailable once no server has been there for a minute.
    """
    client = _client(settings, servers, vocab_size, len(asks))
    started = seen_at = time.monotonic()
    client.start(lambda: None)
    tasks = [asyncio.create_task(_told(client, ask)) for ask in asks]
    left = set(tasks)
    try:
        while left:
            _, left = await asyncio.wait(left, timeout=_TELL_SECONDS)
            say(len(tasks) - len(left), client.in_flight)
            if any(server.state not in _UNUSABLE for server in client.servers()):
                seen_at = time.monotonic()
            elif time.monotonic() - seen_at > _GONE_SECONDS:
                raise ServerUnavailable(
                    f"the pilot had {len(tasks) - len(left):,} of {len(tasks):,} answers when no server was there for "
                    f"{_GONE_SECONDS:.0f} s; see that they run, then repeat the command"
                )
    finally:
        if left:
            await client.abort_all()
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await client.aclose()
    return Pilot([task.result() for task in tasks], time.monotonic() - started)


def _client(settings: Settings, servers: Sequence[ServerFacts], vocab_size: int, asks: int) -> SGLangClient:
    most = min(settings.worker.concurrency, settings.worker.most_in_flight or asks, max(1, asks))

    def governor() -> Governor:
        return Governor(
            capacity_tokens=None,
            max_new_tokens=settings.sampling.max_new_tokens,
            most=most,
            phase=random.random(),
        )

    return SGLangClient(
        [server.url for server in servers],
        acceptance=Acceptance(vocab_size, servers[0].weight_version),
        sampling_params=settings.sampling.params(),
        api_key_of=settings.api_key_of,
        max_connections=most * len(servers),
        patience=Patience(answer_seconds=settings.server.request_timeout_seconds),
        governor=governor,
        load_seconds=settings.worker.load_seconds,
    )


async def _told(client: SGLangClient, ask: Ask) -> Told:
    try:
        answer, _, _ = await client.generate(
            ask.input_ids, prompt_tokens=ask.prompt_tokens, sampling=Sampling.of(ask.sampling_params)
        )
    except BadAnswer as bad:
        return Told(ask.dataset, failure=bad.reason)
    return Told(ask.dataset, answer.completion_tokens, answer.finish_reason)
