"""One life of a simulated server: the requests in flight, the engine, the pause, the weights; gone when it dies."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from aiohttp import web

from workers.sglang.simulator import faulty, replies, streams
from workers.sglang.simulator.answers import Answer, Answers
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Load, QueueFullError
from workers.sglang.simulator.faults import Fault, Faults
from workers.sglang.simulator.info import Totals
from workers.sglang.simulator.other_answers import other_answer
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.replies import Draft, Times, Writer
from workers.sglang.simulator.requests import DeadlyRequestError, GenerateRequest, Refusal, RequestReader, new_rid
from workers.sglang.simulator.runner import Runner, refused
from workers.sglang.simulator.streams import AnswerStream
from workers.sglang.simulator.ticker import Ticker

DYING_SECONDS = 5.0  # from the scheduler's death until the connections break
NOTHING = Load(0, 0, 0, 0, 0.0)
_ABORTS = {End.ABORTED_WAITING: replies.ABORTED_WAITING, End.QUEUE_FULL: replies.QUEUE_FULL}


class Process:
    """What answers requests from one start to the next death."""

    def __init__(
        self, config: SimulatorConfig, faults: Faults, totals: Totals, die: Callable[[str, float], None]
    ) -> None:
        """`die` is told why, and after how many real seconds."""
        self.weight_version = config.weight_version
        self.draining = False
        self.reader = RequestReader(config)
        self._config = config
        self._profile = PROFILES[config.profile]
        self._faults = faults
        self._totals = totals
        self._die = die
        self._answers = Answers(config)
        self._leaks = self._profile.leaks_prompt_tail and not config.skip_tokenizer_init
        self._writer = Writer(self._profile, with_text=not config.skip_tokenizer_init)
        self._ticker = None if config.instant else Ticker(config)
        self._runner = Runner(self._ticker, totals)
        self._refused_rids: set[str] = set()
        self._unpaused = asyncio.Event()
        self._thawed = asyncio.Event()
        self._unpaused.set()
        self._thawed.set()
        self._stale: tuple[Load, Totals] | None = None
        self.obey_faults()

    def stop(self) -> None:
        """Stand still; whoever is in flight is cancelled with its connection."""
        if self._ticker is not None:
            self._ticker.stop()

    # What is seen of it.

    @property
    def stuck(self) -> bool:
        """True if nothing is generated, though it is alive."""
        return not (self._unpaused.is_set() and self._thawed.is_set())

    @property
    def in_flight(self) -> int:
        return self._runner.in_flight

    def load(self) -> Load:
        return NOTHING if self._ticker is None else self._ticker.load()

    def figures(self) -> tuple[Load, Totals]:
        """What /v1/loads and /metrics say; true unless a fault keeps it from that."""
        return self._stale or (self.load(), self._totals)

    async def thawed(self) -> None:
        """Wait until the scheduler answers."""
        await self._thawed.wait()

    # What it is told.

    def obey_faults(self) -> None:
        """Begin and end the faults of the server."""
        frozen = "frozen" in self._faults.active
        stale = frozen or "stale_loads" in self._faults.active
        self._stale = (self._stale or (self.load(), replace(self._totals))) if stale else None
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()
        if self._ticker is not None:
            self._ticker.hold("frozen") if frozen else self._ticker.release("frozen")

    def abort(self, rid_prefix: str) -> None:
        if self._ticker is None:
            return
        if self._profile.dies_of_late_aborts and self._ticker.ends_in_this_step(rid_prefix):
            self._kill("an abort met the last step of its request")
        else:
            self._ticker.abort(rid_prefix)

    def pause(self, mode: str) -> None:
        """Hold back new requests; those that run are aborted, go back into the queue (`retract`), or stand still."""
        self._unpaused.clear()
        if self._ticker is not None:
            if mode == "abort":
                self._ticker.abort("")
            self._ticker.hold("pause", retract=mode == "retract")

    def unpause(self) -> None:
        if self._ticker is not None:
            self._ticker.release("pause")
        self._unpaused.set()

    def slow_down(self, seconds: float) -> None:
        if self._ticker is not None:
            self._ticker.slow_down(seconds)

    def flush(self) -> bool:
        return self._ticker is None or self._ticker.flush()

    # /generate.

    async def generate(self, request: web.BaseRequest, raw: bytes | None = None) -> web.StreamResponse:
        """Answer a request, whose body is `raw` if not its own. Raises `Refusal` for what is answered with an error."""
        if raw is None:
            raw = await request.read()
        received = time.time()
        self._totals.taken += 1
        try:
            asked = self._read(request, raw)
        except Refusal as refusal:
            self._totals.refused += 1
            if refusal.in_stream:
                return await self._refuse_stream(request, refusal, raw, received)
            raise
        except DeadlyRequestError as error:
            self._totals.refused += 1
            return await self._die_of(error, request)
        struck = self._faults.strike(asked.input_ids) if self._faults.active else None
        if struck is not None:
            return await self._answer_badly(request, asked, received, *struck)
        return await self._answer(request, asked, received)

    def _read(self, request: web.BaseRequest, raw: bytes) -> GenerateRequest:
        _check_content_type(request)
        try:
            asked = self.reader.read(raw)
        except Refusal as refusal:
            if refusal.too_long and self._profile.keeps_refused_rids:
                self._refused_rids.add(msgspec.json.decode(raw).get("rid"))
            if not refusal.by_schema or self._profile.has_schema_gate:
                raise
            crash = Refusal.plain(500, "Internal Server Error")
            crash.stream = refusal.stream
            raise crash from None
        if self._profile.refuses_duplicate_rids and (asked.rid in self._runner.rids or asked.rid in self._refused_rids):
            duplicate = Refusal.value(f"Duplicate request ID detected: {asked.rid}")
            duplicate.stream = asked.stream
            raise duplicate
        return asked

    async def _refuse_stream(
        self, request: web.BaseRequest, refusal: Refusal, raw: bytes, received: float
    ) -> web.StreamResponse:
        if refusal.by_scheduler and self._profile.has_abort_events:
            # As observed: the scheduler puts one token in the place of the prompt, and "generates" one.
            rid = msgspec.json.decode(raw).get("rid") or new_rid()
            message = refusal.body["error"]["message"]
            reason = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
            answer = replace(self._answers.answer((0,), 1), finish_reason=reason)
            asked = GenerateRequest(rid, (0,), 1, ignore_eos=True, stop_token_ids=())
            stream = AnswerStream(request, asked, answer, self._config, self._writer)
            await stream.begin()
            times = Times(received, received, received, received)
            ids = answer.stream.json(1)
            return await stream.end(Draft(rid, 1, ids, 1, reason, self.weight_version, times))
        return await streams.refuse(request, refusal, self._config)

    async def _die_of(self, error: DeadlyRequestError, request: web.BaseRequest) -> web.StreamResponse:
        if error.stream:
            await streams.begin(request)
        if not self._config.die_on_bad_id:
            return faulty.break_connection(request, reset=False)
        self._kill("it was sent an id that its model does not have")
        return await _wait_for_the_end()

    async def _answer_badly(
        self, request: web.BaseRequest, asked: GenerateRequest, received: float, name: str, fault: Fault
    ) -> web.StreamResponse:
        self._totals.refused += 1
        if name in {"die", "poison"}:
            if asked.stream:
                await streams.begin(request)
            self._kill("a fault told it to")
            return await _wait_for_the_end()
        if name == "hang":
            await self._faults.taken_back(name, fault)
        elif (response := await faulty.before(name, fault, request)) is not None:
            return response
        self._totals.refused -= 1
        return await self._answer(request, faulty.asked_instead(name, asked), received, name, struck=fault)

    async def _answer(
        self,
        request: web.BaseRequest,
        asked: GenerateRequest,
        received: float,
        fault: str = "",
        struck: Fault | None = None,
    ) -> web.StreamResponse:
        answer = self._answers.answer(
            asked.input_ids,
            asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
            stop_token_ids=asked.stop_token_ids,
            forced_id=asked.forced_id,
        )
        if fault:
            answer = faulty.answered_instead(fault, answer, asked, self._config)
        if struck is not None:
            answer = other_answer(fault, struck, answer, asked, self._config)
        if self._leaks:
            answer = faulty.leaking(answer, asked)
        if asked.stream:
            stream = AnswerStream(request, asked, answer, self._config, self._writer)
            try:
                return await self._stream(stream, asked, answer, received, fault)
            except ConnectionError:
                return stream.response
        if self.stuck:
            await self._ready()
        draft, end = await self._runner.run(asked, answer, received, self.weight_version)
        waiting = end is End.ABORTED_WAITING
        if fault and not waiting:
            faulty.lie(fault, draft)
        body = self._writer.aborted_waiting(draft) if waiting else self._writer.reply(draft)
        if fault:
            return await faulty.deliver(fault, request, body)
        return web.Response(body=body, content_type="application/json")

    async def _ready(self) -> None:
        """Wait until nothing holds new requests back."""
        await self._unpaused.wait()
        await self._thawed.wait()

    async def _stream(
        self, stream: AnswerStream, asked: GenerateRequest, answer: Answer, received: float, fault: str
    ) -> web.StreamResponse:
        await stream.begin(fault)
        await self._ready()
        runner = self._runner
        news = asyncio.Event()
        try:
            run = runner.begin(asked, answer, received, news.set)
        except QueueFullError:
            return await stream.abort_waiting(refused(asked, received, self.weight_version))
        try:
            while True:
                if run.end is not None or stream.is_due(run.tokens):
                    draft = run.draft(self.weight_version)
                    faulty.lie(fault, draft)
                    if run.end in {End.FINISHED, End.ABORTED}:
                        return await stream.end(draft)
                    if run.end is not None:
                        return await stream.abort_waiting(draft)
                    await stream.go_on(draft)
                await news.wait()
                news.clear()
        except (asyncio.CancelledError, ConnectionError):
            runner.leave(run, self._profile.leave_seconds)
            raise

    def _kill(self, reason: str) -> None:
        """The scheduler dies at once; the rest of the server when it has seen that."""
        if self._ticker is not None:
            self._ticker.hold("dead")
        self._die(reason, self._config.real_seconds(DYING_SECONDS))


async def _wait_for_the_end() -> web.StreamResponse:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # cancelled by the death


def _check_content_type(request: web.BaseRequest) -> None:
    kind = request.headers.get("Content-Type", "")
    if not kind.startswith("application/json"):
        message = "Input should be a dictionary or an instance of GenerateReqInput"
        raise Refusal.body_error("dataclass_type", "'body',", message)
