"""The client of SGLang's native /generate: one prompt of token ids in, one checked answer out."""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from common.errors import ConfigError
from workers.sglang.answer import Acceptance, Answer, BadAnswer, Outcome, refusal
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.servers import Pauses, Server, Servers, ServerState

log = logging.getLogger(__name__)

# Aborts and probes find a connection even when max_connections answers are in flight.
SPARE_CONNECTIONS = 16
ABORT_SECONDS = 5.0
# /health generates a token: at best it takes 1 s, and it gives up after 20.
PROBE_SECONDS = 25.0
# No answer is larger than this: what meta_info takes at most, and an id (8 bytes) with its text (up to 128 characters,
# as runs of spaces are, in UTF-8 or escaped) a token.
ANSWER_BYTES = 1 << 20
ANSWER_BYTES_PER_TOKEN = 256

# Nobody is there: the server is down until a probe finds it well.
_DOWN = frozenset({"unreachable", "server_away", "bad_gateway"})
# The server had trouble with this request, or is busy: others are taken first for a while.
_SHUNNED = frozenset({"connection_lost", "timeout", "request_timeout", "rate_limited", "queue_full", "server_error"})
# Says nothing about the sample, and uses up none of its tries. (A bad gateway does: the proxy says the same of a
# server that this very prompt has killed.)
_UNCOUNTED = frozenset({"unreachable", "server_away", "rate_limited", "queue_full"})
# The server may still be at it, and would go on to max_new_tokens for nobody.
_MAY_STILL_RUN = frozenset(
    {"connection_lost", "timeout", "request_timeout", "bad_gateway", "server_error", "answer_too_large"}
)
_BROKEN = (aiohttp.ClientError, OSError)


