"""The client's network played by an httpx transport, whose requests and responses are convenient in tests."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import httpx

from workers.sglang.http import read_whole


class OverHttpx:
    """An Http (workers.sglang.http) in front of an httpx transport: its errors become those of aiohttp."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, most_bytes: int
    ) -> tuple[int, bytes]:
        request = httpx.Request(method, url, headers=headers, content=body)
        try:
            response = await self._transport.handle_async_request(request)
            try:
                return response.status_code, await read_whole(cast("Any", response.stream), most_bytes)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise _as_aiohttp(error) from error

    async def aclose(self) -> None:
        await self._transport.aclose()


def _as_aiohttp(error: httpx.TransportError) -> aiohttp.ClientError:
    match error:
        case httpx.ConnectError():
            nobody = SimpleNamespace(host="one", port=30000, ssl=True)
            return aiohttp.ClientConnectorError(cast("Any", nobody), OSError(111, str(error)))
        case httpx.ConnectTimeout():
            return aiohttp.ConnectionTimeoutError(str(error))
        case httpx.TimeoutException():
            return aiohttp.SocketTimeoutError(str(error))
        case _:
            return aiohttp.ServerDisconnectedError(str(error))
