"""A simulated router in front of the simulated server: sgl-model-gateway with one HTTP worker, from its source.

- /generate is read into the fields that the gateway knows and written anew, so all others are dropped without a word:
  of the body `routed_dp_rank`, `session_id`, `routing_key`, `cache_salt`, `return_prompt_token_ids` and more, of the
  sampling parameters `logit_bias`, `custom_params`, `stop_regex`, `structural_tag`, `stream_interval`, `beam_width`,
  `spaces_between_special_tokens`; and a null (`max_new_tokens: null`) is as if it were not there. A body that does not
  fit is refused in plain text: 400 for no JSON, 415 for another content type, 422 for a wrong type.
- /health and /liveness answer 200 at once, whatever the server does; /readiness tells whether there is one. /workers
  lists it. /v1/loads is the gateway's own, with one number for each worker: what its /get_load says, or -1.
- /server_info, /model_info, /v1/models and /health_generate are the server's. There is no /abort_request, no pause, no
  /slow_down, no new weights, no /metrics (but /engine_metrics): 404. A caller who closes his connection aborts his
  request, as he does without a router.
- When the server behind it dies, the router stays. Calls in flight get 500, streams break, new calls get 503 ("No
  available workers") until the server is back. The routes under /_sim/ are there all the time.

Not played: several workers, the gateway's own retries (up to 5, with the same rid), its circuit breaker, which a server
that is back has to close first, and its queue. Faults that break a connection break the caller's.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from workers.sglang.simulator import faulty, info
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.requests import Refusal

if TYPE_CHECKING:
    from workers.sglang.simulator.server import Simulator

WORKER_ID = "00000000-0000-4000-8000-000000000001"
WORKER_URL = "http://simulated-worker:30000"

Route = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


class _SamplingParams(msgspec.Struct, omit_defaults=True):
    """What the gateway knows of the sampling parameters."""

    temperature: float | None = None
    max_new_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None


class _Body(msgspec.Struct, omit_defaults=True):
    """What the gateway knows of a body and the simulated server can use; the ids are handed on as they came."""

    input_ids: msgspec.Raw = msgspec.Raw()
    text: str | None = None
    sampling_params: _SamplingParams | None = None
    stream: bool = False
    rid: str | None = None
    model: str | None = None


class Router:
    """The routes of a router in front of one simulated server, and the calls that are on their way through it."""

    def __init__(self, server: "Simulator") -> None:
        self._server = server
        self._calls: set[asyncio.Task[Any]] = set()
        self._broken: set[asyncio.Task[Any]] = set()
        self._decoder = msgspec.json.Decoder(_Body)
        self._encoder = msgspec.json.Encoder()

    def routes(self, of_the_server: dict[str, dict[str, Route]]) -> dict[str, dict[str, Route]]:
        """What the router has of its own, and of what the server has."""
        routes: dict[str, dict[str, Route]] = {
            "/generate": {"POST": self._generate},
            "/health": {"GET": self._live},
            "/liveness": {"GET": self._live},
            "/readiness": {"GET": self._readiness},
            "/workers": {"GET": self._workers},
            "/v1/loads": {"GET": self._loads},
            "/get_loads": {"GET": self._loads},
            "/flush_cache": {"POST": self._flush_cache},
            "/engine_metrics": {"GET": self._proxied(of_the_server["/metrics"]["GET"])},
        }
        for name in ("server_info", "model_info"):
            proxied = self._proxied(of_the_server[f"/get_{name}"]["GET"])
            routes[f"/{name}"] = routes[f"/get_{name}"] = {"GET": proxied}
        for path in ("/v1/models", "/health_generate"):
            routes[path] = {"GET": self._proxied(of_the_server[path]["GET"])}
        return routes | {path: route for path, route in of_the_server.items() if path.startswith("/_sim/")}

    def break_calls(self) -> None:
        """The server has died: end what was on its way to it."""
        self._broken |= self._calls
        for call in self._calls:
            call.cancel()

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await self._read(request)
        if self._server.dead.is_set():
            return _error(503, "no_available_workers", "No available workers (all circuits open or unhealthy)")
        raw = self._encoder.encode(body)
        return await self._through(request, self._server.process.generate(request, raw), begun=body.stream)

    async def _read(self, request: web.BaseRequest) -> _Body:
        if not request.headers.get("Content-Type", "").startswith("application/json"):
            raise Refusal.plain(415, "Expected request with `Content-Type: application/json`")
        try:
            return self._decoder.decode(await request.read())
        except msgspec.ValidationError as error:
            message = f"Failed to deserialize the JSON body into the target type: {error}"
            raise Refusal.plain(422, message) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal.plain(400, f"Failed to parse the request body as JSON: {error}") from None

    async def _through(
        self, request: web.BaseRequest, call: Coroutine[Any, Any, web.StreamResponse], *, begun: bool = False
    ) -> web.StreamResponse:
        """What the server answers, or what the router says if it dies meanwhile; a stream has `begun` and breaks."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await call
        except asyncio.CancelledError:
            if task not in self._broken:
                raise  # the caller has left
            task.uncancel()
        finally:
            self._calls.discard(task)
            self._broken.discard(task)
        if begun:
            return faulty.break_connection(request, reset=False)
        url = f"{WORKER_URL}{request.raw_path}"
        return _error(500, "call_upstream_request_error", f"error sending request for url ({url}). URL: {url}")

    def _proxied(self, route: Route) -> Route:
        async def proxied(request: web.BaseRequest) -> web.StreamResponse:
            if self._server.dead.is_set():
                return _error(503, "no_workers", "No workers are available")
            return await self._through(request, route(request))

        return proxied

    async def _live(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="OK")

    async def _readiness(self, _: web.BaseRequest) -> web.StreamResponse:
        if self._server.dead.is_set():
            return info.json_response({"status": "not ready", "reason": "insufficient healthy workers"}, 503)
        return info.json_response({"status": "ready", "healthy_workers": 1, "total_workers": 1})

    async def _workers(self, _: web.BaseRequest) -> web.StreamResponse:
        worker = {
            "id": WORKER_ID,
            "url": WORKER_URL,
            "model_id": self._server.config.model_path,
            "priority": 50,
            "cost": 1.0,
            "worker_type": "regular",
            "is_healthy": not self._server.dead.is_set(),
            "load": len(self._calls),
            "connection_mode": "Http",
        }
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": 1}
        return info.json_response({"workers": [worker], "total": 1, "stats": stats})

    async def _loads(self, _: web.BaseRequest) -> web.StreamResponse:
        load = -1
        if PROFILES[self._server.config.profile].has_get_load and not self._server.dead.is_set():
            [rank] = info.get_load(self._server.process.figures()[0])
            load = rank["num_tokens"]
        return info.json_response({"workers": [{"worker": WORKER_URL, "load": load}]})

    async def _flush_cache(self, _: web.BaseRequest) -> web.StreamResponse:
        flushed = not self._server.dead.is_set() and self._server.process.flush()
        body: dict[str, Any] = {
            "status": "success" if flushed else "partial_success",
            "message": "Successfully flushed cache on all 1 HTTP workers"
            if flushed
            else "Cache flush completed: 0 succeeded, 1 failed (out of 1 HTTP workers)",
            "workers_flushed": int(flushed),
            "total_http_workers": 1,
            "total_workers": 1,
        }
        if not flushed:
            body |= {"successful": [], "failed": [{"worker": WORKER_URL, "error": "HTTP 400 Bad Request"}]}
        return info.json_response(body, 200 if flushed else 206)


def _error(status: int, code: str, message: str) -> web.Response:
    kind = {500: "internal_server_error", 503: "service_unavailable"}[status]
    return info.json_response({"error": {"code": code, "message": message, "type": kind}}, status)
