"""Reads what the servers say of their load, and steers by it how many calls may be in flight at each."""

import asyncio
import logging
import random
import time

from common.logs import about
from workers.sglang.http import Http
from workers.sglang.loads import LoadReader
from workers.sglang.server import Server
from workers.sglang.servers import Servers

log = logging.getLogger(__name__)
# So that many workers do not all ask at once.
_JITTER = 0.1
# The log tells a limit at its first change, and then at most once in so long a time.
_SAY_SECONDS = 300.0


class Steering:
    """Looks at all servers of a worker, each at its own pace: their governors, and the clocks of their answers."""

    def __init__(self, servers: Servers, http: Http, seconds: float) -> None:
        """`seconds` is the time between two looks."""
        self._servers = servers
        self._http = http
        self._seconds = seconds
        self.workers = 1  # that call the same servers; of interest where these tell nothing
        self._readers: dict[Server, LoadReader] = {}
        self._said: dict[Server, tuple[float, int]] = {}  # when, and which limit
        self._task: asyncio.Task[None] | None = None
        self._looks: dict[Server, asyncio.Task[None]] = {}  # under way

    def begin(self) -> None:
        """Steer from now on; does nothing if it does already."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
        for look in self._looks.values():
            look.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            servers = list(self._servers)
            self._readers = {one: self._readers.get(one) or self._reader(one) for one in servers}
            self._looks = {server: look for server, look in self._looks.items() if not look.done()}
            for server in servers:
                # Nobody waits for one that hangs: it kept the others, and their clocks, waiting for 15 s each time.
                if server not in self._looks:
                    self._looks[server] = loop.create_task(self._look(server, self._readers[server]))
            await asyncio.sleep(self._seconds * random.uniform(1 - _JITTER, 1 + _JITTER))

    def _reader(self, server: Server) -> LoadReader:
        return LoadReader(server.url, server.headers, self._http)

    async def _look(self, server: Server, reader: LoadReader) -> None:
        if server.state not in {"up", "half_open"}:
            server.load = None
            reader.forget()
            server.clock.advance(time.monotonic(), None)
            return
        server.load = await reader.read()
        server.clock.advance(time.monotonic(), server.load)
        if server.governor is not None:
            server.governor.polled(server.load, server.in_flight, self.workers)
            self._say(server, server.governor.limit, server.governor.why)
            self._servers.tell()

    def _say(self, server: Server, limit: int, why: str) -> None:
        said_at, said = self._said.get(server, (0.0, 0))
        if limit != said and time.monotonic() - said_at > _SAY_SECONDS:
            self._said[server] = (time.monotonic(), limit)
            text = "%s: %d of at most %d answers in flight (%s)"
            log.info(text, server.url, server.in_flight, limit, why, extra=about(server=server.url))
