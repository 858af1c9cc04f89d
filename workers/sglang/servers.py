"""The servers of a run: which to take, and which are down.

A server is down once it does not take connections, and stays so until a probe finds it well; probes come after pauses
that double. One that broke a request, or said that it is busy, is only shunned for a pause: others are taken first.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from workers.sglang.answer import BadAnswer

log = logging.getLogger(__name__)


class Pauses(msgspec.Struct, frozen=True):
    """How long to wait after a failure: doubling from `first_seconds` to `longest_seconds`."""

    first_seconds: float = 0.5
    longest_seconds: float = 30.0

    def after(self, failures: int) -> float:
        """The pause after so many failures in a row (1 or more)."""
        return min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))


class ServerState(msgspec.Struct, frozen=True):
    """What status shows of one server."""

    url: str
    state: Literal["up", "down"]
    in_flight: int
    since: float  # seconds since the epoch when this state began
    reason: str | None  # why it was last found down


class Server:
    """One server, as this worker sees it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.generate_url = self.url + "/generate"
        self.abort_url = self.url + "/abort_request"
        self.health_url = self.url + "/health"
        self.up = True
        self.since = time.time()
        self.reason: str | None = None
        self.in_flight = 0
        self.failures = 0  # in a row
        self.shunned_until = 0.0  # on the monotonic clock


class Servers:
    """All servers of a run, and the tasks that wait for those that are down."""

    def __init__(self, urls: Sequence[str], probe: Callable[[Server], Awaitable[bool]], pauses: Pauses) -> None:
        """`probe` says whether a server is well; it must not raise."""
        self._servers = [Server(url) for url in urls]
        self._probe = probe
        self._pauses = pauses
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._revivals: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def pick(self) -> Server:
        """The server with the fewest calls in flight; waits while all are down. Raises BadAnswer once stopped."""
        while not self._stopped:
            up = [server for server in self._servers if server.up]
            if up:
                now = time.monotonic()
                return min(up, key=lambda server: (server.shunned_until > now, server.in_flight))
            await self._some_up.wait()
        raise BadAnswer("draining", "this worker is stopping")

    def answered(self, server: Server) -> None:
        """The server gave a whole response that does not speak against it."""
        server.failures = 0

    def shun(self, server: Server) -> None:
        """Take others first for a while."""
        now = time.monotonic()
        if now < server.shunned_until:
            return  # the calls that a dying server breaks are one failure: else 32 of them would mean a pause of 30 s
        server.failures += 1
        server.shunned_until = now + self._pauses.after(server.failures)

    def down(self, server: Server, reason: str) -> None:
        """Take the server out until a probe finds it well."""
        if not server.up:
            return  # another call has seen it already
        server.up, server.since, server.reason = False, time.time(), reason
        server.failures += 1
        others = sum(other.up for other in self._servers)
        log.warning("%s is down; %s: %s", server.url, f"{others} left" if others else "waiting for it", reason)
        if not others:
            self._some_up.clear()
        task = asyncio.create_task(self._revive(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: Server) -> None:
        """Probe until the server is well. Failures stay counted: only an answer shows that it truly serves."""
        while True:
            # Jitter, so that many workers do not all probe at once.
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._pauses.after(server.failures))
            if await self._probe(server):
                break
            server.failures += 1
        log.info("%s is back after %.0f s", server.url, time.time() - server.since)
        server.up, server.since = True, time.time()
        self._some_up.set()

    def stop(self) -> None:
        """Whoever waits for a server gets BadAnswer, and no server is probed any more."""
        self._stopped = True
        self._some_up.set()
        for task in self._revivals:
            task.cancel()

    def states(self) -> list[ServerState]:
        """A snapshot for status."""
        return [
            ServerState(
                url=server.url,
                state="up" if server.up else "down",
                in_flight=server.in_flight,
                since=server.since,
                reason=server.reason,
            )
            for server in self._servers
        ]
