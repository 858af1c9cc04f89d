"""How long a call is waited for: looked at from outside, by what its server says of itself.

A plain call is silent until its answer comes, for minutes or hours. What a silent server does is asked, not guessed: a
scheduler that hangs is found out within minutes, and one that is slow, paused or full is waited for. One run of another
system lost 8 % of its answers, the longest, to a client's timeout.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import msgspec

from workers.sglang.answer import BadAnswer
from workers.sglang.http import Http
from workers.sglang.server import Health, Server

log = logging.getLogger(__name__)
# The scheduler answers /get_server_info between two steps; one that does not for so long, so often, hangs.
ALIVE_SECONDS = 15.0
STALLS = 3
# A measured speed counts from so many answers on; each newer answer weighs a little more than the one before.
_FEWEST_ANSWERS = 10
_FADING = 0.98
# An answer may take so many times what max_new_tokens take at the mean speed, and as long again so many times while
# the server is at work.
_MARGIN = 3.0
_EXTENSIONS = 3
_INFO_BYTES = 16 << 20
_BROKEN = (TimeoutError, BadAnswer, aiohttp.ClientError, OSError)


class Patience(msgspec.Struct, frozen=True):
    """When a call is given up.

    `answer_seconds` is a limit that an operator has set, and holds. Without one it is 3 times what max_new_tokens take
    at the measured speed (2 tokens/s until one is measured), `least_seconds` at least, and up to 4 times that while the
    server works; from the last time on that the server was seen paused. A server that has said nothing for
    `quiet_seconds` is asked every `look_seconds` whether it lives.
    """

    answer_seconds: float | None = None
    least_seconds: float = 1800.0
    quiet_seconds: float = 60.0
    look_seconds: float = 15.0
    alive_seconds: float = ALIVE_SECONDS
    assumed_tokens_per_second: float = 2.0

    def period(self) -> float:
        """How often to look: often enough for the limit that holds."""
        return min(self.look_seconds, (self.answer_seconds or self.least_seconds) / 4)


class Call:
    """One request in flight; for the task that made it."""

    __slots__ = ("counts_from", "max_new_tokens", "server", "started", "task", "verdict")

    def __init__(self, server: Server, max_new_tokens: int) -> None:
        self.server = server
        self.max_new_tokens = max_new_tokens
        self.started = self.counts_from = time.monotonic()  # its limit: from when the server was last seen paused
        self.task = asyncio.current_task()
        self.verdict: BadAnswer | None = None

    def end(self) -> None:
        """It is over: its task may be at another call by now, which whoever still holds this one must not cancel."""
        self.task = None

    def give_up(self, verdict: BadAnswer) -> None:
        """End it: whoever awaits the answer gets `verdict`, and the connection is closed."""
        if self.verdict is None and self.task is not None:
            self.verdict = verdict
            self.task.cancel()


class Speed:
    """Tokens a second of one request at one server, its waiting included: a fading mean over its answers."""

    def __init__(self) -> None:
        self._answers = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._answers += 1
        self._tokens = _FADING * self._tokens + tokens
        self._seconds = _FADING * self._seconds + seconds

    def tokens_per_second(self, assumed: float) -> float:
        """The mean, or `assumed` until it can be told."""
        known = self._answers >= _FEWEST_ANSWERS and self._seconds > 0 and self._tokens > 0
        return self._tokens / self._seconds if known else assumed


class Watch:
    """Looks after the calls in flight, from a task of its own."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        http: Http,
        probe: Callable[[Server], Awaitable[Health]],
        patience: Patience,
    ) -> None:
        self._calls = calls
        self._http = http
        self._probe = probe
        self._patience = patience
        self._speeds: dict[str, Speed] = {}
        self._stalls: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def answered(self, server: Server, tokens: int, seconds: float) -> None:
        """An accepted answer came: what it says of the server's speed."""
        speed = self._speeds.get(server.url)
        if speed is None:
            speed = self._speeds[server.url] = Speed()
        speed.add(tokens, seconds)

    def begin(self) -> None:
        """Look after calls from now on; does nothing if it does already."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._patience.period())
            by_server: dict[Server, list[Call]] = {}
            for call in self._calls.values():
                by_server.setdefault(call.server, []).append(call)
            await asyncio.gather(*(self._look(server, calls) for server, calls in by_server.items()))

    async def _look(self, server: Server, calls: list[Call]) -> None:
        now = time.monotonic()
        quiet_since = max(server.answered_at, min(call.started for call in calls))
        if now - quiet_since >= self._patience.quiet_seconds:
            await self._look_at_quiet(server, calls, now - quiet_since)
        else:
            self._stalls.pop(server.url, None)
        late = [call for call in calls if now - call.counts_from > self._limit(call)]
        if late and not await self._is_excused(server, calls):
            await self._look_at_late(server, late, now)

    async def _look_at_quiet(self, server: Server, calls: list[Call], seconds: float) -> None:
        """Give all its calls up once the scheduler has not answered several times in a row."""
        if await self._lives(server):
            self._stalls.pop(server.url, None)
            return
        stalls = self._stalls[server.url] = self._stalls.get(server.url, 0) + 1
        if stalls < STALLS:
            return
        self._stalls.pop(server.url, None)
        detail = f"{server.url} has answered nothing for {seconds:.0f} s, and its scheduler does not answer either"
        log.warning("%s; %d calls are given up", detail, len(calls))
        for call in calls:
            call.give_up(BadAnswer("stalled", detail))

    async def _is_excused(self, server: Server, calls: list[Call]) -> bool:
        """Whether the server is paused, which is no time of its calls: a limit that nobody has set begins anew.

        Else all that had waited for longer would be given up at the first look after it goes on.
        """
        if self._patience.answer_seconds is not None or not await self._paused(server):
            return False
        now = time.monotonic()
        for call in calls:
            call.counts_from = now
        return True

    async def _look_at_late(self, server: Server, late: list[Call], now: float) -> None:
        """Give up what is over its limit, unless the server is at work (for a while longer)."""
        if self._patience.answer_seconds is None and await self._at_work(server):
            late = [call for call in late if now - call.counts_from > (1 + _EXTENSIONS) * self._limit(call)]
        for call in late:
            seconds = now - call.counts_from
            call.give_up(BadAnswer("timeout", f"{server.url} gave no answer within {seconds:.0f} s"))

    def _limit(self, call: Call) -> float:
        patience = self._patience
        if patience.answer_seconds is not None:
            return patience.answer_seconds
        speed = self._speeds.get(call.server.url)
        assumed = patience.assumed_tokens_per_second
        rate = speed.tokens_per_second(assumed) if speed else assumed
        return max(patience.least_seconds, _MARGIN * call.max_new_tokens / rate)

    async def _lives(self, server: Server) -> bool:
        """Whether the scheduler answers, or is kept from us. A paused one does, and a dead or hung one does not."""
        status = await self._scheduler_status(server)
        return status is not None and status < 500

    async def _scheduler_status(self, server: Server) -> int | None:
        try:
            status, _ = await self._get(server, "/get_server_info")
        except _BROKEN:
            return None
        return status

    async def _at_work(self, server: Server) -> bool:
        """Whether anything runs or waits there; where that cannot be told, whether it lives.

        /v1/loads is there since 0.5.8, /get_load up to 0.5.20; SGLang's router has no figures of its servers.
        """
        for path in ("/v1/loads", "/get_load"):
            try:
                status, body = await self._get(server, path)
            except _BROKEN:
                return False
            if status == 200 and (requests := _requests(body)) is not None:
                return requests > 0
        return await self._lives(server)

    async def _paused(self, server: Server) -> bool:
        """Whether the scheduler answers while the probe's own token does not come.

        Where something in front lets nothing but /generate through, neither can be told: a lost call would be waited
        for without end.
        """
        return await self._scheduler_status(server) == 200 and await self._probe(server) is Health.DOUBTFUL

    async def _get(self, server: Server, path: str) -> tuple[int, bytes]:
        async with asyncio.timeout(self._patience.alive_seconds):
            return await self._http.request("GET", server.url + path, server.headers, None, _INFO_BYTES)


class _Load(msgspec.Struct):
    """Of one data-parallel rank. /get_load counts those that wait within num_reqs."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_reqs: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load]


def _requests(body: bytes) -> int | None:
    try:
        found = msgspec.json.decode(body, type=_Loads | list[_Load])
    except msgspec.DecodeError:
        return None
    loads = found.loads if isinstance(found, _Loads) else found
    return sum(load.num_running_reqs + load.num_waiting_reqs + load.num_reqs for load in loads)
