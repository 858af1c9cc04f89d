"""One server as one worker sees it, and how far a call there has come."""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Literal

import msgspec

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


class Server:
    """One server, as this worker sees it."""

    def __init__(self, url: str, headers: Mapping[str, str], state: State) -> None:
        self.url = url
        self.headers = headers
        self.generate_url = self.url + "/generate"
        self.abort_url = self.url + "/abort_request"
        self.health_url = self.url + "/health"
        self.state: State = state
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
