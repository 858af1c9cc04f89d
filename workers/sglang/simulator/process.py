"""One life of a simulated server: the requests in flight, the engine, the pause, the weights; gone when it dies."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from aiohttp import web

from workers.sglang.simulator import faulty, replies
from workers.sglang.simulator.answers import Answer, Answers
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Load, QueueFullError, Sequence
from workers.sglang.simulator.faults import Fault, Faults
from workers.sglang.simulator.info import Totals
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.replies import Draft, Times, Writer
from workers.sglang.simulator.requests import DeadlyRequestError, GenerateRequest, Refusal, RequestReader
from workers.sglang.simulator.ticker import Ticker

DYING_SECONDS = 5.0  # from the scheduler's death until the connections break
NOTHING = Load(0, 0, 0, 0, 0.0)


class Process:
    """What answers requests from one start to the next death."""

    def __init__(
        self, config: SimulatorConfig, faults: Faults, totals: Totals, die: Callable[[str, float], None]
    ) -> None:
        """`die` is told why, and after how many real seconds."""
        self.weight_version = config.weight_version
        self.draining = False
        self.in_flight = 0
        self.reader = RequestReader(config)
        self._config = config
        self._profile = PROFILES[config.profile]
        self._faults = faults
        self._totals = totals
        self._die = die
        self._answers = Answers(config)
        self._writer = Writer(self._profile, with_text=not config.skip_tokenizer_init)
        self._ticker = None if config.instant else Ticker(config)
        self._rids: set[str] = set()
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

    async def generate(self, request: web.BaseRequest) -> web.StreamResponse:
        """Raises `Refusal` for what is answered with an error."""
        raw = await request.read()
        received = time.time()
        self._totals.taken += 1
        try:
            asked = self._read(request, raw)
        except Refusal:
            self._totals.refused += 1
            raise
        except DeadlyRequestError:
            self._totals.refused += 1
            if not self._config.die_on_bad_id:
                return faulty.break_connection(request, reset=False)
            self._kill("it was sent an id that its model does not have")
            return await _wait_for_the_end()
        struck = self._faults.strike(asked.input_ids) if self._faults.active else None
        if struck is not None:
            return await self._answer_badly(request, asked, received, *struck)
        draft, waiting = await self._run(asked, received)
        return web.Response(body=self._body(draft, asked, waiting=waiting), content_type="application/json")

    def _read(self, request: web.BaseRequest, raw: bytes) -> GenerateRequest:
        _check_content_type(request)
        try:
            asked = self.reader.read(raw)
        except Refusal as refusal:
            if refusal.by_schema and not self._profile.has_schema_gate:
                raise Refusal.plain(500, "Internal Server Error") from None
            if refusal.too_long and self._profile.keeps_refused_rids:
                self._refused_rids.add(msgspec.json.decode(raw).get("rid"))
            raise
        if self._profile.refuses_duplicate_rids and (asked.rid in self._rids or asked.rid in self._refused_rids):
            raise Refusal.value(f"Duplicate request ID detected: {asked.rid}")
        return asked

    async def _answer_badly(
        self, request: web.BaseRequest, asked: GenerateRequest, received: float, name: str, fault: Fault
    ) -> web.StreamResponse:
        if name in {"die", "poison"}:
            self._totals.refused += 1
            self._kill("a fault told it to")
            return await _wait_for_the_end()
        self._totals.refused += 1
        if (response := await faulty.before(name, fault, request)) is not None:
            return response
        self._totals.refused -= 1
        asked = faulty.asked_instead(name, asked)
        draft, waiting = await self._run(asked, received)
        if not waiting:
            faulty.lie(name, draft, asked, self._config)
        return await faulty.deliver(name, request, self._body(draft, asked, waiting=waiting))

    def _body(self, draft: Draft, asked: GenerateRequest, *, waiting: bool) -> bytes:
        if waiting:
            return self._writer.aborted_waiting(draft)
        if self._profile.leaks_prompt_tail and not self._config.skip_tokenizer_init:
            faulty.lie("prompt_leak", draft, asked, self._config)
        return self._writer.reply(draft)

    async def _run(self, asked: GenerateRequest, received: float) -> tuple[Draft, bool]:
        """What became of a request, and whether it was aborted in the queue."""
        if self.stuck:
            await self._unpaused.wait()
            await self._thawed.wait()
        answer = self._answers.answer(
            asked.input_ids,
            asked.max_new_tokens,
            ignore_eos=asked.ignore_eos,
            stop_token_ids=asked.stop_token_ids,
            forced_id=asked.forced_id,
        )
        if self._ticker is None:
            return self._at_once(asked, answer, received), False
        return await self._in_time(asked, answer, received, self._ticker)

    def _at_once(self, asked: GenerateRequest, answer: Answer, received: float) -> Draft:
        tokens = answer.completion_tokens
        self._count(End.FINISHED, len(asked.input_ids), tokens)
        return Draft(
            asked.rid,
            len(asked.input_ids),
            answer.stream.json(tokens),
            tokens,
            answer.finish_reason,
            self.weight_version,
            Times(received, received, received, received),
        )

    async def _in_time(
        self, asked: GenerateRequest, answer: Answer, received: float, ticker: Ticker
    ) -> tuple[Draft, bool]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(sequence: Sequence) -> None:
            assert sequence.end is not None
            self.in_flight -= 1
            self._rids.discard(sequence.rid)
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
            input_ids=asked.input_ids,
            ignore_eos=asked.ignore_eos,
        )
        try:
            ticker.submit(sequence)
        except QueueFullError:
            self._totals.refused += 1
            raise Refusal.queue_full() from None
        self.in_flight += 1
        self._rids.add(sequence.rid)
        try:
            await ended
        except asyncio.CancelledError:
            ticker.abort_at_next_poll(sequence)
            raise
        if sequence.end is End.QUEUE_FULL:
            raise Refusal.queue_full()
        return self._draft(sequence, answer, received, ticker), sequence.end is End.ABORTED_WAITING

    def _draft(self, sequence: Sequence, answer: Answer, received: float, ticker: Ticker) -> Draft:
        finished = ticker.unix(sequence.ended_at)
        admitted = finished if sequence.admitted_at is None else ticker.unix(sequence.admitted_at)
        first_token = finished if sequence.first_token_at is None else ticker.unix(sequence.first_token_at)
        return Draft(
            sequence.rid,
            sequence.prompt_tokens,
            answer.stream.json(sequence.generated_tokens),
            sequence.generated_tokens,
            answer.finish_reason if sequence.end is End.FINISHED else replies.ABORTED,
            self.weight_version,
            Times(received, admitted, first_token, finished),
            sequence.cached_tokens or 0,
            sequence.num_retractions,
        )

    def _count(self, end: End, prompt_tokens: int, completion_tokens: int) -> None:
        totals = self._totals
        if end is End.FINISHED:
            totals.finished += 1
        elif end is End.QUEUE_FULL:
            totals.refused += 1
        else:
            totals.aborted += 1
        if end in {End.FINISHED, End.ABORTED}:
            totals.prompt_tokens += prompt_tokens
            totals.completion_tokens += completion_tokens

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
