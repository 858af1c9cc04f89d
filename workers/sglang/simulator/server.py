"""The simulated server: HTTP routes in front of the engine, on aiohttp's low-level server.

The low-level server (a dictionary of routes, no application, no middleware) is what makes 4,000 answers a second
possible on one core when answers take no time.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from common.errors import UnavailableError
from workers.sglang.simulator import info, replies
from workers.sglang.simulator.answers import Answer, Answers
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Load, QueueFullError, Sequence
from workers.sglang.simulator.requests import GenerateRequest, OutsideVocabularyError, Refusal, RequestReader
from workers.sglang.simulator.ticker import Ticker

MAX_BODY_BYTES = 1 << 30
BACKLOG = 4096
HEALTH_SECONDS = 1.0  # the real probe generates a token, and looks for it once a second
STOP_SECONDS = 0.05  # for requests to end by themselves at a stop; aiohttp would take 0 for without end
OPEN_PATHS = ("/health", "/ready", "/metrics")  # by prefix; these need no API key

Route = Callable[[web.BaseRequest], Coroutine[Any, Any, web.StreamResponse]]


class Simulator:
    """A simulated SGLang server in this process.

    `async with Simulator(config) as server:` serves at `server.url` until the block ends. `totals` counts what was
    asked and how it ended.
    """

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self.config = config or SimulatorConfig()
        self.totals = info.Totals()
        self._answers = Answers(self.config)
        self._reader = RequestReader(self.config)
        self._in_flight: set[str] = set()
        self._runner: web.ServerRunner | None = None
        self._port = 0
        self._ticker: Ticker | None = None
        self._routes = self._make_routes()

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self._port}"

    @property
    def port(self) -> int:
        """The port that is listened on, also if the settings left the choice open."""
        return self._port

    def load(self) -> Load:
        """What is running and waiting now; `tokens_per_second` is by the caller's clock."""
        return Load(0, 0, 0, 0, 0.0) if self._ticker is None else self._ticker.load()

    async def start(self) -> None:
        """Listen. Raises `UnavailableError` if the address cannot be had."""
        if not self.config.instant:
            self._ticker = Ticker(self.config)
        server = web.Server(
            self._handle,
            request_factory=_make_request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.config.keep_alive_seconds,
        )
        runner = web.ServerRunner(server, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.config.host, self.config.port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise UnavailableError(
                f"The simulator cannot listen on {self.config.host}:{self.config.port} ({error.strerror}); "
                "choose another --host or --port."
            ) from error
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and break what is in flight."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._ticker is not None:
            self._ticker.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _make_routes(self) -> dict[str, dict[str, Route]]:
        server_info: dict[str, Route] = {"GET": self._server_info}
        model_info: dict[str, Route] = {"GET": self._model_info}
        health: dict[str, Route] = {"GET": self._health}
        empty: dict[str, Route] = {"GET": self._empty}
        return {
            "/generate": {"POST": self._generate, "PUT": self._generate},
            "/abort_request": {"POST": self._abort_request},
            "/server_info": server_info,
            "/get_server_info": server_info,
            "/model_info": model_info,
            "/get_model_info": model_info,
            "/v1/models": {"GET": self._models},
            "/v1/loads": {"GET": self._loads},
            "/metrics": {"GET": self._metrics},
            "/health": health,
            "/health_generate": health,
            "/ready": empty,
            "/ping": empty,
        }

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        key = self.config.api_key
        guarded = key is not None and not path.startswith(OPEN_PATHS)
        if guarded and request.headers.get("Authorization") != f"Bearer {key}":
            return _json({"error": "Unauthorized"}, 401)
        methods = self._routes.get(path)
        if methods is None:
            return _json({"detail": "Not Found"}, 404)
        route = methods.get(request.method)
        if route is None:
            return _json({"detail": "Method Not Allowed"}, 405)
        try:
            return await route(request)
        except Refusal as refusal:
            return _json(refusal.body, refusal.status)

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        received = time.time()
        self.totals.taken += 1
        try:
            _check_content_type(request)
            asked = self._reader.read(raw)
            if asked.rid in self._in_flight:
                raise Refusal.value(f"Duplicate request ID detected: {asked.rid}")
            answer = self._answers.answer(
                asked.input_ids,
                asked.max_new_tokens,
                ignore_eos=asked.ignore_eos,
                stop_token_ids=asked.stop_token_ids,
            )
            if self._ticker is None:
                return self._answer_at_once(asked, answer, received)
            return await self._answer_in_time(asked, answer, received, self._ticker)
        except Refusal:
            self.totals.refused += 1
            raise
        except OutsideVocabularyError:
            self.totals.refused += 1
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=500)

    def _answer_at_once(self, asked: GenerateRequest, answer: Answer, received: float) -> web.Response:
        prompt_tokens = len(asked.input_ids)
        tokens = answer.completion_tokens
        self._count(End.FINISHED, prompt_tokens, tokens)
        body = replies.reply(
            asked.rid,
            prompt_tokens=prompt_tokens,
            output_ids=answer.stream.json(tokens),
            completion_tokens=tokens,
            finish_reason=answer.finish_reason,
            weight_version=self.config.weight_version,
            times=replies.Times(received, received, received, received),
        )
        return web.Response(body=body, content_type="application/json")

    async def _answer_in_time(
        self, asked: GenerateRequest, answer: Answer, received: float, ticker: Ticker
    ) -> web.Response:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(sequence: Sequence) -> None:
            assert sequence.end is not None
            self._in_flight.discard(sequence.rid)
            self._count(sequence.end, sequence.prompt_tokens, sequence.generated_tokens)
            if not ended.done():
                ended.set_result(None)

        sequence = Sequence(
            rid=asked.rid,
            prompt_tokens=len(asked.input_ids),
            max_new_tokens=asked.max_new_tokens,
            completion_tokens=answer.completion_tokens,
            on_end=on_end,
            latency_seconds=answer.latency_seconds,
        )
        try:
            ticker.submit(sequence)
        except QueueFullError:
            raise Refusal.http(503, "The request queue is full.") from None
        self._in_flight.add(sequence.rid)
        try:
            await ended
        except asyncio.CancelledError:
            ticker.abort_at_next_poll(sequence)
            raise
        return web.Response(body=self._body(sequence, answer, received, ticker), content_type="application/json")

    def _body(self, sequence: Sequence, answer: Answer, received: float, ticker: Ticker) -> bytes:
        finished = ticker.unix(sequence.ended_at)
        if sequence.end is End.ABORTED_WAITING:
            return replies.aborted_waiting(
                sequence.rid, weight_version=self.config.weight_version, received=received, finished=finished
            )
        assert sequence.admitted_at is not None
        assert sequence.first_token_at is not None
        return replies.reply(
            sequence.rid,
            prompt_tokens=sequence.prompt_tokens,
            output_ids=answer.stream.json(sequence.generated_tokens),
            completion_tokens=sequence.generated_tokens,
            finish_reason=answer.finish_reason if sequence.end is End.FINISHED else replies.ABORTED,
            weight_version=self.config.weight_version,
            times=replies.Times(
                received, ticker.unix(sequence.admitted_at), ticker.unix(sequence.first_token_at), finished
            ),
        )

    def _count(self, end: End, prompt_tokens: int, completion_tokens: int) -> None:
        totals = self.totals
        if end is End.FINISHED:
            totals.finished += 1
        else:
            totals.aborted += 1
        if end is not End.ABORTED_WAITING:
            totals.prompt_tokens += prompt_tokens
            totals.completion_tokens += completion_tokens

    async def _abort_request(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = msgspec.json.decode(raw, type=_AbortBody)
        except msgspec.DecodeError:
            raise Refusal.body_error("json_invalid", f"'body', {len(raw)}", "JSON decode error") from None
        if self._ticker is not None and (body.rid or body.abort_all):
            self._ticker.abort("" if body.abort_all else body.rid)
        return web.Response()

    async def _server_info(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(info.server_info(self.config, self._port, self._reader.max_req_input_len, self.load()))

    async def _model_info(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(info.model_info(self.config))

    async def _models(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(info.models(self.config))

    async def _loads(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(info.loads(self.config, self.load()))

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = info.metrics(self.config, self.load(), self.totals)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        if not self.config.instant:
            await asyncio.sleep(HEALTH_SECONDS / self.config.speed)
        return web.Response()

    async def _empty(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response()


class _AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


def _make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


def _check_content_type(request: web.BaseRequest) -> None:
    kind = request.headers.get("Content-Type", "")
    if not kind.startswith("application/json"):
        message = "Input should be a dictionary or an instance of GenerateReqInput"
        raise Refusal.body_error("dataclass_type", "'body',", message)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
