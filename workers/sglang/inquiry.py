"""One server asked what it is. Whatever answers in its place, a page, a bomb, a redirect, is told in a sentence."""

import os
from typing import Any

import aiohttp
import msgspec

from common.errors import ServerRefused, ServerUnavailable
from workers.sglang.answer import BadAnswer, refusal
from workers.sglang.http import Http

# The real answer of one data-parallel rank takes 40 kB; a page that does not end must not fill the memory.
MOST_BYTES = 4 << 20
MOST_CAUSE_CHARACTERS = 300


class Inquiry:
    """One server, asked; every answer that cannot be used becomes an error that names it."""

    def __init__(self, url: str, api_key: str | None, http: Http) -> None:
        self.url = url
        self.api_key = api_key
        self._http = http
        self._headers = {
            "accept-encoding": "identity",
            "user-agent": "tokenmill",
            **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    async def info(self) -> dict[str, Any]:
        """What /server_info, or its older name, says; raises ServerRefused if that is not what SGLang says."""
        for path in ("/server_info", "/get_server_info"):
            status, body = await self._get(path)
            self._check(path, status, body)
            if status == 200:
                info = _object(body)
                if "max_total_num_tokens" in info or {"version", "model_path"} <= info.keys():
                    return info
                raise self._no_sglang(f"{path} is {_kind(body)}")
        raise self._no_sglang("it has no /server_info")

    async def told(self, *paths: str) -> dict[str, Any]:
        """What the first of `paths` that this release has says; empty if it has none of them, or something else."""
        for path in paths:
            status, body = await self._get(path)
            self._check(path, status, body)
            if status == 200:
                return _object(body)
        return {}

    async def is_router(self) -> bool:
        """SGLang has no /workers; its router lists the servers behind it there."""
        status, body = await self._get("/workers")
        return status == 200 and "workers" in _object(body)

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            return await self._http.request("GET", self.url + path, self._headers, None, MOST_BYTES)
        except BadAnswer:
            raise self._no_sglang(f"{path} does not end within {MOST_BYTES >> 20} MiB") from None

    def _check(self, path: str, status: int, body: bytes) -> None:
        if status in {401, 403}:
            what = "refuses the API key" if self.api_key else "wants an API key"
            raise ServerRefused(
                f"{self.url} {what} ({status}); set it with TOKENMILL_SERVER__API_KEY or [server] api_key_file, "
                "or for this server alone with TOKENMILL_SERVER__API_KEYS or [server.api_key_files]"
            )
        if 300 <= status < 400:
            raise self._no_sglang(f"{path} is a redirect, {status}, to another address")
        if status in {408, 429} or status >= 500:
            raise ServerUnavailable(
                f"{self.url}{path}: {refusal(status, body).detail}; wait until the server is ready, or restart it"
            )

    def _no_sglang(self, why: str) -> ServerRefused:
        return ServerRefused(
            f"{self.url} answers, but not as SGLang does ({why}); correct the address in [server] urls"
        )


def cause(error: Exception) -> str:
    """One line. Not the error's repr: that of a ClientResponseError holds the request's headers, and so the key."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        code = error.os_error.errno or 0
        return os.strerror(code) if code > 0 else error.os_error.strerror or str(error.os_error)
    return " ".join(str(error).split())[:MOST_CAUSE_CHARACTERS] or type(error).__name__


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; empty if it is none."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _kind(body: bytes) -> str:
    """What a body is that should have been an object of SGLang's."""
    if body.startswith(b"\x1f\x8b"):
        return "compressed (gzip), although that was not asked for"
    if body.lstrip().startswith(b"<"):
        return "a page of HTML"
    return "JSON of another kind" if _object(body) else "no JSON object"
