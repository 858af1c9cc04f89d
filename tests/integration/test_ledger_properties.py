"""Any interleaving of feeds, workers and keepers leaves the ledger as a plain model says: nothing lost or twice."""

from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from common.ledger import SUSPECT_AFTER, Lapsed, Ledger, Settled
from tests.integration.ledger_model import Model, Sample
from tests.integration.ledger_steps import HOUR, KEYS
from tests.integration.ledger_steps import settings as dataset

OWNERS = st.sampled_from(["w1", "w2", "w3"])
TOKENS = st.integers(0, 400)
REASONS = st.sampled_from(["empty", "too_long"])
FLAGS = st.sampled_from([(), ("loop",), ("loop", "truncated")])


class LedgerMachine(RuleBasedStateMachine):
    """The ledger beside its model. Time is turned by hand: a lease runs out when `lapse` says so."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.model = Model()
        self.handed: list[tuple[int, int]] = []  # every (index, attempt) there ever was: a worker may come back late

    @initialize()
    def register(self) -> None:
        """Start where work can be done: an open dataset with samples and room; three are suspects, which are rare."""
        self.ledger.redis.flushdb()
        assert self.ledger.register(dataset(cap_tokens=self.model.cap)) == "new"
        samples = [(index, b"%d" % index) for index in range(4)]
        self.ledger.feed("b1", before="", after="4", ended=False, rejected=[], samples=samples)
        self.model.cursor, self.model.samples = "4", {index: Sample(send_now=True) for index, _ in samples}
        for index in (0, 1, 2):
            self.ledger.redis.hset(KEYS.tries, str(index), SUSPECT_AFTER)
            self.model.samples[index].tries = SUSPECT_AFTER
        self.admit_some()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One act of a feed, a worker, the keeper or an operator.

        One rule for all: of several rules Hypothesis leaves some out of each run, and then hardly a sample gets far.
        """
        acts = ["feed", "admit", "resume", "resume", "stop", "change_the_cap"]
        acts += ["claim", "claim", "claim", "resend", "expire", "expire"]
        if self.handed:
            acts += ["settle", "settle", "release", "release", "release", "reject", "renew", "renew"]
        if self.model.at("leased"):
            acts += ["lapse", "lapse"]
        if self.model.alone():
            acts += ["outlive"]
        if self.model.at("done", "rejected"):
            acts += ["recover"]
        getattr(self, data.draw(st.sampled_from(acts), label="act"))(data)

    def admit_some(self) -> None:
        self.model.room = 50
        assert self.ledger.admit("b1", room=50, window=9, tokens_per_second=0.5) == "open"

    # Draws

    def some_indices(self, data: st.DataObject) -> list[int]:
        """Any index, two that were not fed yet among them; half of them wait in the queue, where some do."""
        known = list(range(max(self.model.samples, default=0) + 3))
        one = st.sampled_from(sorted(self.model.at("queued")) or known) | st.sampled_from(known)
        return data.draw(st.lists(one, min_size=1, max_size=6), label="indices")

    def some_handed(self, data: st.DataObject) -> list[tuple[int, int]]:
        """Any attempt there ever was; those that are the last of a sample, and those that lost one, are likelier."""
        last = [pair for pair in self.handed if self.model.current(*pair)]
        stale = [pair for pair in self.handed if pair not in last and pair[0] in self.model.at("leased")]
        one = st.sampled_from(last or self.handed) | st.sampled_from(stale or last or self.handed)
        one |= st.sampled_from(self.handed)
        return data.draw(st.lists(one, min_size=1, max_size=4), label="samples")

    # The way in

    def feed(self, data: st.DataObject) -> None:
        """A row is a sample, or a reject where it holds a reason; one that is done already is passed over."""
        rows = data.draw(st.lists(st.none() | st.none() | REASONS, max_size=2), label="rows")
        ended = data.draw(st.sampled_from([False, False, False, True]), label="ended")
        by_index = dict(enumerate(rows, int(self.model.cursor or 0)))
        rejected = [(index, reason) for index, reason in by_index.items() if reason]
        samples = [(index, b"%d" % index) for index, reason in by_index.items() if not reason]
        new = by_index.keys() - self.model.samples.keys()
        after = str(int(self.model.cursor or 0) + len(rows))
        rest: dict[str, Any] = {"after": after, "ended": ended, "rejected": rejected, "samples": samples}

        assert self.ledger.feed("b1", before="moved", **rest) is None
        assert self.ledger.feed("b1", before=self.model.cursor, **rest) == sum(i in new for i, _ in samples)
        self.model.cursor, self.model.ended = after, ended
        self.model.samples.update({index: Sample(send_now=True) for index in new})
        for index, reason in rejected:
            if index in new:
                self.model.reject(index, reason)

    # Workers

    def claim(self, data: st.DataObject) -> None:
        indices, owner = self.some_indices(data), data.draw(OWNERS, label="owner")
        claimed, refused = self.ledger.claim("b1", owner, HOUR, indices)

        expected: list[int] = []
        words: dict[int, str] = {}
        for index in indices:
            sample = self.model.samples.get(index)
            word = self.word(sample, owner)
            if sample is None or word:
                words[index] = word
                if sample is not None and word in {"alone", "capped", "paused"}:
                    sample.send_now = True
                continue
            expected.append(index)
            self.model.room -= 1
            attempt = next(one.attempt for one in claimed if one.index == index)
            assert attempt > sample.attempt
            alone_with = owner if sample.tries >= SUSPECT_AFTER else ""
            self.model.samples[index] = Sample(
                "leased", attempt, owner=owner, tries=sample.tries, alone_with=alone_with
            )
            self.handed.append((index, attempt))
        assert refused == words
        assert [one.index for one in claimed] == expected
        assert [one.payload for one in claimed] == [b"%d" % index for index in expected]

    def word(self, sample: Sample | None, owner: str) -> str:
        """Why `sample` cannot be claimed by `owner` now."""
        if sample is None:
            return "unknown"
        if sample.at != "queued":
            return "leased" if sample.at == "leased" else "done"
        if self.model.state != "open":
            return "paused" if self.model.state == "paused" else "capped"
        if self.model.room <= 0:
            return "capped"
        return "alone" if sample.tries >= SUSPECT_AFTER and owner in self.model.alone().values() else ""

    def renew(self, data: st.DataObject) -> None:
        samples, owner = self.some_handed(data), data.draw(OWNERS, label="owner")
        lost = self.ledger.renew("b1", owner, HOUR, samples)

        assert lost == [index for index, attempt in samples if not self.model.current(index, attempt)]
        for index, attempt in samples:
            sample = self.model.samples.get(index)
            if sample and self.model.current(index, attempt) and sample.at in {"queued", "leased"}:
                self.model.samples[index] = replace(sample, at="leased", owner=owner, lapsed=False)

    def settle(self, data: st.DataObject) -> None:
        """Early, late, or twice."""
        samples, tokens, flags = self.some_handed(data), data.draw(TOKENS, label="tokens"), data.draw(FLAGS)
        records = [Settled(index, attempt, 100, tokens, 0, flags) for index, attempt in samples]
        counted = self.ledger.settle("b1", records)

        for (index, attempt), answer in zip(samples, counted, strict=True):
            assert answer == self.model.counts(index, attempt)
            sample = self.model.samples.get(index, Sample())
            if answer and sample.at != "done":
                sample.attempt = attempt
                self.model.samples[index] = sample
                self.model.settle(index, tokens, flags)

    def release(self, data: st.DataObject) -> None:
        samples, failed = self.some_handed(data), data.draw(st.booleans(), label="failed")
        released = self.ledger.release("b1", samples, failed=failed)

        expected = {
            pair for pair in samples if self.model.current(*pair) and self.model.samples[pair[0]].at == "leased"
        }
        assert released == len(expected)
        for index, _ in expected:
            self.model.queue(index)
            self.model.samples[index].tries += failed

    def reject(self, data: st.DataObject) -> None:
        samples, reason = self.some_handed(data), data.draw(REASONS, label="reason")
        ended = self.ledger.reject("b1", [(index, attempt, reason) for index, attempt in samples])

        for (index, attempt), answer in zip(samples, ended, strict=True):
            waiting = index in self.model.at("queued", "leased")
            assert answer == (waiting and self.model.current(index, attempt))
            if answer:
                self.model.reject(index, reason)

    # Time and the keeper

    def lapse(self, data: st.DataObject) -> None:
        """The clock, for some leases: they have run out."""
        indices = data.draw(st.sets(st.sampled_from(sorted(self.model.at("leased"))), min_size=1), label="leases")
        self.ledger.redis.zadd(KEYS.leases, dict.fromkeys(map(str, indices), 1), xx=True)
        for index in indices:
            self.model.samples[index].lapsed = True

    def outlive(self, data: st.DataObject) -> None:
        """Some suspects are renewed when their time alone is over."""
        alone = self.model.alone()
        indices = data.draw(st.sets(st.sampled_from(sorted(alone)), min_size=1), label="suspects")
        now_ms = self.ledger.snapshot("b1").now_ms
        for index in indices:
            sample = self.model.samples[index]
            self.ledger.redis.hset(KEYS.suspects, f"{KEYS.leases} {index}", f"{now_ms} {sample.alone_with}")
            assert self.ledger.renew("b1", sample.owner, HOUR, [(index, sample.attempt)]) == []
            sample.alone_with, sample.lapsed = "", False

    def expire(self, data: st.DataObject) -> None:
        max_tries = data.draw(st.sampled_from([1, 2, 3, 4, 10, 10, 10]), label="max_tries")
        lapsed = {
            index: sample for index, sample in self.model.samples.items() if sample.at == "leased" and sample.lapsed
        }
        back, ended = self.ledger.expire("b1", max_tries=max_tries, hold_seconds=HOUR)

        held = {index for index, sample in lapsed.items() if sample.tries + 1 >= max_tries or sample.alone_with}
        by_index = attrgetter("index")
        for answer, indices in ((back, lapsed.keys() - held), (ended, held)):
            assert sorted(answer, key=by_index) == [
                Lapsed(i, lapsed[i].attempt, lapsed[i].owner) for i in sorted(indices)
            ]
        self.model.sums["expired"] += len(lapsed)
        for index, sample in lapsed.items():
            sample.tries += 1
            sample.lapsed = False
            if index not in held:
                self.model.queue(index)

    def resend(self, data: st.DataObject) -> None:
        """Two callers ask for the same samples."""
        due = {index for index, sample in self.model.samples.items() if sample.at == "queued" and sample.send_now}
        indices = list(dict.fromkeys([*self.some_indices(data), *sorted(due)[:1]]))
        assert set(self.ledger.unsent("b1", 999)) == due

        first, second = (self.ledger.resend("b1", 1, indices) for _ in range(2))

        assert first == [index for index in indices if index in due]
        assert second == []
        for index in first:
            self.model.samples[index].send_now = False

    # The operator and the budget

    def stop(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(["paused", "halted"]), label="state")
        assert self.ledger.transition("b1", state, ["open", "closing"]) == self.model.state
        if self.model.state in {"open", "closing"}:
            self.model.state = state

    def resume(self, _: st.DataObject) -> None:
        assert self.ledger.transition("b1", "open", ["paused", "halted", "exhausted", "capped"]) == self.model.state
        if self.model.state != "closing":
            self.model.state = "open"

    def admit(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([50, 50, 50, 50, 3, 1, 0, -1]), label="room")
        state = self.ledger.admit("b1", room=room, window=9, tokens_per_second=0.5)

        self.model.room = max(0, room)
        if self.model.state in {"open", "closing"}:
            if self.model.ended and not self.model.at("queued", "leased"):
                self.model.state = "exhausted"
            elif room <= 0:
                self.model.state = "closing" if self.model.at("leased") else "capped"
            else:
                self.model.state = "open"
        assert state == self.model.state

    def change_the_cap(self, data: st.DataObject) -> None:
        cap = max(1, self.model.cap + data.draw(st.sampled_from([1000, 1, 0, -1]), label="change"))
        raised = cap > self.model.cap and cap > self.model.sums["completion_tokens"]
        reopened = self.model.state == "halted" or (self.model.state == "capped" and raised)

        assert self.ledger.register(dataset(cap_tokens=cap)) == ("reopened" if reopened else "known")
        self.model.cap = cap
        if reopened:
            self.model.state = "open"

    def recover(self, _: st.DataObject) -> None:
        """The ledger is lost and built anew from the files; workers that hold its samples may come back late."""
        old, self.model = self.model, Model(cap=self.model.cap)
        self.ledger.forget("b1")
        assert self.ledger.register(dataset(cap_tokens=old.cap)) == "new"
        for index, sample in old.samples.items():
            if sample.at == "done":
                record = Settled(index, sample.attempt, 100, sample.tokens, 0, sample.flags)
                assert self.ledger.settle("b1", [record], rebuild=True) == [True]
                self.model.samples[index] = Sample(attempt=sample.attempt)
                self.model.settle(index, sample.tokens, sample.flags)
            elif sample.at == "rejected":
                assert self.ledger.reject("b1", [(index, sample.attempt, sample.reason)], rebuild=True) == [True]
                self.model.samples[index] = Sample(attempt=sample.attempt)
                self.model.reject(index, sample.reason)
        self.admit_some()

    # What must hold after every step

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        pipe = self.ledger.redis.pipeline()
        pipe.zrange(KEYS.queued, 0, -1)
        pipe.zrange(KEYS.leases, 0, -1)
        pipe.hgetall(KEYS.owners)
        pipe.hgetall(KEYS.payloads)
        pipe.hgetall(KEYS.tries)
        queued, leased, owners, payloads, tries = pipe.execute()
        done = self.ledger.done_among("b1", range(max(self.model.samples, default=0) + 9))

        assert sorted(map(int, queued)) == sorted(self.model.at("queued"))
        assert sorted(map(int, leased)) == sorted(self.model.at("leased"))
        assert done == self.model.at("done", "rejected")
        assert len(queued) + len(leased) + len(done) == len(self.model.samples)
        waiting = {index: sample for index, sample in self.model.samples.items() if sample.at in {"queued", "leased"}}
        assert {int(index): payload for index, payload in payloads.items()} == {i: b"%d" % i for i in waiting}
        assert {int(index): owner.decode() for index, owner in owners.items()} == {
            index: sample.owner for index, sample in waiting.items() if sample.at == "leased"
        }
        assert {int(i): int(n) for i, n in tries.items()} == {i: s.tries for i, s in waiting.items() if s.tries}

    @invariant()
    def no_worker_has_two_suspects_that_may_kill_it(self) -> None:
        notes = cast("dict[bytes, bytes]", self.ledger.redis.hgetall(KEYS.suspects))
        alone = {int(name.split()[1]): note.decode().split()[1] for name, note in notes.items()}

        assert alone == self.model.alone()
        assert len(set(alone.values())) == len(alone)
        assert alone.keys() <= self.model.at("leased")
        assert all(self.model.samples[index].tries >= SUSPECT_AFTER for index in alone)

    @invariant()
    def every_sum_is_that_of_the_model(self) -> None:
        now = self.ledger.snapshot("b1")

        assert (now.state, now.room, now.cap_tokens) == (self.model.state, self.model.room, self.model.cap)
        assert (now.queued, now.in_flight) == (len(self.model.at("queued")), len(self.model.at("leased")))
        assert (now.done, now.rejected) == (len(self.model.at("done")), len(self.model.at("rejected")))
        for name in ("done", "rejected", "prompt_tokens", "completion_tokens", "squared_tokens", "expired"):
            assert getattr(now, name) == self.model.sums[name], name
        assert now.max_tokens == self.model.longest
        assert (now.lengths, now.rejects, now.flags) == (self.model.lengths, self.model.rejects, self.model.flags)

    @invariant()
    def every_attempt_is_the_last_one_handed_out(self) -> None:
        raw = cast("bytes", self.ledger.redis.get(KEYS.attempts) or b"")
        for index, sample in self.model.samples.items():
            last = int.from_bytes(raw[index * 6 : index * 6 + 6], "big")
            if sample.used_up:
                assert last > sample.attempt or sample.attempt == 0
            else:
                assert last == sample.attempt


def test_the_ledger_is_as_its_model_says(ledger: Ledger) -> None:
    class Machine(LedgerMachine):
        def __init__(self) -> None:
            super().__init__(ledger)

    run_state_machine_as_test(Machine, settings=settings(print_blob=True, max_examples=150, stateful_step_count=40))
