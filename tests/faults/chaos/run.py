"""`make chaos SEED=1 MINUTES=3`: faults every few seconds while samples pass, then the books."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import redis

from tests.faults.chaos.books import Books, check
from tests.faults.chaos.faults import ON_REQUEST, Faults, plan
from tests.faults.chaos.site import SERVERS, VALKEY, Site

# 5,000 in three minutes: with answers of so long a time they last about as long as the faults do.
_SAMPLES_A_MINUTE = 5000 / 3
_LATENCY_SECONDS = 1.0
# After the last fault the run ends when so long nothing was settled: a busy machine may have many samples left.
_FINISH_SECONDS = 90.0
_LOOK_SECONDS = 1.0
# A worker that ends nothing for so long, while the others end so many, has stopped consuming.
_IDLE_SECONDS, _IDLE_SAMPLES = 15.0, 200


@dataclass
class Outcome:
    """One run: what was thrown, and what the books say."""

    seed: int
    minutes: float
    faults: Faults
    books: Books = field(default_factory=Books)
    finish_seconds: float = 0.0
    longest_stall: tuple[float, str] = (0.0, "")

    @property
    def good(self) -> bool:
        """Whether the books balance."""
        return not self.books.wrong

    def lines(self, site: Site) -> Iterator[str]:
        """The summary, for a person."""
        books, faults = self.books, self.faults
        yield f"seed {self.seed}, {self.minutes:g} minutes, {faults.thrown.total()} faults:"
        yield "  " + ", ".join(f"{n} {kind}" for kind, n in sorted(faults.thrown.items()))
        missed = ", ".join(f"{n} {kind}" for kind, n in sorted(faults.missed.items())) or "none"
        yield f"not thrown, as the target was not there: {missed}"
        yield f"{books.samples:,} samples have a record; {books.voided:,} records were superseded"
        yield f"{books.bad_rows} bad rows rejected; of the others: {dict(books.rejects) or 'none'}"
        yield f"all had ended {self.finish_seconds:.0f} s after the last fault was over"
        yield f"longest time without a settled sample: {self.longest_stall[0]:.0f} s, until {self.longest_stall[1]}"
        yield f"segments that the ledger knew a part of alone: {books.unsettled}"
        for part in site.parts.values():
            ends = ", ".join(f"{n} with {code}" for code, n in sorted(part.ends.items()))
            yield f"{part.name} was told {faults.told[part.name]} times to end, and ended: {ends or 'never'}"
        yield f"enqueues ended: {dict(site.enqueue_ends)}"
        yield from (f"FINDING {line}" for line in books.findings)
        yield from (f"WRONG {line}" for line in books.wrong)
        yield "the books balance" if not books.wrong else "the books do not balance"


class Look:
    """Looks at the ledger once a second: progress, stalls, idle workers, and samples that have lost workers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._at = 0.0
        self._ended = 0
        self.moved_at = time.monotonic()
        self._owners: dict[tuple[str, int], str] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self.lost: dict[tuple[str, int], list[str]] = {}  # who lost a sample, and when
        # Worker -> what it had ended, and since when; and how many samples had ended by then.
        self._workers: dict[str, tuple[int, float, int]] = {}
        self.idle: set[str] = set()
        self.all_ended = False
        self.longest_stall = (0.0, "")

    def look(self) -> None:
        if time.monotonic() < self._at:
            return
        self._at = time.monotonic() + _LOOK_SECONDS
        states = self._site.states()
        ended = sum(state.done + state.rejected for state in states.values())
        if ended != self._ended:
            stall = time.monotonic() - self.moved_at
            self.longest_stall = max(self.longest_stall, (stall, time.strftime("%H:%M:%S")))
            self._ended, self.moved_at = ended, time.monotonic()
        said = ", ".join(f"{s.done}+{s.rejected} {s.state} ({s.queued}, {s.in_flight})" for s in states.values())
        self._site.say(said or "the ledger cannot be read")
        self.all_ended = self._site.ended(states)
        self._look_at_tries()
        self._look_at_workers()

    def _look_at_tries(self) -> None:
        try:
            for dataset, owners, all_tries in self._site.attempts():
                for index, tries in all_tries.items():
                    if tries != self._tries.get((dataset, index)):
                        self._tries[dataset, index] = tries
                        owner = self._owners.get((dataset, index), "nobody that was seen")
                        self.lost.setdefault((dataset, index), []).append(f"{time.strftime('%H:%M:%S')} by {owner}")
                        if tries > 1:
                            self._site.say(f"{dataset} {index}: {self.story(dataset, index)}")
                self._owners |= {(dataset, index): owner for index, owner in owners.items()}
        except redis.RedisError:
            return

    def story(self, dataset: str, index: int) -> str:
        """Who has lost a sample, and who had it last."""
        lost = ", ".join(self.lost.get((dataset, index), ())) or "never"
        return f"lost {lost}; last seen with {self._owners.get((dataset, index), 'nobody')}"

    def _look_at_workers(self) -> None:
        now, workers = time.monotonic(), self._site.workers()
        before = {name: self._workers.get(name) for name in workers}
        self._workers = {
            name: (ended, now, self._ended) if (known := before[name]) is None or known[0] != ended else known
            for name, ended in workers.items()
        }
        for name, (ended, since, all_ended) in self._workers.items():
            if now - since > _IDLE_SECONDS and self._ended - all_ended > _IDLE_SAMPLES and name not in self.idle:
                self.idle.add(name)
                self._site.say(f"{name} is idle since {now - since:.0f} s: it has ended {ended}")


