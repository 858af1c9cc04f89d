"""A ledger that was lost is rebuilt from the files, to the token; verify compares the two."""

import fcntl
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.errors import DataError, RedisUnavailable, UsageError
from common.ledger import DatasetState, Ledger, Settled
from common.rejects import Reject, append_rejects
from common.sections import DatasetSettings
from common.settings import Settings, load_settings
from producer.cli import files
from producer.recover import recover
from producer.verify import Difference, verify
from tests.lines import record_line, void_line, write_config, write_segment

SEGMENTS = ("w1-0.jsonl", "w1-1.jsonl", "w2-0.jsonl")


class Life:
    """A run of dataset A in ledger and files: answers, late answers, rejects, attempts that came to nothing."""

    def __init__(self, ledger: Ledger, output: Path, dataset: DatasetSettings, samples: int) -> None:
        self.ledger = ledger
        self.output = output
        self.segments = dict.fromkeys(SEGMENTS, b"")
        self.ended: dict[str, set[int]] = {"record": set(), "reject": set(), "open": set()}
        ledger.register(dataset)
        rows = [(index, b"prompt") for index in range(samples)]
        ledger.feed("A", before="", after="end", ended=True, rejected=[], samples=rows)
        ledger.admit("A", room=10 * samples, window=samples, tokens_per_second=0)

    def claim(self, index: int) -> int:
        (claimed,), _ = self.ledger.claim("A", "w", 60, [index])
        return claimed.attempt

    def answer(self, rng: random.Random, index: int, attempt: int, *, outdone: bool = False) -> bool:
        """Write and settle a record; answers whether it counts. `outdone`: a later attempt has counted already."""
        prompt = [rng.randrange(100_000) for _ in range(rng.randrange(1, 50))]
        answer = [rng.randrange(100_000) for _ in range(rng.randrange(1, 200))]
        flags = ["truncated"] if rng.random() < 0.1 else []
        name = rng.choice(SEGMENTS)
        line = record_line(index, attempt, prompt=prompt, answer=answer, flags=flags, cached_tokens=rng.randrange(9))
        self.segments[name] += line
        settled = Settled(
            index, attempt, len(prompt), len(answer), int(line.split(b'"cached_tokens": ')[1][:1]), tuple(flags)
        )
        size = len(self.segments[name])
        (counts,) = self.ledger.settle("A", [settled], segment=f"A/{name}", committed_bytes=size)
        # A worker that dies before its void leaves a record that only the later attempt outdoes.
        if not counts and not (outdone and rng.random() < 0.3):
            self.segments[name] += void_line(index, attempt)
        return counts

    def live(self, seed: int) -> None:
        rng = random.Random(seed)
        samples = list(range(self.ledger.snapshot("A").queued))
        rng.shuffle(samples)
        for index in samples:
            lost = []
            for _ in range(rng.choice([0, 0, 0, 1, 2])):
                lost.append(self.claim(index))
                self.ledger.release("A", [(index, lost[-1])], failed=True)
            end = rng.choices(["record", "reject", "open"], [8, 1, 1])[0]
            if end == "record":
                assert self.answer(rng, index, self.claim(index))
            elif end == "reject":
                reason = rng.choice(["bad_row", "too_long"])
                append_rejects(self.output, "A", [Reject(index, reason)])
                assert self.ledger.reject("A", [(index, self.claim(index), reason)]) == [True]
            late = [attempt for attempt in lost if rng.random() < 0.5]
            # The last attempt of a sample that nobody else has taken since may still answer.
            if any(self.answer(rng, index, attempt, outdone=end == "record") for attempt in late):
                assert end == "open"
                end = "record"
            self.ended[end].add(index)
        for name, data in self.segments.items():
            write_segment(self.output, name, data)


@pytest.fixture
def settings(tmp_path: Path, valkey: str) -> Settings:
    return load_settings(write_config(tmp_path, valkey))


def books(state: DatasetState) -> DatasetState:
    """What a recovery must restore: all but clock, queue, cursor, the count of lost leases and the gates' window."""
    of_the_queue: dict[str, Any] = {"queued": 0, "sent": 0, "in_flight": 0, "starts": 0, "fed": 0, "fed_bytes": 0}
    of_the_gates: dict[str, Any] = {"recent": 0, "gates_since_ms": 0}  # which begin anew
    return replace(state, now_ms=0, cursor="", ended=False, room=0, window=0, expired=0, **of_the_queue, **of_the_gates)


