"""The servers of a run: which to take, and a circuit breaker for each.

A breaker opens at once where nobody takes connections, and after some failures in a row without an answer in between;
what a server refuses (4xx) never counts. Then it is probed after pauses that double, and once it looks well it gets one
call, on trial; when that has been answered, or has run for a while, the breaker is closed. A single failure only means
that others are taken first for a pause.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from common.errors import ConfigError, ServerRefused, ServerUnavailable
from common.logs import about
from workers.governor import Governor
from workers.sglang.answer import BadAnswer, Says
from workers.sglang.server import Health, Pauses, Server, ServerState, State

log = logging.getLogger(__name__)
# So many failures in a row, each of a call that began after the one before had failed, are the server's own.
FAILURES_TO_OPEN = 3
# A server that answers its probes, but not well, gets a trial all the same: /health says 503 also in long prefills.
DOUBTFUL_PROBES = 3
_LOOK_AGAIN_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class Servers:
    """All servers of a run, and the tasks that look after those that are not up."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        headers_of: Callable[[str], Mapping[str, str]],
        probe: Callable[[Server], Awaitable[Health]],
        inspect: Callable[[Server], Awaitable[None]] | None,
        pauses: Pauses,
        governor: Callable[[], Governor] | None = None,
    ) -> None:
        """`probe` must not raise. `inspect` raises ServerUnavailable or ServerRefused; None: all fit from the start.

        `governor` makes the one of a server; without it no server has a limit.
        """
        self._headers_of = headers_of
        self._probe = probe
        self._inspect = inspect
        self._pauses = pauses
        self._governor = governor
        self._some = asyncio.Event()  # something has changed for those who wait for a server
        self.on_change: Callable[[], None] = lambda: None  # called when `slots` may have changed
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        self._stopped = False
        self._looking = asyncio.Lock()
        self._servers = [self._made(url) for url in dict.fromkeys(urls)]

    def _made(self, url: str) -> Server:
        url = url.rstrip("/")
        state: State = "up" if self._inspect is None else "checking"
        return Server(url, self._headers_of(url), state, self._governor and self._governor())

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers)

    @property
    def slots(self) -> int | None:
        """How many calls may be in flight now, over all servers; None if any number may.

        None can be sent while all servers are down; one may while all are unfit, to learn and say why.
        """
        if self._governor is None:
            return None
        if self.all_unfit:
            return 1
        return sum(_slots(server) for server in self._servers)

    def tell(self) -> None:
        """Something has changed: let those who wait look again."""
        self._some.set()
        self.on_change()

    def freed(self) -> None:
        """A call has ended: its slot is free."""
        self._some.set()

    # Which to take

    async def pick(self, failed_on: Collection[Server] = ()) -> Server:
        """The server with the fewest calls in flight for its limit; waits while none has room.

        Those in `failed_on` are taken last: one that loses its calls at once has the fewest in flight, and would get
        them again and again.

        Raises BadAnswer once stopped, and if no server can be used for this run.
        """
        while not self._stopped:
            self.begin()
            now = time.monotonic()
            usable = [server for server in self._servers if _usable(server)]
            if usable:
                server = min(usable, key=lambda one: (one.shunned_until > now, one in failed_on, _fullness(one)))
                if server.state == "half_open":
                    self._begin_trial(server)
                return server
            if self.all_unfit:
                if await self._some_fit_now():
                    continue
                reasons = "; ".join(dict.fromkeys(server.reason or "" for server in self._servers))
                raise BadAnswer("no_fit_server", reasons)
            self._some.clear()
            await self._some.wait()
        raise BadAnswer("draining", "this worker is stopping")

    async def pick_alone(self, failed_on: Collection[Server]) -> Server:
        """Like pick, for a call that may kill its server: no other is sent there until `let_in`, and none just was.

        A server that is kept from the call before is taken again, so that such calls follow each other at once.
        """
        while True:
            server = next((one for one in self._servers if one.alone and _usable(one, alone=True)), None)
            if server is None:
                server = await self.pick(failed_on)
            server.alone = True
            kept = False
            try:
                await self._quiet(server)
                kept = _usable(server, alone=True) and not self._stopped
            finally:
                if not kept:
                    self.let_in(server)
            if kept:
                return server

    async def _quiet(self, server: Server) -> None:
        """Wait until what was sent there has ended, or would have killed it by now."""
        until = server.sent_at + self._pauses.trial_seconds
        while server.in_flight and time.monotonic() < until:  # noqa: ASYNC110 - rare, and every call would have to tell
            await asyncio.sleep(min(_LOOK_SECONDS, self._pauses.trial_seconds))

    def let_in(self, *servers: Server) -> None:
        """Let other calls be sent to servers that were kept for one; to all, if none is named."""
        for server in servers or self._servers:
            server.alone = False
        self.tell()

    def set_urls(self, urls: Sequence[str]) -> None:
        """Add servers, and drain those that are no longer named: their calls end, and no others begin."""
        wanted = {url.rstrip("/") for url in urls}
        for server in self._servers:
            if server.draining != (server.url not in wanted):
                server.draining = not server.draining
                log.info("%s is %s", server.url, "drained" if server.draining else "taken again")
        known = {server.url for server in self._servers}
        self._servers += [self._made(url) for url in urls if url.rstrip("/") not in known]
        for server in [one for one in self._servers if one.draining and not one.in_flight]:
            self._servers.remove(server)
            self._look_no_longer(server)
        self.begin()
        self.tell()

    @property
    def all_unfit(self) -> bool:
        """Whether no server is left that could come to be of use; one that is merely down could."""
        known = [server for server in self._servers if not server.draining]
        return bool(known) and all(server.state == "unfit" for server in known)

    async def _some_fit_now(self) -> bool:
        """Look at unfit servers again, if that was not done just now: someone may have seen to them."""
        async with self._looking:
            for server in self._servers:
                if server.state == "unfit" and time.monotonic() - server.looked_at > _LOOK_AGAIN_SECONDS:
                    server.looked_at = time.monotonic()
                    if await self._inspected(server) is Health.WELL:
                        self._half_open(server, proven=False)
        return not self.all_unfit

    # What calls tell

    def answered(self, server: Server) -> None:
        """The server gave an accepted answer."""
        server.answers += 1
        server.failures = 0
        server.answered_at = time.monotonic()
        server.proven = True
        if server.state in {"half_open", "down"}:
            self._up(server)

    def ended_badly(self, server: Server, bad: BadAnswer, started: float) -> None:
        """A call that began at `started` (monotonic) did not give an accepted answer."""
        if bad.rule.says is not Says.NOTHING:
            server.reason = bad.detail
        if bad.reason == "timeout" and server.governor is not None:
            server.governor.timed_out(server.in_flight)
        match bad.rule.says:
            case Says.BUSY:
                self._shun(server)
            case Says.FAILED:
                self._failed(server, bad, started)
            case Says.GONE:
                self._open(server, "down", bad.detail)
            case Says.UNFIT:
                self._open(server, "unfit", bad.detail)
            case Says.NOTHING:
                pass

    def trial_ended(self, server: Server) -> None:
        """The call on trial has ended; if that decided nothing, another may try."""
        if server.on_trial:
            server.on_trial = False
            self.tell()

    def _shun(self, server: Server) -> None:
        now = time.monotonic()
        if now < server.shunned_until:
            return  # the calls that a dying server breaks are one failure: else 32 of them would mean a pause of 30 s
        server.failures += 1
        server.shunned_until = now + self._pauses.after(server.failures)

    def _failed(self, server: Server, bad: BadAnswer, started: float) -> None:
        if server.state == "half_open" and server.on_trial:
            self._open(server, "down", bad.detail)
        elif server.state == "up" and started >= server.failed_at:
            # Calls that were in flight at the last failure belong to it.
            server.failed_at = time.monotonic()
            server.failures += 1
            server.shunned_until = server.failed_at + self._pauses.after(server.failures)
            if server.failures >= FAILURES_TO_OPEN:
                self._open(server, "down", bad.detail)

    # The breaker

    def _open(self, server: Server, state: Literal["down", "unfit"], reason: str) -> None:
        if server.state == state:
            return  # another call has seen it already
        if server.state != "half_open" or state == "unfit":
            others = sum(other.state in {"up", "half_open"} and other is not server for other in self._servers)
            left = f"{others} left" if others else "waiting for it"
            log.warning("%s is %s; %s: %s", server.url, state, left, reason, extra=about(server=server.url))
            server.since = time.time()
        server.state, server.reason = state, reason
        server.failures += 1
        server.proven = server.on_trial = server.alone = False
        if server.governor is not None:
            server.governor.refused()
        self.tell()
        self._look_after(server, self._revive(server))

    def _half_open(self, server: Server, *, proven: bool) -> None:
        server.state, server.proven, server.on_trial = "half_open", proven, False
        self._look_no_longer(server)
        self.tell()

    def _begin_trial(self, server: Server) -> None:
        server.on_trial = True
        server.trials += 1
        asyncio.get_running_loop().call_later(self._pauses.trial_seconds, self._trial_is_over, server, server.trials)

    def _trial_is_over(self, server: Server, trial: int) -> None:
        if server.state == "half_open" and server.on_trial and server.trials == trial:
            self._up(server)

    def _up(self, server: Server) -> None:
        if server.state != "checking":
            seconds = time.time() - server.since
            log.info("%s is back after %.0f s", server.url, seconds, extra=about(server=server.url))
        server.state, server.since, server.on_trial = "up", time.time(), False
        self._look_no_longer(server)
        self.tell()

    # The tasks

    def begin(self) -> None:
        """Look at those that were not looked at yet."""
        for server in self._servers:
            if server.state == "checking" and server not in self._tasks:
                self._look_after(server, self._first_look(server))

    async def _first_look(self, server: Server) -> None:
        found = await self._inspected(server)
        if found is Health.WELL:
            server.proven = True
            self._up(server)

    async def _revive(self, server: Server) -> None:
        """Probe until the server looks well. Failures stay counted: only an answer shows that it truly serves."""
        doubtful = 0
        while True:
            # Jitter, so that many workers do not all probe at once.
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._pauses.after(server.failures))
            health = await self._inspected(server)
            if health is Health.WELL:
                health = await self._probe(server)
            doubtful = doubtful + 1 if health is Health.DOUBTFUL else 0
            if health is Health.WELL or doubtful >= DOUBTFUL_PROBES:
                self._half_open(server, proven=health is Health.WELL)
                return
            server.failures += 1

    async def _inspected(self, server: Server) -> Health:
        """WELL if the server can be used for this run; else its breaker is open, and GONE."""
        if self._inspect is None:
            return Health.WELL
        try:
            await self._inspect(server)
        except ServerRefused as error:
            self._mark(server, "unfit", str(error))
        except (ServerUnavailable, ConfigError) as error:  # ConfigError: its API key cannot be read
            self._mark(server, "down", str(error))
        else:
            return Health.WELL
        return Health.GONE

    def _mark(self, server: Server, state: Literal["down", "unfit"], reason: str) -> None:
        """Like _open, from within the task that looks after the server."""
        first = server.state == "checking"
        if server.state != state:
            log.warning("%s is %s: %s", server.url, state, reason, extra=about(server=server.url))
            server.state, server.since = state, time.time()
            server.failures += 1
        server.reason = reason
        self.tell()  # that it is unfit concerns those who wait, too
        if first:
            self._look_after(server, self._revive(server))

    def _look_after(self, server: Server, work: Any) -> None:
        """One task a server: a new one takes the place of the old."""
        self._look_no_longer(server)
        task = self._tasks[server] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda done: self._tasks.pop(server, None) if self._tasks.get(server) is done else None)

    def _look_no_longer(self, server: Server) -> None:
        task = self._tasks.pop(server, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def stop(self) -> None:
        """Whoever waits for a server gets BadAnswer, and no server is probed any more."""
        self._stopped = True
        self.tell()
        for task in self._tasks.values():
            task.cancel()

    def states(self) -> list[ServerState]:
        """A snapshot for status."""
        return [server.seen() for server in self._servers]


def _fullness(server: Server) -> float:
    """Where a limit is known, the share of it that is in flight: servers differ in size."""
    return server.in_flight if server.governor is None else server.in_flight / server.governor.limit


def _slots(server: Server) -> int:
    if server.draining or server.alone or server.governor is None:
        return server.in_flight
    if server.state == "up":
        return server.governor.limit
    return max(server.in_flight, int(server.state == "half_open"))


def _usable(server: Server, *, alone: bool = False) -> bool:
    """Whether a call may be sent there now; `alone` says that it is the one that the server is kept for."""
    if server.draining or (server.alone and not alone) or not (alone or server.has_slot):
        return False
    return server.state == "up" or (server.state == "half_open" and (alone or not server.on_trial))
