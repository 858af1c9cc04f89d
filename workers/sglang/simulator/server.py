"""The simulated server: HTTP routes in front of one process after another, on aiohttp's low-level server.

The low-level server (a dictionary of routes, no application, no middleware) is what makes 4,000 answers a second
possible on one core when answers take no time.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Self

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from common.errors import UnavailableError
from workers.sglang.simulator import info
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.control import Control
from workers.sglang.simulator.engine import Load
from workers.sglang.simulator.faults import Faults, parse
from workers.sglang.simulator.process import NOTHING, Process
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.requests import Refusal
from workers.sglang.simulator.router import Router

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 30
BACKLOG = 4096
HEALTH_SECONDS = 1.0  # the real probe generates a token, and looks for it once a second
HEALTH_LIMIT_SECONDS = 20.0  # and gives up then
DRAIN_POLL_SECONDS = 5.0  # how often the real server, told to end, looks whether requests are left
STOP_SECONDS = 0.05  # for requests to end by themselves at a stop; aiohttp would take 0 for without end
# By prefix; these need no API key.
OPEN_PATHS = ("/health", "/ready", "/readiness", "/liveness", "/metrics", "/engine_metrics", "/_sim/")

Route = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


class Simulator:
    """A simulated SGLang server in this process.

    `async with Simulator(config) as server:` serves at `server.url` until the block ends. `totals` counts what was
    asked and how it ended, over all its lives; `faults` says what is wrong with it. A server that has died (`die`, a
    fault, an id that its model does not have) refuses connections: for ever, until `restart`, or for
    `restart_seconds`; it comes back on the same port with nothing in it. `dead` is set meanwhile, `death` says why.
    With `router` it is the server behind a router that dies, and the router that is talked to; see router.py.
    """

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self.config = config or SimulatorConfig()
        self.totals = info.Totals()
        self.faults = Faults(self.config.seed)
        self.faults.set(dict(parse(text) for text in self.config.faults))
        self.dead = asyncio.Event()
        self.death = ""
        self.restart_seconds = self.config.restart_seconds
        self._process: Process | None = None
        self._server: web.Server | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._port = self.config.port
        self._dying: asyncio.Task[None] | None = None
        self._routes = self._make_routes()
        self._router = Router(self) if self.config.router else None
        if self._router is not None:
            self._routes = self._router.routes(self._routes)

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self._port}"

    @property
    def port(self) -> int:
        """The port that is listened on, also if the settings left the choice open."""
        return self._port

    @property
    def process(self) -> Process:
        """What answers now; only a server that has started has one."""
        assert self._process is not None
        return self._process

    def load(self) -> Load:
        """What is running and waiting now; `tokens_per_second` is by the caller's clock."""
        return NOTHING if self._process is None else self._process.load()

    async def start(self) -> None:
        """Listen. Raises `UnavailableError` if the address cannot be had."""
        self._server = web.Server(
            self._handle,
            request_factory=_make_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.config.keep_alive_seconds,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=STOP_SECONDS)
        await self._runner.setup()
        try:
            await self.restart()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            raise UnavailableError(
                f"The simulator cannot listen on {self.config.host}:{self.config.port} ({error.strerror}); "
                "choose another --host or --port."
            ) from error

    async def stop(self) -> None:
        """Stop listening and break what is in flight."""
        if self._dying is not None:
            self._dying.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._process is not None:
            self._process.stop()

    async def drain(self) -> None:
        """What the real server does at SIGTERM: /health says 503, and it goes on until no request is left."""
        self.process.draining = True
        while self.process.in_flight and not self.dead.is_set():  # noqa: ASYNC110  # the real one polls, too
            await asyncio.sleep(self.config.real_seconds(DRAIN_POLL_SECONDS))

    def die(self, reason: str, after_seconds: float = 0.0) -> None:
        """Break every connection and refuse new ones, `after_seconds` (real ones) from now."""
        if self._dying is None or self._dying.done():
            self._dying = asyncio.get_running_loop().create_task(self._die(reason, after_seconds))

    async def restart(self) -> None:
        """Listen again, on the same port, with nothing running and nothing cached."""
        assert self._runner is not None
        self._process = Process(self.config, self.faults, self.totals, self.die)
        if self._site is None:
            await self._listen()
        self.dead.clear()

    async def _listen(self) -> None:
        assert self._runner is not None
        site = web.TCPSite(self._runner, self.config.host, self._port, backlog=BACKLOG)
        await site.start()
        self._site = site
        self._port = self._runner.addresses[0][1]

    async def _die(self, reason: str, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        self.death = reason
        self.process.stop()
        if self._router is not None:
            self.dead.set()
            self._router.break_calls()
        else:
            await self._stop_listening()
            self.dead.set()
        if self.restart_seconds is not None:
            await asyncio.sleep(self.restart_seconds)
            try:
                await self.restart()
            except OSError as error:
                log.error("The simulated server cannot come back on port %d: %s", self._port, error.strerror)

    async def _stop_listening(self) -> None:
        assert self._site is not None
        assert self._server is not None
        await self._site.stop()
        self._site = None
        for connection in list(self._server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _make_routes(self) -> dict[str, dict[str, Route]]:
        profile = PROFILES[self.config.profile]
        server_info: dict[str, Route] = {"GET": self._server_info}
        model_info: dict[str, Route] = {"GET": self._model_info}
        health: dict[str, Route] = {"GET": self._health}
        routes: dict[str, dict[str, Route]] = {
            "/generate": {"POST": self._generate, "PUT": self._generate},
            "/get_server_info": server_info,
            "/get_model_info": model_info,
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._metrics},
            "/health": health,
            "/health_generate": health,
            "/ping": {"GET": self._ping},
            **Control(self).routes(),
        }
        if self.config.tokenizer is not None:
            routes["/tokenize"] = {"POST": self._tokenize}
        if profile.has_short_info_names:
            routes |= {"/server_info": server_info, "/model_info": model_info}
        if profile.has_v1_loads:
            routes["/v1/loads"] = {"GET": self._loads}
        if profile.has_get_load:
            routes["/get_load"] = {"GET": self._get_load}
        if profile.has_ready:
            routes["/ready"] = {"GET": self._ready}
        return routes

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        key = self.config.api_key
        guarded = key is not None and not path.startswith(OPEN_PATHS)
        if guarded and request.headers.get("Authorization") != f"Bearer {key}":
            return info.json_response({"error": "Unauthorized"}, 401)
        methods = self._routes.get(path)
        if methods is None:
            return self._nothing(404, "Not Found")
        route = methods.get(request.method)
        if route is None:
            return self._nothing(405, "Method Not Allowed")
        try:
            return await route(request)
        except Refusal as refusal:
            if refusal.text is not None:
                return web.Response(text=refusal.text, status=refusal.status)
            return info.json_response(refusal.body, refusal.status)

    def _nothing(self, status: int, message: str) -> web.StreamResponse:
        return web.Response(status=status) if self.config.router else info.json_response({"detail": message}, status)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.process.generate(request)

    async def _server_info(self, _: web.BaseRequest) -> web.StreamResponse:
        process = self.process
        await process.thawed()
        return info.json_response(
            info.server_info(self.config, self._port, process.reader.max_req_input_len, self.load())
        )

    async def _model_info(self, _: web.BaseRequest) -> web.StreamResponse:
        return info.json_response(info.model_info(self.config, self.process.weight_version))

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        return info.json_response(info.tokenized(self.config, await request.read()))

    async def _models(self, _: web.BaseRequest) -> web.StreamResponse:
        return info.json_response(info.models(self.config))

    async def _loads(self, _: web.BaseRequest) -> web.StreamResponse:
        return info.json_response(info.loads(self.config, self.process.figures()[0]))

    async def _get_load(self, _: web.BaseRequest) -> web.StreamResponse:
        return info.json_response(info.get_load(self.process.figures()[0]))

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = info.metrics(self.config, *self.process.figures())
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        fault = self.faults.active.get("false_health")
        if fault is not None:
            fault.struck += 1
            await asyncio.sleep(self.config.real_seconds(fault.seconds))
            return web.Response(status=503)
        if self.process.draining:
            return web.Response(status=503)
        waited = HEALTH_LIMIT_SECONDS if self.process.stuck else HEALTH_SECONDS
        await asyncio.sleep(self.config.real_seconds(waited))
        return web.Response(status=503 if self.process.stuck else 200)

    async def _ready(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=503 if self.process.draining or self.process.stuck else 200)

    async def _ping(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response()


def _make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)
