"""What a simulated server can be told over HTTP: SGLang's own routes, and those under /_sim/ that only it has.

- `GET /_sim/faults` lists the faults that are set, with how often each struck, and all that there are.
- `POST /_sim/faults` sets some: `{"reset": {"next": 2}, "nan": {"share": 0.1, "after": 50}, "hang": null}`. The names
  are those of faults.py; null takes one back; the others stay. `DELETE /_sim/faults` takes all back.
- `POST /_sim/die` kills it now; `{"restart_seconds": 3}` says when it comes back, null that it does not.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from aiohttp import web

from workers.sglang.simulator import info
from workers.sglang.simulator.faults import ALL_OF_REQUESTS, OF_THE_SERVER, Fault
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.requests import Refusal

if TYPE_CHECKING:
    from workers.sglang.simulator.server import Simulator

Shape = TypeVar("Shape")
Route = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]

_FLUSH = (
    "Please check backend logs for more details. (When there are running or waiting requests, the operation will not "
    "be performed.)\n"
)


class _Abort(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class _Pause(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _SlowDown(msgspec.Struct):
    forward_sleep_time: float | None = None


class _Weights(msgspec.Struct):
    model_path: str
    weight_version: str | None = None


class _Die(msgspec.Struct):
    restart_seconds: float | msgspec.UnsetType | None = msgspec.UNSET


class Control:
    """The routes of one simulated server."""

    def __init__(self, server: "Simulator") -> None:
        self._server = server
        self._pause_modes = PROFILES[server.config.profile].has_pause_modes

    def routes(self) -> dict[str, dict[str, Route]]:
        faults: dict[str, Route] = {"GET": self._get_faults, "POST": self._set_faults, "DELETE": self._clear_faults}
        return {
            "/abort_request": {"POST": self._abort_request},
            "/flush_cache": {"GET": self._flush_cache, "POST": self._flush_cache},
            "/pause_generation": {"POST": self._pause},
            "/continue_generation": {"POST": self._continue},
            "/slow_down": {"POST": self._slow_down},
            "/update_weights_from_disk": {"POST": self._update_weights},
            "/_sim/faults": faults,
            "/_sim/die": {"POST": self._die},
        }

    async def _abort_request(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read(request, _Abort)
        if body.rid or body.abort_all:
            self._server.process.abort("" if body.abort_all else body.rid)
        return web.Response()

    async def _flush_cache(self, _: web.BaseRequest) -> web.StreamResponse:
        flushed = self._server.process.flush()
        text = f"{'Cache flushed.' if flushed else 'Flush cache failed.'}\n{_FLUSH}"
        return web.Response(body=text.encode(), status=200 if flushed else 400)

    async def _pause(self, request: web.BaseRequest) -> web.StreamResponse:
        mode = (await _read(request, _Pause)).mode if self._pause_modes else "abort"
        self._server.process.pause(mode)
        return info.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.BaseRequest) -> web.StreamResponse:
        self._server.process.unpause()
        return info.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _slow_down(self, request: web.BaseRequest) -> web.StreamResponse:
        self._server.process.slow_down((await _read(request, _SlowDown)).forward_sleep_time or 0.0)
        return info.json_response(None)

    async def _update_weights(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read(request, _Weights)
        if body.model_path != self._server.config.model_path:
            message = f"Failed to get weights iterator: {body.model_path} is not there."
            return info.json_response({"success": False, "message": message, "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            self._server.process.weight_version = body.weight_version
            message += f" Weight version updated to {body.weight_version}."
        return info.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def _get_faults(self, _: web.BaseRequest) -> web.StreamResponse:
        known = {**ALL_OF_REQUESTS, **OF_THE_SERVER}
        return info.json_response({"faults": self._server.faults.active, "known": known})

    async def _set_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        changes = await _read(request, dict[str, Fault | None])
        try:
            self._server.faults.set(changes)
        except ValueError as error:
            raise Refusal.value(str(error)) from None
        self._server.process.obey_faults()
        return await self._get_faults(request)

    async def _clear_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        self._server.faults.clear()
        self._server.process.obey_faults()
        return await self._get_faults(request)

    async def _die(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await _read(request, _Die)
        if not isinstance(body.restart_seconds, msgspec.UnsetType):
            self._server.restart_seconds = body.restart_seconds
        self._server.die("it was told to die", 0.05)  # when this answer is on its way
        return info.json_response(None)


async def _read(request: web.BaseRequest, shape: type[Shape]) -> Shape:
    """A JSON body; none at all counts as an empty object. Raises `Refusal`."""
    raw = await request.read()
    try:
        return msgspec.json.decode(raw or b"{}", type=shape)
    except msgspec.ValidationError as error:
        raise Refusal.body_error("value_error", "'body',", str(error).replace("'", "`")) from None
    except msgspec.DecodeError:
        raise Refusal.body_error("json_invalid", f"'body', {len(raw)}", "JSON decode error") from None
