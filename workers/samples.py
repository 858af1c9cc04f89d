"""What passes between the pool, the generation and the commits: messages, claimed samples, outcomes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.flags import UNCOUNTED
from common.ledger import LOST, Claimed, Ended, Settled
from common.rejects import Reject
from workers.marking import Marker
from workers.sglang.client import Sampling
from workers.sglang.server import SampleClock


@dataclass(eq=False, slots=True)
class Doorbell:
    """One message. `on_claimed` is called once its samples are claimed (or gone), `on_ended` when all have ended."""

    dataset: str
    indices: Sequence[int]
    on_claimed: Callable[[], None]
    on_ended: Callable[[str], None]
    left: int = 0
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    servers: set[str] = field(default_factory=set)

    def summary(self) -> str:
        """How the samples ended, and where: `31,204 tokens: 15 stop, 1 length; gpu1:30000`."""
        if not self.ends:
            return "nothing to do: done, leased or closed"
        ends = ", ".join(end if len(self.indices) == 1 else f"{n} {end}" for end, n in self.ends.most_common())
        servers = ", ".join(sorted(url.partition("://")[2] for url in self.servers))
        return f"{self.tokens:,} tokens: {ends}" + (f"; {servers}" if servers else "")


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """A claimed sample, and the message it came with."""

    claimed: Claimed
    bell: Doorbell
    sampling: Sampling | None = None  # its dataset's; None: that of all
    marker: Marker | None = None  # None: no flags beyond those of its end
    clock: SampleClock = field(default_factory=SampleClock)


@dataclass(eq=False, slots=True)
class Outcome:
    """How a sample ended: with a record (`line` and `settled`), or with a `reject`. A superseded one has neither."""

    sample: Sample
    line: bytes = b""
    settled: Settled | None = None
    reject: Reject | None = None
    end: str = ""  # "stop", "length", a reject's reason, or "superseded"
    clock: float = 0.0  # of the answer, as it came

    def observed(self) -> list[Ended]:
        """What its attempts tell of the lengths of answers. One that is rejected charges nothing."""
        index, attempt = self.sample.claimed.index, self.sample.claimed.attempt
        lost = list(self.sample.clock.lost)
        if self.settled is not None:
            charged = 0 if UNCOUNTED in self.settled.flags else self.settled.completion_tokens
            ended = [Ended(index, attempt, self.clock, charged)]
        else:
            ended = [Ended(index, attempt, lost.pop(), 0)] if self.reject is not None and lost else []
        return [*ended, *(Ended(index, attempt, clock, LOST) for clock in lost)]

    def supersede(self) -> None:
        """Another attempt has ended the sample: this outcome counts for nothing."""
        self.settled = self.reject = None
        self.end = "superseded"