class Sampling(msgspec.Struct, frozen=True):
    """`sampling_params`, encoded once; max_new_tokens stands apart, so that a call can ask for fewer."""

    max_new_tokens: int
    others: bytes  # the other parameters as the rest of a JSON object: `,"temperature":1.0}`

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Raises ConfigError if max_new_tokens is missing (the server would stop at 128) or n asks for several."""
        others = dict(params)
        max_new_tokens = others.pop("max_new_tokens", None)
        if not isinstance(max_new_tokens, int):
            raise ConfigError("[sampling] needs max_new_tokens; without it the server stops after 128 tokens")
        if others.pop("n", 1) != 1:
            raise ConfigError("[sampling] n must be 1; put a prompt into the dataset as often as it shall be answered")
        return cls(max_new_tokens, b"," + msgspec.json.encode(others)[1:] if others else b"}")


class SGLangClient:
    """Calls the servers of a run and hands back accepted answers; for one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        acceptance: Acceptance,
        sampling_params: Mapping[str, Any],
        api_key: str | None,
        max_connections: int,
        request_timeout_seconds: float,
        http: Http | None = None,
        max_tries: int = 3,
        pauses: Pauses | None = None,
    ) -> None:
        """An attempt may take `request_timeout_seconds`, to its last byte; `max_tries` counted failures end a sample.

        At most `max_connections` calls may be in flight. `http` stands in for the network in tests.
        """
        self._acceptance = acceptance
        self._sampling = Sampling.of(sampling_params)
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "tokenmill",
            **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        }
        self._request_timeout_seconds = request_timeout_seconds
        self._max_tries = max_tries
        self._pauses = pauses or Pauses()
        self._http = http or AiohttpHttp(max_connections + SPARE_CONNECTIONS)
        self._servers = Servers(urls, self._is_well, self._pauses)
        self._running: dict[str, Server] = {}  # by rid
        self._draining = asyncio.Event()
        self.retried: Counter[str] = Counter()  # failures that were followed by another attempt, by reason

    @property
    def in_flight(self) -> int:
        """Requests that a server is at now; a call between two attempts is not counted."""
        return len(self._running)

    def servers(self) -> list[ServerState]:
        """The state of each server, for status."""
        return self._servers.states()

    async def generate(
        self,
        input_ids_json: bytes,
        *,
        prompt_tokens: int,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
    ) -> tuple[Answer, str, float]:
        """One accepted answer, the URL of the server that gave it, and the seconds that its attempt took.

        `input_ids_json` is a JSON array of `prompt_tokens` ids, all in the vocabulary: an id outside kills the server.
        `max_new_tokens` replaces the one of `sampling`. Raises BadAnswer: REJECT and HALT at once, RETRY after
        `max_tries` counted failures or when draining. While no server is up it waits, and uses up no tries.
        """
        sampling = sampling or self._sampling
        asked = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        rest = b'","sampling_params":{"max_new_tokens":%d%b,"input_ids":%b}' % (asked, sampling.others, input_ids_json)
        failures = tries = 0
        while True:
            server = await self._servers.pick()
            # One length and random, as aborting a rid aborts all that begin with it. Without a system call: each lets
            # another thread take the interpreter.
            rid = f"{random.getrandbits(128):032x}"
            try:
                return await self._attempt(server, rid, rest, prompt_tokens, asked)
            except BadAnswer as bad:
                self._note(server, bad)
                if bad.reason in _MAY_STILL_RUN:
                    await self._abort(server, rid)
                if self._draining.is_set() and bad.outcome is Outcome.RETRY:
                    raise BadAnswer("draining", "this worker is stopping") from bad
                failures += 1
                tries += bad.reason not in _UNCOUNTED
                if bad.outcome is not Outcome.RETRY or tries >= self._max_tries:
                    raise
                self.retried[bad.reason] += 1
                log.debug("attempt %d on %s failed, %s", failures, server.url, bad)
                if bad.reason not in _DOWN:  # pick() waits for those
                    await self._pause(failures)

    async def _attempt(
        self, server: Server, rid: str, rest: bytes, prompt_tokens: int, max_new_tokens: int
    ) -> tuple[Answer, str, float]:
        """One request and its check; every failure becomes a BadAnswer."""
        body = b'{"rid":"%b%b' % (rid.encode(), rest)
        self._running[rid] = server
        server.in_flight += 1
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._request_timeout_seconds):
                status, answer = await self._post(
                    server.generate_url, body, ANSWER_BYTES + ANSWER_BYTES_PER_TOKEN * max_new_tokens
                )
        except (TimeoutError, *_BROKEN) as error:
            raise _broken(error, server, self._request_timeout_seconds) from error
        finally:
            server.in_flight -= 1
            del self._running[rid]
        seconds = time.perf_counter() - started
        if status != 200:
            raise refusal(status, answer)
        accepted = self._acceptance.check(answer, rid=rid, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)
        self._servers.answered(server)
        return accepted, server.url, seconds

    async def _post(self, url: str, body: bytes, most_bytes: int) -> tuple[int, bytes]:
        return await self._http.request("POST", url, self._headers, body, most_bytes)

    def _note(self, server: Server, bad: BadAnswer) -> None:
        """What a failure says about the server."""
        if bad.reason in _DOWN:
            self._servers.down(server, bad.detail)
        elif bad.reason in _SHUNNED:
            self._servers.shun(server)
        else:
            self._servers.answered(server)

    async def _pause(self, failures: int) -> None:
        """Full jitter: any time up to the doubling pause; ends at once when draining."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), random.uniform(0, self._pauses.after(failures)))

    async def _abort(self, server: Server, rid: str) -> None:
        """Ask the server to stop a request; the best that can be done, so no failure is told."""
        body = msgspec.json.encode({"rid": rid})
        with contextlib.suppress(TimeoutError, BadAnswer, *_BROKEN):
            async with asyncio.timeout(ABORT_SECONDS):
                await self._post(server.abort_url, body, ANSWER_BYTES)

    async def _is_well(self, server: Server) -> bool:
        """Whether /health, which SGLang and its router both have, answers 200."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                status, _ = await self._http.request("GET", server.health_url, self._headers, None, ANSWER_BYTES)
        except (TimeoutError, BadAnswer, *_BROKEN):
            return False
        return status == 200

    async def abort_all(self) -> None:
        """Stop for good: abort what the servers are at; every call still in generate() ends with BadAnswer.

        SGLang's router has no /abort_request: there, and on a server that hangs, cancel the calls that do not end.
        """
        self._draining.set()
        self._servers.stop()
        await asyncio.gather(*(self._abort(server, rid) for rid, server in list(self._running.items())))

    async def aclose(self) -> None:
        """Close all connections; a call still in flight breaks."""
        self._draining.set()
        self._servers.stop()
        await self._http.aclose()


def _broken(error: Exception, server: Server, timeout_seconds: float) -> BadAnswer:
    """The reason for a response that never came, or not to its end."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return BadAnswer("unreachable", f"no connection: {error}")
    if isinstance(error, TimeoutError):
        return BadAnswer("timeout", f"{server.url} gave no answer within {timeout_seconds:g} s")
    # Not its repr: that of a ClientResponseError holds the request's headers, and with them the API key.
    words = f"{type(error).__name__} {error}".strip()
    return BadAnswer("connection_lost", f"{server.url} broke the connection before the answer was whole: {words}")