def storm(site: Site, seed: int, minutes: float, requested: Sequence[str] = ()) -> Outcome:
    """Start the site, throw, wait for the end, stop, check."""
    names = [dataset.name for dataset in site.datasets]
    outcome = Outcome(seed, minutes, Faults(site))
    faults, look = outcome.faults, Look(site)
    site.start()
    started = time.monotonic()
    for fault in plan(seed, minutes * 60, names, requested):
        while time.monotonic() - started < fault.at and not look.all_ended:
            _step(site, faults, look)
        if look.all_ended:
            break
        faults.throw(fault)
    if not faults.end():
        outcome.books.wrong.append("not all faults could be taken back")
    site.say("chaos: no more faults")
    over = time.monotonic()
    done = False
    while not done and time.monotonic() - max(over, look.moved_at) < _FINISH_SECONDS:
        done = _step(site, faults, look) and all(map(site.pid, SERVERS))
    outcome.finish_seconds, outcome.longest_stall = time.monotonic() - over, look.longest_stall
    outcome.books.wrong += [f"{name} lived and stopped consuming" for name in sorted(look.idle)]
    codes = site.stop()
    check(site, faults.thrown, outcome.books, look.story)
    outcome.books.findings += _ended_by_themselves(site, faults)
    if not done:
        outcome.books.wrong.insert(
            0, f"not all datasets had ended when nothing was settled for {_FINISH_SECONDS:.0f} s"
        )
    if any(codes.values()) or None in codes.values():
        outcome.books.wrong.append(f"not all parts ended well on TERM: {codes}")
    return outcome


def _ended_by_themselves(site: Site, faults: Faults) -> Iterator[str]:
    """Parts that ended well without being told to, or badly; 4 is no fault: Redis was away when they started."""
    for part in site.parts.values():
        if (by_themselves := part.ends[0] - faults.told[part.name]) > 0:
            yield f"{part.name} ended {by_themselves} times with 0, and nobody had told it to"
        if part.ends[1]:
            yield f"{part.name} ended {part.ends[1]} times with 1"


def _step(site: Site, faults: Faults, look: Look) -> bool:
    """A moment of the run; answers whether all has ended."""
    site.look_after()
    faults.mend()
    if VALKEY not in faults.frozen:
        look.look()
    time.sleep(0.05)
    return look.all_ended and not site.enqueuing


@contextmanager
def made_site(folder: Path, seed: int, minutes: float) -> Iterator[Site]:
    """A site whose processes end with the block."""
    site = Site(folder, seed, round(minutes * _SAMPLES_A_MINUTE), _LATENCY_SECONDS)
    try:
        yield site
    finally:
        site.end_all()


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="The faults, and the answers.")
@click.option("--minutes", type=float, default=3.0, show_default=True, help="How long faults are thrown.")
@click.option("--with", "requested", type=click.Choice(list(ON_REQUEST)), multiple=True, help="Further faults.")
@click.option("--keep", is_flag=True, help="Keep files and logs of a good run, too.")
def main(seed: int, minutes: float, requested: Sequence[str], keep: bool) -> None:
    """Throw faults at a whole installation, and check the books. Leaves with 1 if they do not balance."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    with made_site(folder, seed, minutes) as site:
        outcome = storm(site, seed, minutes, requested)
        if not outcome.good:
            click.echo(site.logs())
            click.echo("\n".join(outcome.books.evidence))
        click.echo("\n".join(outcome.lines(site)))
    if outcome.good and not keep:
        shutil.rmtree(folder)
    else:
        click.echo(f"all files and logs are in {folder}")
    sys.exit(not outcome.good)


if __name__ == "__main__":
    main()
