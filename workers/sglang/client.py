"""The client of SGLang's native /generate: one prompt of token ids in, one checked answer out."""

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from common.errors import ConfigError
from workers.governor import Governor
from workers.sglang.answer import Acceptance, Answer, BadAnswer, Outcome, Says, refusal
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.inquiry import cause
from workers.sglang.server import Health, Pauses, SampleClock, Server, ServerState
from workers.sglang.servers import Servers
from workers.sglang.steering import Steering
from workers.sglang.watch import Call, Patience, Watch

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
# A sample that failed so often while its server answered others is at fault itself.
MAX_TRIES = 3
# A sample that failed so often while its server answered nobody ends all the same: it may be the last one.
MAX_UNPROVEN = 10
# A sample whose servers died so often goes on alone: nothing else is sent to its server for a while, so that if that
# dies, too, it is known of which. With 128 in flight at each death, the other 127 would end with the one that kills.
SUSPECT_AFTER = 2
# A sample whose servers died so often, though never within the time that it had alone, ends as well.
MAX_DEATHS = 6
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
        api_key_of: Callable[[str], str | None] = lambda _url: None,
        max_connections: int,
        http: Http | None = None,
        inspect: Callable[[Server], Awaitable[None]] | None = None,
        pauses: Pauses | None = None,
        patience: Patience | None = None,
        governor: Callable[[], Governor] | None = None,
        load_seconds: float = 2.0,
    ) -> None:
        """At most `max_connections` calls may be in flight, and at each server no more than its `governor` allows.

        The servers' load is read every `load_seconds`, from `start` on.

        `inspect` looks at each server before its first call and whenever it comes back; it raises ServerUnavailable or
        ServerRefused. `http` stands in for the network in tests.
        """
        self._acceptance = acceptance
        self._sampling = Sampling.of(sampling_params)
        self._api_key_of = api_key_of
        self._pauses = pauses or Pauses()
        self._http = http or AiohttpHttp(max_connections + SPARE_CONNECTIONS)
        self._servers = Servers(
            urls,
            headers_of=self._headers_of,
            probe=self._health,
            inspect=inspect,
            pauses=self._pauses,
            governor=governor,
        )
        self.steering = Steering(self._servers, self._http, load_seconds)
        self._running: dict[str, Call] = {}  # by rid
        self._watch = Watch(self._running, self._http, self._health, patience or Patience())
        self._draining = asyncio.Event()
        self._alone = asyncio.Lock()
        self._suspects = 0  # that wait for it
        self.failed_attempts: Counter[str] = Counter()  # by reason

    def _headers_of(self, url: str) -> dict[str, str]:
        api_key = self._api_key_of(url)
        return {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "tokenmill",
            **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    @property
    def http(self) -> Http:
        """The connections, for whoever looks at the same servers."""
        return self._http

    @property
    def in_flight(self) -> int:
        """Requests that a server is at now; a call between two attempts is not counted."""
        return len(self._running)

    def servers(self) -> list[ServerState]:
        """The state of each server, for status."""
        return self._servers.states()

    @property
    def slots(self) -> int | None:
        """How many calls may be in flight now; None if any number may."""
        return self._servers.slots

    def start(self, on_slots: Callable[[], None]) -> None:
        """Look at the servers from now on, before any call; `on_slots` is called when `slots` may have changed."""
        self._servers.on_change = on_slots
        self._servers.begin()
        self.steering.begin()

    def set_urls(self, urls: Sequence[str]) -> None:
        """Take these servers from now on: new ones are looked at first, those not named are drained."""
        self._servers.set_urls(urls)

    async def generate(
        self,
        input_ids_json: bytes,
        *,
        prompt_tokens: int,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        clock: SampleClock | None = None,
    ) -> tuple[Answer, str, float]:
        """One accepted answer, the URL of the server that gave it, and the seconds that its attempt took.

        `input_ids_json` is a JSON array of `prompt_tokens` ids, all in the vocabulary: an id outside kills the server.
        `max_new_tokens` replaces the one of `sampling`; `clock` tells how far it is. Raises BadAnswer: what is final
        at once, RETRY when the sample has used up its tries or when draining. While no server is up it waits, and uses
        up no tries.
        """
        sampling = sampling or self._sampling
        asked = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        rest = b'","sampling_params":{"max_new_tokens":%d%b,"input_ids":%b}' % (asked, sampling.others, input_ids_json)
        tries = Tries()
        clock = clock or SampleClock()
        while True:
            alone = await self._begin_alone() if tries.deaths >= SUSPECT_AFTER else None
            try:
                found = await self._try(tries, alone, clock, rest, prompt_tokens, asked)
            finally:
                if alone is not None:
                    alone.end()
            if not isinstance(found, BadAnswer):
                return found
            if found.rule.says not in {Says.GONE, Says.UNFIT}:  # pick() waits for those
                await self._pause(tries.all)

    async def _try(
        self,
        tries: "Tries",
        alone: "Alone | None",
        clock: SampleClock,
        rest: bytes,
        prompt_tokens: int,
        max_new_tokens: int,
    ) -> tuple[Answer, str, float] | BadAnswer:
        """One attempt on the server to be taken now; a failure is answered if another may follow, else raised."""
        if alone is None:
            server = await self._servers.pick(tries.failed_on)
        else:
            server = await self._servers.pick_alone(tries.failed_on)
            alone.begin()
        on_trial, proven, started = server.on_trial, server.proven, time.monotonic()
        # One length and random, as aborting a rid aborts all that begin with it. Without a system call: each lets
        # another thread take the interpreter.
        rid = f"{random.getrandbits(128):032x}"
        clock.begin(server)
        try:
            return await self._attempt(server, rid, rest, prompt_tokens, max_new_tokens)
        except BadAnswer as bad:
            clock.lose()
            self.failed_attempts[bad.reason] += 1
            self._servers.ended_badly(server, bad, started)
            if bad.rule.may_still_run:
                await self._abort(server, rid)
            verdict = self._verdict(bad, tries, server, started, proven=proven, alone=alone)
            if verdict is not None:
                raise verdict from bad
            log.debug("an attempt on %s failed, %s", server.url, bad)
            return bad
        finally:
            if on_trial:
                self._servers.trial_ended(server)

    def _verdict(
        self, bad: BadAnswer, tries: "Tries", server: Server, started: float, *, proven: bool, alone: "Alone | None"
    ) -> BadAnswer | None:
        """What ends the sample after this failure; None if it is to be tried again."""
        tries.all += 1
        tries.failed_on.add(server)
        if bad.outcome is Outcome.HALT_RUN:
            return bad if self._servers.all_unfit else None
        if bad.outcome is not Outcome.RETRY:
            return bad
        if self._draining.is_set():
            return BadAnswer("draining", "this worker is stopping")
        if bad.rule.may_have_died:
            if not proven:
                return None  # the server was not well before, either
            tries.deaths += 1
            if tries.deaths >= MAX_DEATHS or (alone is not None and alone.is_alone):
                last = "the last time alone" if alone is not None and alone.is_alone else "never long alone"
                return BadAnswer("kills_server", f"{tries.deaths} times, {last}: {bad}")
        elif bad.rule.says is Says.FAILED and server.answered_at < (tries.failed_at or started):
            tries.unproven += 1
        elif bad.rule.tried:
            tries.counted += 1
        tries.failed_at = time.monotonic()
        return bad if tries.counted >= MAX_TRIES or tries.unproven >= MAX_UNPROVEN else None

    async def _begin_alone(self) -> "Alone":
        self._suspects += 1
        try:
            await self._alone.acquire()
        except asyncio.CancelledError:
            if not self._alone.locked() and self._suspects == 1:
                self._servers.let_in()
            raise
        finally:
            self._suspects -= 1
        return Alone(self._alone, self._pauses.trial_seconds, self._let_in)

    def _let_in(self) -> None:
        """Open what was kept for a suspect to all, unless the next suspect waits for it."""
        if not self._suspects:
            self._servers.let_in()

    async def _attempt(
        self, server: Server, rid: str, rest: bytes, prompt_tokens: int, max_new_tokens: int
    ) -> tuple[Answer, str, float]:
        """One request and its check; every failure becomes a BadAnswer."""
        body = b'{"rid":"%b%b' % (rid.encode(), rest)
        most_bytes = ANSWER_BYTES + ANSWER_BYTES_PER_TOKEN * max_new_tokens
        call = self._running[rid] = Call(server, max_new_tokens)
        server.in_flight += 1
        if server.governor is not None:
            server.governor.started(server.in_flight)
        server.sent_at = call.started
        self._watch.begin()
        try:
            status, answer = await self._http.request("POST", server.generate_url, server.headers, body, most_bytes)
        except (TimeoutError, *_BROKEN) as error:
            raise _broken(error, server) from error
        except asyncio.CancelledError:
            if call.verdict is None or call.task is None or call.task.uncancel() > 0:
                raise
            raise call.verdict from None
        finally:
            call.end()
            server.in_flight -= 1
            self._servers.freed()
            del self._running[rid]
        seconds = time.monotonic() - call.started
        if status != 200:
            raise refusal(status, answer)
        accepted = self._acceptance.check(answer, rid=rid, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens)
        self._servers.answered(server)
        self._watch.answered(server, accepted.completion_tokens, seconds)
        server.clock.answered(accepted.completion_tokens, seconds)
        if server.governor is not None:
            server.governor.answered(prompt_tokens, accepted.completion_tokens)
        return accepted, server.url, seconds

    async def _pause(self, failures: int) -> None:
        """Full jitter: any time up to the doubling pause; ends at once when draining."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), random.uniform(0, self._pauses.after(failures)))

    async def _abort(self, server: Server, rid: str) -> None:
        """Ask the server to stop a request; the best that can be done, so no failure is told."""
        if not server.takes_aborts:
            return
        body = msgspec.json.encode({"rid": rid})
        with contextlib.suppress(TimeoutError, BadAnswer, *_BROKEN):
            async with asyncio.timeout(ABORT_SECONDS):
                status, _ = await self._http.request("POST", server.abort_url, server.headers, body, ANSWER_BYTES)
                # A router: what it has sent on ends with the connection of its caller, and not before.
                server.takes_aborts = status not in {404, 405}

    async def _health(self, server: Server) -> Health:
        """What /health, which SGLang and its router both have, says."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                status, _ = await self._http.request("GET", server.health_url, server.headers, None, ANSWER_BYTES)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return Health.GONE
        except (TimeoutError, BadAnswer, *_BROKEN):
            return Health.DOUBTFUL
        return Health.WELL if status == 200 else Health.DOUBTFUL

    async def abort_all(self) -> None:
        """Stop for good: abort what the servers are at; every call still in generate() ends with BadAnswer.

        A server that hangs does not end them: cancel the calls that do not end.
        """
        self._draining.set()
        self._servers.stop()
        running = list(self._running.items())
        await asyncio.gather(*(self._abort(call.server, rid) for rid, call in running))
        for _, call in running:
            if not call.server.takes_aborts:
                call.give_up(BadAnswer("draining", "this worker is stopping"))

    async def aclose(self) -> None:
        """Close all connections; a call still in flight breaks."""
        self._draining.set()
        self._servers.stop()
        self._watch.stop()
        self.steering.stop()
        await self._http.aclose()


class Tries:
    """How often one sample has failed, by what that says of it."""

    __slots__ = ("all", "counted", "deaths", "failed_at", "failed_on", "unproven")

    def __init__(self) -> None:
        self.all = 0
        self.counted = 0  # the sample's own
        self.unproven = 0  # its server answered nobody since the failure before
        self.deaths = 0  # its server, which was well before, may have died
        self.failed_at = 0.0  # on the monotonic clock
        self.failed_on: set[Server] = set()


class Alone:
    """The time in which nothing else is sent to its server: from the call to its end, or until it ran for a while."""

    def __init__(self, lock: asyncio.Lock, seconds: float, let_in: Callable[[], None]) -> None:
        """`lock` is held by the caller, and released by `end` at the latest; `let_in` opens its server to others."""
        self._lock = lock
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._let_in = let_in
        self.is_alone = True

    def begin(self) -> None:
        """The call is made now."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.end)

    def end(self) -> None:
        """Let the next suspect go."""
        if self.is_alone:
            self.is_alone = False
            self._let_in()
            self._lock.release()
        if self._timer is not None:
            self._timer.cancel()


def _broken(error: Exception, server: Server) -> BadAnswer:
    """The reason for a response that never came, or not to its end."""
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return BadAnswer("unreachable", f"no connection: {cause(error)}")
    if isinstance(error, TimeoutError):
        return BadAnswer("timeout", f"{server.url} did not take the request in time: {error}")
    # Not its repr: that of a ClientResponseError holds the request's headers, and with them the API key.
    if isinstance(error, aiohttp.ClientResponseError):  # somebody lives there, who does not speak HTTP
        return BadAnswer("not_an_answer", f"{server.url} did not answer in HTTP: {error}")
    words = f"{type(error).__name__} {error}".strip()
    return BadAnswer("connection_lost", f"{server.url} broke the connection before the answer was whole: {words}")
