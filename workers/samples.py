"""What passes between the pool, the generation and the commits: messages, claimed samples, outcomes."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.ledger import Claimed, Settled
from common.rejects import Reject


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


@dataclass(eq=False, slots=True)
class Outcome:
    """How a sample ended: with a record (`line` and `settled`), or with a `reject`. A superseded one has neither."""

    sample: Sample
    line: bytes = b""
    settled: Settled | None = None
    reject: Reject | None = None
    end: str = ""  # "stop", "length", a reject's reason, or "superseded"

    def supersede(self) -> None:
        """Another attempt has ended the sample: this outcome counts for nothing."""
        self.settled = self.reject = None
        self.end = "superseded"