@pytest.mark.parametrize("lost", ["nothing", "everything"])
def test_the_rebuilt_ledger_is_the_one_that_was_lost(ledger: Ledger, settings: Settings, lost: str) -> None:
    life = Life(ledger, settings.output, settings.datasets[0], 400)
    life.live(seed=11)
    before = ledger.snapshot("A")
    assert len(life.ended["record"]) == before.done > 200
    assert len(life.ended["reject"]) == before.rejected > 10
    if lost == "everything":
        ledger.redis.flushall()

    for _ in range(2):  # the second time it is built over itself
        (done,) = recover(settings, ledger)
        after = ledger.snapshot("A")
        assert books(after) == books(before)
        assert after.cursor == ""
        assert (done.records, done.rejects) == (before.done, before.rejected)
        assert (done.prompt_tokens, done.completion_tokens) == (before.prompt_tokens, before.completion_tokens)
        assert ledger.done_among("A", range(400)) == life.ended["record"] | life.ended["reject"]
        assert ledger.committed() == {f"A/{name}": len(data) for name, data in life.segments.items()}


def test_after_a_recovery_the_run_goes_on_with_the_rows_that_are_not_done(ledger: Ledger, settings: Settings) -> None:
    life = Life(ledger, settings.output, settings.datasets[0], 50)
    life.live(seed=3)
    ledger.redis.flushall()
    recover(settings, ledger)
    rows = [(index, b"prompt") for index in range(50)]
    queued = ledger.feed("A", before="", after="end", ended=True, rejected=[], samples=rows)
    assert queued == len(life.ended["open"]) > 0
    assert set(ledger.unsent("A", 2**20)) == life.ended["open"]
    # A new attempt is higher than any that the files know, or its record would be taken for the old one.
    ledger.admit("A", room=9, window=9, tokens_per_second=0)
    assert life.claim(min(life.ended["open"])) > 1_600_000_000_000


def test_a_record_wins_over_a_reject_of_the_same_sample(ledger: Ledger, settings: Settings) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1), void_line(1))
    append_rejects(settings.output, "A", [Reject(0, "bad_row"), Reject(1, "bad_row"), Reject(1, "too_long")])
    (done,) = recover(settings, ledger)
    assert (done.records, done.rejects, done.superseded) == (1, 1, 1)
    assert ledger.snapshot("A").rejects == {"bad_row": 1}
    assert verify(settings.output, ["A"], ledger).differences == []


def test_torn_last_lines_are_cut_and_faulty_lines_are_left(ledger: Ledger, settings: Settings) -> None:
    torn = record_line(2)[:-7]
    segment = write_segment(settings.output, "w-0.jsonl", record_line(0), b"?\n", record_line(1), torn)
    rejects = write_segment(settings.output, "rejects.jsonl", b'{"index":5,"reason":"bad_row"}\n', b'{"ind')
    (done,) = recover(settings, ledger)
    assert (done.records, done.rejects, done.torn_bytes, done.faults) == (2, 1, len(torn) + 5, 1)
    assert segment.read_bytes() == record_line(0) + b"?\n" + record_line(1)
    assert rejects.read_bytes() == b'{"index":5,"reason":"bad_row"}\n'
    assert ledger.committed() == {"A/w-0.jsonl": segment.stat().st_size}


def test_a_ledger_in_use_is_refused_unless_forced(ledger: Ledger, settings: Settings) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1)[:-1])
    ledger.heartbeat("generate@host", {"concurrency": 4})
    with pytest.raises(UsageError, match=r"in use by generate@host \(seen \d+ s ago\)"):
        recover(settings, ledger)
    assert ledger.datasets() == []
    (done,) = recover(settings, ledger, force=True)
    # The torn line may be one that a worker is writing now.
    assert (done.records, done.torn_bytes) == (1, 0)
    assert (settings.output / "A" / "w-0.jsonl").read_bytes() == record_line(0) + record_line(1)[:-1]


def test_a_process_that_is_silent_for_a_minute_is_dead(ledger: Ledger, settings: Settings) -> None:
    now = ledger.heartbeat("generate@host", {})
    ledger.redis.hset("tokenmill:workers", "generate@host", f"{now - 61_000} {{}}")
    recover(settings, ledger)
    assert ledger.datasets() == ["A"]


def test_other_datasets_of_the_ledger_are_left_alone(ledger: Ledger, settings: Settings) -> None:
    ledger.register(settings.datasets[0].model_copy(update={"name": "AB"}))
    ledger.set_committed("AB/w-0.jsonl", 17)
    recover(settings, ledger)
    assert sorted(ledger.datasets()) == ["A", "AB"]
    assert ledger.committed() == {"AB/w-0.jsonl": 17}


@pytest.mark.parametrize("state", ["paused", "halted"])
def test_what_was_stopped_on_purpose_stays_stopped(ledger: Ledger, settings: Settings, state: str) -> None:
    ledger.register(settings.datasets[0])
    ledger.transition("A", state, ["open"], "too many repeats")
    write_segment(settings.output, "w-0.jsonl", record_line(0))
    (done,) = recover(settings, ledger)
    after = ledger.snapshot("A")
    assert (done.state, after.state, after.reason, after.done) == (state, state, "too many repeats", 1)


