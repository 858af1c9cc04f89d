"""How the client reaches its servers: aiohttp alone.

A call with 128 in flight takes 0.16 ms of CPU so, and 0.24 behind httpx's interface, for httpx's request and response
objects. With httpx's own transport it takes 20 ms, and 44 with 500 in flight.
"""

import socket
import ssl
from collections.abc import AsyncIterable, Mapping
from typing import Any, Protocol

import aiohttp

from workers.sglang.answer import BadAnswer

CONNECT_SECONDS = 5.0
# SGLang closes a connection that idles for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); one taken from the pool just then is reset.
POOL_IDLE_SECONDS = 4.0


class Http(Protocol):
    """What the client needs of the network; tests answer in its place."""

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, most_bytes: int
    ) -> tuple[int, bytes]:
        """Status and whole body of the response.

        Raises aiohttp.ClientError or OSError where there is none, and BadAnswer if the body does not end within
        `most_bytes`; its connection is not used again then.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections; a request in flight breaks."""
        ...


class AiohttpHttp:
    """An aiohttp session of at most `connections` connections, for the event loop of the first request.

    aiohttp takes no proxy from the environment unless told to, and a response's cookies are not kept.
    """

    def __init__(self, connections: int) -> None:
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, most_bytes: int
    ) -> tuple[int, bytes]:
        """See Http."""
        session = self._session
        if session is None:
            session = self._session = self._open()
        async with session.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
            # Leaving the block early closes the connection, as its body is unread.
            return response.status, await read_whole(response.content.iter_any(), most_bytes)

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections,
                keepalive_timeout=POOL_IDLE_SECONDS,
                ssl=ssl.create_default_context(),
                socket_factory=_socket,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers={"accept", "user-agent"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        )

    async def aclose(self) -> None:
        """See Http."""
        if self._session is not None:
            await self._session.close()


async def read_whole(parts: AsyncIterable[bytes], most_bytes: int) -> bytes:
    """The parts of a body as one; raises BadAnswer if they do not end within `most_bytes`."""
    read = []
    size = 0
    async for part in parts:
        read.append(part)
        size += len(part)
        if size > most_bytes:
            raise BadAnswer("answer_too_large", f"the answer did not end within {most_bytes} bytes")
    return read[0] if len(read) == 1 else b"".join(read)


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices a dead host within two minutes: a connection is silent for as long as an answer takes."""
    family, kind, protocol = address[:3]
    made = socket.socket(family=family, type=kind, proto=protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made
