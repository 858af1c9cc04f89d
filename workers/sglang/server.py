"""One server as one worker sees it, and how far a call there has come."""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Literal

import msgspec

from workers.governor import Governor, Load
from workers.sglang.progress import DecodeClock

State = Literal["checking", "up", "half_open", "down", "unfit"]


class Health(Enum):
    """What a probe found."""

    WELL = "well"
    DOUBTFUL = "doubtful"  # somebody answers, and does not say that all is well
    GONE = "gone"


class Pauses(msgspec.Struct, frozen=True):
    """How long to wait after a failure: doubling from `first_seconds` to `longest_seconds`.

    A call on trial, or alone (SGLangClient), is waited for `trial_seconds` before others follow.
    """

    first_seconds: float = 0.5
    longest_seconds: float = 30.0
    # A dead scheduler was seen to break its connections after 5 to 7 s: a call that runs for longer has not killed it.
    trial_seconds: float = 10.0

    def after(self, failures: int) -> float:
        """The pause after so many failures in a row (1 or more)."""
        return min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))


class ServerState(msgspec.Struct, frozen=True):
    """What status shows of one server."""

    url: str
    state: State | Literal["draining"]
    in_flight: int
    answers: int  # accepted, since this worker knows it
    since: float  # seconds since the epoch when this state began
    reason: str | None  # what it last failed for, or why it is down or unfit
    version: str | None
    limit: int | None  # this worker's calls there at most; None without a governor
    why: str | None  # why the limit is what it is
    # As the server last said of all its callers together; None where it says nothing.
    running: int | None
    waiting: int | None
    kv_usage: float | None
    tokens_per_second: float | None


class Server:
    """One server, as this worker sees it."""

    def __init__(self, url: str, headers: Mapping[str, str], state: State, governor: Governor | None = None) -> None:
        """Without a `governor` any number of calls may be in flight there."""
        self.url = url
        self.headers = headers
        self.generate_url = self.url + "/generate"
        self.abort_url = self.url + "/abort_request"
        self.health_url = self.url + "/health"
        self.state: State = state
        self.governor = governor
        self.clock = DecodeClock(time.monotonic())
        self.load: Load | None = None
        self.since = time.time()
        self.reason: str | None = None
        self.version: str | None = None
        self.draining = False
        self.takes_aborts = True  # SGLang's router has no such route
        self.in_flight = 0
        self.answers = 0
        self.failures = 0  # in a row
        # Whether it was found well since it was last down; what fails on it before that says nothing of its sample.
        self.proven = state == "up"
        self.on_trial = False  # whether a half-open server has its one call
        self.trials = 0
        self.alone = False  # whether it is kept for one call that may kill it
        # On the monotonic clock.
        self.answered_at = 0.0
        self.sent_at = 0.0
        self.failed_at = 0.0
        self.shunned_until = 0.0
        self.looked_at = 0.0  # when it was last inspected although it was unfit

    @property
    def has_slot(self) -> bool:
        """Whether this worker may have one call more in flight there."""
        return self.governor is None or self.in_flight < self.governor.limit

    def seen(self) -> ServerState:
        """What status shows of it."""
        governor, load = self.governor, self.load
        return ServerState(
            url=self.url,
            state="draining" if self.draining else self.state,
            in_flight=self.in_flight,
            answers=self.answers,
            since=self.since,
            reason=self.reason,
            version=self.version,
            limit=None if governor is None else governor.limit,
            why=None if governor is None else governor.why,
            running=None if load is None else load.running,
            waiting=None if load is None else load.waiting,
            kv_usage=None if load is None else load.kv_usage,
            tokens_per_second=None if load is None else load.tokens_per_second,
        )


class SampleClock:
    """How far a sample's answer has come, on its server's clock (tokens), and how far the calls came that were lost."""

    __slots__ = ("_server", "_started", "lost")

    def __init__(self) -> None:
        self._server: Server | None = None
        self._started = 0.0
        self.lost: list[float] = []

    def begin(self, server: Server) -> None:
        """A call is made now."""
        self._server, self._started = server, server.clock.at(time.monotonic())

    def lose(self) -> None:
        """The call has failed: its answer, which nobody saw, was longer than this."""
        self.lost.append(self.tokens)
        self._server = None

    @property
    def tokens(self) -> float:
        """Decoded for each request there since the call began; 0 before it and between two."""
        return 0.0 if self._server is None else self._server.clock.at(time.monotonic()) - self._started

    @property
    def furthest(self) -> float:
        """The most tokens that any of its calls came to: the answer will be longer, since a prompt gets it again."""
        return max((self.tokens, *self.lost))

    @property
    def tokens_per_second(self) -> float:
        """How fast the clock goes."""
        return 0.0 if self._server is None else self._server.clock.tokens_per_second