def test_a_recovery_that_is_cut_short_leaves_the_dataset_paused_and_the_next_opens_it(
    ledger: Ledger, settings: Settings
) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0))
    acl(ledger, "-setbit")  # Redis refuses in the middle of the rebuild
    try:
        with pytest.raises(RedisUnavailable, match="run `tokenmill recover` again"):
            recover(settings, ledger)
    finally:
        acl(ledger, "+setbit")
    half = ledger.snapshot("A")
    assert (half.state, half.done) == ("paused", 0)
    assert "tokenmill recover" in half.reason
    (done,) = recover(settings, ledger)
    assert (done.state, done.records) == ("open", 1)


def acl(ledger: Ledger, rule: str) -> None:
    ledger.redis.execute_command("ACL", "SETUSER", "default", rule)  # type: ignore[no-untyped-call]


def test_a_dataset_at_its_cap_is_capped_at_once(ledger: Ledger, settings: Settings) -> None:
    """It was open, at 102 % of its cap, until the next run."""
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1))  # of 2 completion tokens each
    (dataset,) = settings.datasets
    for cap_tokens, state in ((4, "capped"), (5, "open"), (3, "capped"), (None, "open")):
        capped = settings.model_copy(update={"datasets": [dataset.model_copy(update={"cap_tokens": cap_tokens})]})
        assert [done.state for done in recover(capped, ledger)] == [state]
    assert ledger.register(dataset.model_copy(update={"cap_tokens": None})) == "known"


def test_verify_names_what_the_ledger_has_otherwise(ledger: Ledger, settings: Settings) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1))
    recover(settings, ledger)
    assert verify(settings.output, ["A"], ledger).differences == []
    write_segment(settings.output, "w-1.jsonl", record_line(2))
    append_rejects(settings.output, "A", [Reject(3, "bad_row")])
    report = verify(settings.output, ["A"], ledger)
    assert report.ledger_compared
    assert report.differences == [
        Difference("A", "done", 3, 2),
        Difference("A", "rejected", 1, 0),
        Difference("A", "prompt_tokens", 9, 6),
        Difference("A", "completion_tokens", 6, 4),
    ]
    assert report.notes == ["A: 1 record written, but never settled in the ledger"]


def test_verify_does_not_judge_a_ledger_at_work(ledger: Ledger, settings: Settings) -> None:
    recover(settings, ledger)
    write_segment(settings.output, "w-0.jsonl", record_line(0))
    ledger.heartbeat("generate@host", {})
    report = verify(settings.output, ["A"], ledger)
    assert (report.ledger_compared, report.differences) == (False, [])
    assert "a run is at work" in report.notes[0]
    # A dataset that has ended is at rest, whatever else runs.
    ledger.transition("A", "exhausted", ["open"])
    assert verify(settings.output, ["A"], ledger).differences[0] == Difference("A", "done", 1, 0)


def test_the_commands_on_a_redis_of_ones_own(ledger: Ledger, tmp_path: Path, valkey: str) -> None:
    config = write_config(tmp_path, valkey, datasets=("A", "B"))
    torn = len(record_line(1)) - 1
    write_segment(tmp_path / "out", "w-0.jsonl", record_line(0), record_line(1)[:-1])
    result = CliRunner().invoke(files.verify, ["-c", str(config)])
    assert isinstance(result.exception, DataError)
    assert "A: done is 1 in the files and 0 in the ledger" in result.stdout

    result = CliRunner().invoke(files.recover, ["-c", str(config)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"A: 1 record, 5 tokens (3 prompt + 2 completion), 0 rejects, 0 superseded, {torn} torn bytes cut",
        "B: 0 records, 0 tokens (0 prompt + 0 completion), 0 rejects, 0 superseded, 0 torn bytes cut",
    ]
    assert f"`tokenmill run -c {config}` goes on from here" in result.stderr
    result = CliRunner().invoke(files.verify, ["-c", str(config)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "nothing wrong: 1 record, 5 tokens; the ledger agrees"


def test_the_commands_on_the_embedded_redis(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    write_segment(tmp_path / "out", "w-0.jsonl", record_line(0))
    assert CliRunner().invoke(files.recover, ["-c", str(config)]).exit_code == 0
    result = CliRunner().invoke(files.verify, ["-c", str(config)])
    assert (result.exit_code, result.stderr) == (0, "")  # compared, and equal

    with (tmp_path / "out" / ".redis" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = CliRunner().invoke(files.recover, ["-c", str(config)])
    assert isinstance(result.exception, UsageError)
    assert "another tokenmill runs" in str(result.exception)
