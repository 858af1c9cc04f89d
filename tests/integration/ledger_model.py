"""One dataset as a dictionary and some sums: what the ledger is compared with."""

from collections import Counter
from dataclasses import dataclass, field

from common.ledger._lengths import bucket_of


@dataclass
class Sample:
    """One fed row as the model knows it."""

    at: str = "queued"  # queued, leased, done, rejected
    attempt: int = 0  # the highest one handed out
    used_up: bool = False  # its attempt ended in a reject
    owner: str = ""
    lapsed: bool = False
    send_now: bool = False
    tries: int = 0
    alone_with: str = ""  # the owner that has no other suspect, and is not known to have outlived this one
    tokens: int = 0  # of its record
    flags: tuple[str, ...] = ()
    reason: str = ""  # of its reject


@dataclass
class Model:
    """b1 as a dictionary and some sums."""

    samples: dict[int, Sample] = field(default_factory=dict)
    cursor: str = ""
    ended: bool = False
    state: str = "open"
    room: int = 0
    cap: int = 1000
    sums: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    longest: int = 0

    def at(self, *places: str) -> set[int]:
        return {index for index, sample in self.samples.items() if sample.at in places}

    def current(self, index: int, attempt: int) -> bool:
        """Whether `attempt` is the last one of its sample, and was not rejected."""
        sample = self.samples.get(index)
        return sample is not None and sample.attempt == attempt and not sample.used_up

    def counts(self, index: int, attempt: int) -> bool:
        """Whether a record of `attempt` counts: again, or since no later attempt is known and the row is not done."""
        sample = self.samples.get(index, Sample())
        return self.current(index, attempt) or (sample.at in {"queued", "leased"} and attempt > sample.attempt)

    def reject(self, index: int, reason: str) -> None:
        sample = self.samples[index]
        sample.at, sample.used_up, sample.reason, sample.alone_with = "rejected", True, reason, ""
        self.sums["rejected"] += 1
        self.rejects[reason] += 1

    def settle(self, index: int, tokens: int, flags: tuple[str, ...]) -> None:
        sample = self.samples[index]
        sample.at, sample.tokens, sample.flags, sample.alone_with = "done", tokens, flags, ""
        self.sums.update(done=1, prompt_tokens=100, completion_tokens=tokens, squared_tokens=tokens**2)
        self.flags.update(flags)
        self.lengths[bucket_of(tokens)] += 1
        self.longest = max(self.longest, tokens)

    def queue(self, index: int) -> None:
        sample = self.samples[index]
        sample.at, sample.owner, sample.lapsed, sample.send_now = "queued", "", False, True
        sample.alone_with = ""

    def alone(self) -> dict[int, str]:
        """The owner of each suspect that may yet be what kills it."""
        return {index: sample.alone_with for index, sample in self.samples.items() if sample.alone_with}
