"""One generate worker put together: connections, client, segment writer, leases."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import redis

from common.broker import GENERATE_QUEUE, waiting_messages
from common.errors import ConfigError, RedisUnavailable, ServerRefused, ServerUnavailable
from common.ledger import Ledger
from common.logs import about
from common.run_file import FORCED
from common.sections import DatasetSettings
from common.servers import urls_in_use
from common.settings import Settings
from workers.commits import Commits
from workers.doctor.start import is_known, look_at
from workers.generation import Generation
from workers.governor import Governor
from workers.leases import Leases
from workers.life import Life
from workers.marking import Markers
from workers.samples import Doorbell
from workers.segment_writer import SegmentWriter
from workers.sglang.answer import Acceptance
from workers.sglang.client import Sampling, SGLangClient
from workers.sglang.preflight import ServerFacts, read_facts, refuse, refuse_other_model
from workers.sglang.server import Server
from workers.sglang.watch import Patience

log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.5
# How often it is looked whether a server was added or is to be drained, and whether messages wait that do not come.
_LOOK_SECONDS = 2.0
_GOODBYE_SECONDS = 2.0


class Service:
    """Owns everything that lives in the generation's loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        owner: str,
        concurrency: int,
        reconnect: Callable[[], None] = lambda: None,
        on_slots: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`owner` is the Celery host name, such as `w1@host`; `concurrency` the most answers in flight.

        `reconnect` lets the consumer of messages connect anew; it is called where messages wait and none comes.
        `on_slots` is told how many answers may be in flight now, whenever that changes.
        """
        self._settings = settings
        self._owner = owner
        self._concurrency = concurrency
        self._on_slots = on_slots
        self._reconnect = reconnect
        self._deaf = Deafness(settings.worker.lease_seconds)
        self._samplings: dict[bytes, Sampling] = {}  # by spec
        self._early: deque[Doorbell] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._generation: Generation | None = None
        self.life = Life(settings.worker.drain_seconds)
        # Until the model is known: nothing is told of this worker after it has said goodbye.
        self._idle = threading.Lock()
        self._has_begun = self._has_ended = False

    async def start(self) -> None:
        """Begin; returns at once. Messages that come before the model is known wait."""
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._starting.add_done_callback(_end_if_failed)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._generation is None:
            try:
                model = await loop.run_in_executor(None, self._wait_for_model)
                if model is not None:
                    markers = await loop.run_in_executor(None, Markers, self._settings, model)
                    self._assemble(model, markers)
                    self._following = loop.create_task(self._follow())
                    break
            except (redis.RedisError, RedisUnavailable) as error:
                log.warning("%s", error)
            # Written by `enqueue` and `run` before the first sample: nothing can be missed by waiting.
            await asyncio.sleep(_WAIT_SECONDS)
        while self._early:
            self.ring(self._early.popleft())

    def _wait_for_model(self) -> dict[str, Any] | None:
        """Say that this worker waits, and look; obey who tells it to end meanwhile. Called in a thread."""
        ledger = Ledger.connect(self._settings.redis_url)
        try:
            if not self._has_begun:
                ledger.order(self._owner, None)  # what an earlier worker of this name was told
                self._has_begun = True
            with self._idle:
                if (model := ledger.model()) is None and not self._has_ended:
                    ledger.heartbeat(self._owner, self._idle_facts())
                    if (order := ledger.order_for(self._owner)) is not None:
                        ledger.order(self._owner, None)
                        self.life.obey(order)
                return model
        finally:
            ledger.close()

    def _idle_facts(self) -> dict[str, Any]:
        counts = {"concurrency": self._concurrency, "limit": 0, "in_flight": 0, "ended": 0, "superseded": 0}
        return {"kind": "worker", **counts, "trouble": "", "servers": [], **self.life.facts()}

    def _facts(self) -> dict[str, Any]:
        assert self._generation is not None
        facts = self._generation.facts() | self.life.facts()
        # One that takes nothing new has no slots: the keeper sends nothing for them.
        return facts | {"limit": 0} if self.life.ending else facts

    def _assemble(self, model: Mapping[str, Any], markers: Markers) -> None:
        settings = self._settings
        vocab_size = int(model["vocab_size"])
        self._model = model
        self._client = SGLangClient(
            settings.server.urls,
            acceptance=Acceptance(vocab_size, model.get("weight_version")),
            sampling_params=settings.sampling.params(),
            api_key_of=settings.api_key_of,
            max_connections=max(self._concurrency, 1024),
            inspect=self._inspect,
            patience=Patience(answer_seconds=settings.server.request_timeout_seconds),
            governor=self._governor if settings.worker.governed else None,
            load_seconds=settings.worker.load_seconds,
        )
        self._commits = Commits(
            ledger=Ledger.connect(settings.redis_url),
            writer=SegmentWriter(settings.output, self._owner.replace("@", "-"), settings.worker.segment_bytes),
            output=settings.output,
            commit_seconds=settings.worker.commit_seconds,
        )
        self._leases = Leases(Ledger.connect(settings.redis_url), self._owner, settings.worker.lease_seconds)
        self._generation = Generation(
            owner=self._owner,
            concurrency=self._concurrency,
            lease_seconds=settings.worker.lease_seconds,
            vocab_size=vocab_size,
            client=self._client,
            ledger=Ledger.connect(settings.redis_url),
            commits=self._commits,
            leases=self._leases,
            sampling_of=self._sampling_of,
            marker_of=markers.of,
        )
        self._commits.on_committed = self._generation.committed
        self._generation.on_slots = self._on_slots
        self.life.state = "working"
        self._leases.start(self._facts, self._generation.clocks, self.life.obey)
        self._client.start(self._generation.slots_changed)

    def _sampling_of(self, spec: bytes) -> Sampling:
        """How the answers of a dataset are asked for, given its spec in the ledger, whoever registered it."""
        if spec not in self._samplings:
            # What else is there may be of a version to come, and is not this worker's.
            told = msgspec.json.decode(spec or b"{}", type=dict[str, Any])
            own = {key: told[key] for key in ("max_new_tokens", "sampling") if key in told}
            dataset = DatasetSettings(name="told", path=Path(), **own)
            self._samplings[spec] = Sampling.of(self._settings.sampling_of(dataset).params())
        return self._samplings[spec]

    def _governor(self) -> Governor:
        worker = self._settings.worker
        return Governor(
            capacity_tokens=None,
            max_new_tokens=self._settings.sampling.max_new_tokens,
            least=worker.least_in_flight,
            most=worker.most_in_flight,
            phase=random.random(),
        )

    async def _inspect(self, server: Server) -> None:
        """Whether `server` can be used for this run: raises ServerUnavailable or ServerRefused."""
        try:
            facts = await read_facts(server.url, self._settings.api_key_of(server.url), self._client.http)
        except ServerRefused as error:
            if server.version is None:
                raise
            # It was SGLang before. What stands in front of it may show a page of its own while it restarts.
            raise ServerUnavailable(str(error)) from None
        server.version, server.takes_aborts = facts.version, facts.takes_aborts
        refuse(facts)
        refuse_other_model(facts, self._model)
        await self._look_at(facts)

    async def _look_at(self, facts: ServerFacts) -> None:
        """Check a server that is not like those that the job's start has looked at; raises ServerRefused."""
        if is_known(facts, self._model.get("servers", ())):
            return
        key = self._settings.api_key_of(facts.url)
        for check in await look_at(facts, key, self._client.http, self._settings, self._model.get("context_length")):
            if check.state == "wrong" and not self._model.get(FORCED):
                raise ServerRefused(check.sentence)
            log.warning("%s", check.sentence, extra=about(server=facts.url))

    async def _follow(self) -> None:
        """Take servers that are added to the running job, drain those that are taken from it, notice deafness."""
        loop = asyncio.get_running_loop()
        ledger = Ledger.connect(self._settings.redis_url)
        try:
            while True:
                try:
                    changes = await loop.run_in_executor(None, ledger.server_changes)
                    self._client.set_urls(urls_in_use(self._settings.server.urls, changes))
                    self._client.steering.workers = len(await loop.run_in_executor(None, ledger.live_workers)) or 1
                    await self._notice_deafness(ledger)
                except redis.RedisError as error:
                    log.warning("changes of servers are not seen, Redis does not answer: %s", error)
                    self._deaf.told(False, time.monotonic())
                except ConfigError as error:  # an API key that cannot be read
                    log.error("a server was not added: %s", error)
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            ledger.close()

    async def _notice_deafness(self, ledger: Ledger) -> None:
        """A worker that gets none of the messages that wait connects anew, and ends if that does not help."""
        waiting = await asyncio.get_running_loop().run_in_executor(None, waiting_messages, ledger.redis, GENERATE_QUEUE)
        starves = waiting > 0 and self._generation is not None and self._generation.starves
        match self._deaf.told(starves, time.monotonic()):
            case "reconnect":
                log.error("%d messages wait and this worker gets none; it connects to Redis anew", waiting)
                self._reconnect()
            case "end":
                log.critical("%d messages wait and this worker still gets none; it ends, to be started again", waiting)
                os.kill(os.getpid(), signal.SIGTERM)

    def ring(self, bell: Doorbell) -> None:
        """Take a message in."""
        if self._generation is None:
            self._early.append(bell)
        else:
            self._generation.ring(bell)

    def set_concurrency(self, concurrency: int) -> None:
        """Change how many answers may be in flight at most."""
        self._concurrency = concurrency
        if self._generation is not None:
            self._generation.set_concurrency(concurrency)

    def hurry(self) -> None:
        """End a drain that is under way, or to come: give back what is in flight."""
        if self._generation is not None:
            self._generation.hurry()

    async def stop(self, drain_seconds: float) -> None:
        """Drain, give back, close; leases are renewed until the last answer is committed."""
        for task in (self._starting, self._following):
            if task is not None:
                task.cancel()
        if self._generation is None:
            await asyncio.get_running_loop().run_in_executor(None, self._say_goodbye)
            return
        await self._generation.drain(drain_seconds)
        await self._client.aclose()
        await asyncio.get_running_loop().run_in_executor(None, self._leases.stop)
        self._commits.close()

    def _say_goodbye(self) -> None:
        self._has_ended = True
        if not self._idle.acquire(timeout=_GOODBYE_SECONDS):
            return  # Redis stands still; this worker was never given anything
        with contextlib.suppress(RedisUnavailable, redis.RedisError):
            ledger = Ledger.connect(self._settings.redis_url, attempts=1)
            ledger.heartbeat(self._owner, None)
            ledger.close()


