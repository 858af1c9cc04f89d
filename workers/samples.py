"""What passes between the pool, the generation and the commits: messages, claimed samples, outcomes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.ledger import LOST, Claimed, Ended, Settled
from common.rejects import Reject
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

    def summary(self) -> str:
        """How the samples ended, for a person: `31,204 tokens: 15 stop, 1 length`."""
        ends = ", ".join(f"{n} {end}" for end, n in self.ends.most_common())
        return f"{self.tokens:,} tokens: {ends}" if ends else "nothing to do: done, leased or closed"


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """A claimed sample, and the message it came with."""

    claimed: Claimed
    bell: Doorbell
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
            ended = [Ended(index, attempt, self.clock, self.settled.completion_tokens)]
        else:
            ended = [Ended(index, attempt, lost.pop(), 0)] if self.reject is not None and lost else []
        return [*ended, *(Ended(index, attempt, clock, LOST) for clock in lost)]

    def supersede(self) -> None:
        """Another attempt has ended the sample: this outcome counts for nothing."""
        self.settled = self.reject = None
        self.end = "superseded"