class Deafness:
    """How long messages have waited that this worker could take and does not get.

    Celery's consumer was seen by others to go on without consuming after it lost its connection (celery#8030, #8091,
    #10096); such a worker looks well and does nothing.
    """

    def __init__(self, seconds: float, most_a_look: float = 2 * _LOOK_SECONDS) -> None:
        """It is told to reconnect after `seconds`, and to end as long after that.

        A look adds `most_a_look` seconds at most: Redis, or this process, may have stood still since the one before.
        """
        self._seconds = seconds
        self._most_a_look = most_a_look
        self._looked_at: float | None = None
        self._deaf_seconds = 0.0
        self._reconnected = False

    def told(self, starves: bool, now: float) -> Literal["reconnect", "end"] | None:
        """What to do; to be asked every few seconds, `now` on the monotonic clock."""
        if not starves:
            self._looked_at, self._deaf_seconds, self._reconnected = None, 0.0, False
            return None
        since = now if self._looked_at is None else self._looked_at
        self._looked_at = now
        self._deaf_seconds += min(now - since, self._most_a_look)
        if self._deaf_seconds < self._seconds:
            return None
        self._deaf_seconds = 0.0
        if self._reconnected:
            return "end"
        self._reconnected = True
        return "reconnect"


def _end_if_failed(starting: asyncio.Task[None]) -> None:
    """A worker that cannot begin must not look as if it worked: it ends, and whoever started it sees that."""
    if not starting.cancelled() and (error := starting.exception()) is not None:
        log.critical("this worker cannot begin: %s", error, exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
