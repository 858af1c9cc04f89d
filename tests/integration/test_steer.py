"""Steering: what a person asks for is done at once, is not undone by a restart or a lost Redis, and is written down."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from common.chat_template import Tokenizer
from common.errors import UsageError
from common.events import all_events, operator
from common.ledger import Ledger, Settled
from common.registered import read_kept
from common.settings import Settings, load_settings
from producer import in_force, steer
from producer.enqueue import asked_facts, capped, choose, register
from producer.recover import recover
from producer.restore import restore
from producer.status import snapshot
from tests.conftest import REPO
from tests.lines import record_line, write_segment

Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path, valkey: str) -> Make:
    def make(cap: int | None = 10_000, weight: float = 1.0) -> Settings:
        """The job's settings, as its configuration says them now."""
        (tmp_path / "rows.jsonl").write_text("")
        cap_tokens = f"cap_tokens = {cap}\n" if cap else ""
        sources = "".join(
            f'[[datasets]]\nname = "{name}"\npath = "rows.jsonl"\nweight = {weight}\n{cap_tokens}' for name in "AB"
        )
        (tmp_path / "tokenmill.toml").write_text(
            f'output = "out"\nredis = "{valkey}"\n[tokenizer]\npath = "{REPO}/examples/tokenizer"\n{sources}'
        )
        return load_settings(tmp_path / "tokenmill.toml")

    return make


def begin(settings: Settings, ledger: Ledger, cap: str | None = None) -> dict[str, str]:
    """What `run` and `enqueue` do; answers the ledger's word for each dataset."""
    model: dict[str, Any] = {"model_path": "m", "weight_version": "1", "vocab_size": 4096, "servers": []}
    facts = model | asked_facts(settings, settings.datasets) | Tokenizer(settings.tokenizer).fingerprint()
    chosen = choose(settings, [])
    return register(settings, ledger, chosen if cap is None else capped(chosen, cap), facts)[0]


@pytest.fixture
def settings(make: Make, ledger: Ledger) -> Settings:
    settings = make()
    begin(settings, ledger)
    return settings


def spend(ledger: Ledger, name: str, tokens: int) -> None:
    """One answer of so many tokens, then a tick of the keeper's."""
    ledger.feed(name, before="", after="1", ended=False, rejected=[], samples=[(0, b"x"), (1, b"y"), (2, b"z")])
    ledger.admit(name, room=2, window=9, tokens_per_second=1.0)
    claimed, _ = ledger.claim(name, "w1@h", 60, [0, 1])
    ledger.settle(name, [Settled(0, claimed[0].attempt, 1, tokens, 0, ())])


def told(settings: Settings) -> list[tuple[str, str | None]]:
    return [(event.what, event.dataset) for event in all_events(settings.output) if event.what != "registered"]


def shown(ledger: Ledger, name: str) -> dict[str, Any]:
    return next(one for one in snapshot(ledger)["datasets"] if one["name"] == name)


def test_a_paused_dataset_hands_out_nothing_until_it_is_resumed(settings: Settings, ledger: Ledger) -> None:
    spend(ledger, "A", 40)
    assert steer.pause(settings, ledger, "A") == "A: paused; 1 answer in flight ends and counts"
    assert shown(ledger, "A")["state"] == "paused"
    assert f"paused by {operator()} at 20" in shown(ledger, "A")["reason"]
    assert ledger.claim("A", "w1@h", 60, [2])[1] == {2: "paused"}
    assert "it was paused already (paused by " in steer.pause(settings, ledger, "A")
    assert steer.resume(settings, ledger, "A") == "A: open again, after it was paused"
    assert steer.resume(settings, ledger, "A") == "A: it is open already"
    assert ledger.snapshot("A").reason == ""
    ledger.admit("A", room=1, window=9, tokens_per_second=1.0)
    assert [claimed.index for claimed in ledger.claim("A", "w1@h", 60, [2])[0]] == [2]
    assert told(settings) == [("paused", "A"), ("resumed", "A")]
    assert [event.who for event in ledger.events(2)] == [operator()] * 2


@pytest.mark.parametrize("state", ["halted", "failed"])
def test_resume_opens_what_a_gate_or_a_source_has_stopped(settings: Settings, ledger: Ledger, state: str) -> None:
    ledger.transition("A", state, ["open"], "no answer could be used")
    assert steer.resume(settings, ledger, "A") == f"A: open again, after it was {state}"
    assert ledger.snapshot("A").state == "open"


def test_what_has_ended_is_neither_paused_nor_resumed(settings: Settings, ledger: Ledger) -> None:
    for state, instead in (
        ("capped", "raise its cap with `tokenmill cap A --add TOKENS`"),
        ("exhausted", "its source has ended"),
        ("cancelled", "that is final"),
    ):
        ledger.transition("A", state, ["open", "capped", "exhausted"])
        with pytest.raises(UsageError, match=f"A is {state}; there is nothing to pause"):
            steer.pause(settings, ledger, "A")
        with pytest.raises(UsageError, match=re.escape(f"A is {state}; {instead}")):
            steer.resume(settings, ledger, "A")
    assert told(settings) == []


def test_a_raised_cap_opens_a_capped_dataset_and_a_lowered_one_says_what_follows(
    settings: Settings, ledger: Ledger
) -> None:
    spend(ledger, "A", 9_990)
    ledger.transition("A", "capped", ["open"])
    assert steer.set_cap(settings, ledger, "A", 5_000) == (
        "A: cap 10,000 tokens -> 5,000 tokens, and 9,990 are spent: what is there stays, 1 answer in flight ends and "
        "counts, and nothing new is started"
    )
    assert ledger.snapshot("A").state == "capped"
    assert steer.add_to_cap(settings, ledger, "A", 4_000).endswith(
        "9,990 are spent: what is there stays, 1 answer in flight ends and counts, and nothing new is started"
    )
    assert steer.add_to_cap(settings, ledger, "A", 4_000) == "A: cap 9,000 tokens -> 13,000 tokens; it is open again"
    assert (shown(ledger, "A")["state"], shown(ledger, "A")["cap_tokens"]) == ("open", 13_000)
    assert steer.set_cap(settings, ledger, "A", None) == "A: cap 13,000 tokens -> no cap"
    with pytest.raises(UsageError, match="A has no cap that could be raised"):
        steer.add_to_cap(settings, ledger, "A", 1)
    ledger.transition("A", "exhausted", ["open"])
    assert steer.set_cap(settings, ledger, "A", 20_000).endswith("; its source has ended, and nothing more comes")
    with pytest.raises(UsageError, match="30,000 fewer leave none"):
        steer.add_to_cap(settings, ledger, "A", -30_000)
    assert told(settings) == [("cap", "A")] * 5


def test_a_cap_below_what_is_spent_closes_at_the_next_tick(settings: Settings, ledger: Ledger) -> None:
    spend(ledger, "A", 40)
    steer.set_cap(settings, ledger, "A", 10)
    assert ledger.admit("A", room=0, window=9, tokens_per_second=1.0) == "closing"
    assert ledger.claim("A", "w1@h", 60, [2])[1] == {2: "capped"}


def test_two_who_add_at_once_both_get_what_they_asked_for(settings: Settings, valkey: str) -> None:
    def add() -> None:
        ledger = Ledger.connect(valkey)
        for _ in range(10):
            steer.add_to_cap(settings, ledger, "A", 100)
        ledger.close()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = Ledger.connect(valkey)
    assert ledger.snapshot("A").cap_tokens == 14_000
    ledger.close()
    kept = read_kept(settings.output, "A")
    assert kept is not None
    assert kept[0].cap_tokens == 14_000


def test_the_ledger_refuses_a_change_of_what_is_not_as_it_was_seen(settings: Settings, ledger: Ledger) -> None:
    """Also where the file system has no locks that would let one come after the other."""
    seen = ledger.snapshot("A")
    changed = settings.datasets[0].model_copy(update={"cap_tokens": 20_000})
    assert ledger.retune(seen, changed) == "open"
    assert ledger.retune(seen, changed.model_copy(update={"cap_tokens": 30_000})) == "moved"
    assert ledger.snapshot("A").cap_tokens == 20_000


def test_a_cap_that_is_not_what_was_seen_is_left_alone(settings: Settings, ledger: Ledger) -> None:
    steer.set_cap(settings, ledger, "A", 12_000, steer.Seen(10_000))
    with pytest.raises(UsageError, match=r"the cap of A is 12,000 tokens by now, and not 10,000 tokens: somebody else"):
        steer.set_cap(settings, ledger, "A", 9_000, steer.Seen(10_000))
    assert ledger.snapshot("A").cap_tokens == 12_000


def test_cancel_withdraws_what_is_queued_and_counts_what_is_in_flight(settings: Settings, ledger: Ledger) -> None:
    spend(ledger, "A", 40)
    attempt = int.from_bytes(cast("bytes", ledger.redis.getrange("tokenmill:d:A:attempts", 6, 11)))
    assert steer.cancel(settings, ledger, "A") == (
        "A: cancelled; its 1 record stays, 1 queued sample was withdrawn, 1 answer in flight ends and counts"
    )
    state = ledger.snapshot("A")
    assert (state.state, state.queued, state.in_flight) == ("cancelled", 0, 1)
    assert ledger.redis.hkeys("tokenmill:d:A:payloads") == [b"1"]
    assert ledger.claim("A", "w1@h", 60, [2])[1] == {2: "unknown"}
    assert ledger.settle("A", [Settled(1, attempt, 1, 7, 0, ())]) == [True]
    assert (ledger.snapshot("A").spent_tokens, ledger.snapshot("A").in_flight) == (47, 0)
    with pytest.raises(UsageError, match=r"A is cancelled \(cancelled by .*\); that is final"):
        steer.set_cap(settings, ledger, "A", 99)
    with pytest.raises(UsageError, match=r"A is cancelled \(cancelled by .*\); that is final"):
        steer.set_weight(settings, ledger, "A", 2)
    assert "it was cancelled already" in steer.cancel(settings, ledger, "A")
    assert begin(settings, ledger)["A"] == "known"
    assert ledger.snapshot("A").state == "cancelled"
    assert told(settings) == [("cancelled", "A")]


def test_an_unknown_dataset_names_the_near_ones(settings: Settings, ledger: Ledger) -> None:
    begin(
        settings.model_copy(update={"datasets": [settings.datasets[0].model_copy(update={"name": "B1_glaive"})]}),
        ledger,
    )
    with pytest.raises(UsageError, match=r"no dataset of this job is named 'B1_glave'; did you mean B1_glaive\?"):
        steer.known(ledger, ["A", "B1_glave"])
    assert steer.known(ledger, ["B", "A", "B"]) == ["B", "A"]


def test_everything_outlives_an_emptied_redis(settings: Settings, ledger: Ledger) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1))
    steer.pause(settings, ledger, "A")
    steer.set_cap(settings, ledger, "A", 12_000)
    steer.set_weight(settings, ledger, "A", 2.5)
    steer.cancel(settings, ledger, "B")
    reason = ledger.snapshot("A").reason
    ledger.redis.flushall()
    assert restore(settings, ledger) == "1 dataset built anew from the files"
    a, b = ledger.snapshot("A"), ledger.snapshot("B")
    assert (a.state, a.cap_tokens, a.weight, a.done, a.reason) == ("paused", 12_000, 2.5, 2, reason)
    assert b.state == "cancelled"
    steer.resume(settings, ledger, "A")
    ledger.redis.flushall()
    restore(settings, ledger)
    assert (ledger.snapshot("A").state, ledger.snapshot("A").cap_tokens) == ("open", 12_000)


def test_recover_honours_what_was_asked(settings: Settings, ledger: Ledger) -> None:
    steer.pause(settings, ledger, "A")
    steer.set_cap(settings, ledger, "A", 12_000)
    steer.cancel(settings, ledger, "B")
    for empty in (False, True):
        if empty:
            ledger.redis.flushall()
        assert [done.state for done in recover(settings, ledger)] == ["paused", "cancelled"]
        assert ledger.snapshot("A").cap_tokens == 12_000


def test_a_cap_set_by_hand_holds_until_the_configuration_is_changed(make: Make, ledger: Ledger) -> None:
    settings = make(cap=10_000)
    begin(settings, ledger)
    steer.set_cap(settings, ledger, "A", 12_000)
    (note,) = in_force.notes(settings, settings.datasets)
    assert note == (
        "A: cap_tokens 12,000 was set by hand and holds, not 10,000 of the configuration, until it is changed there or "
        "by `tokenmill cap`"
    )
    begin(settings, ledger)
    assert [ledger.snapshot(name).cap_tokens for name in "AB"] == [12_000, 10_000]
    settings = make(cap=15_000)
    assert list(in_force.notes(settings, settings.datasets)) == [
        "A: cap_tokens 15,000 of the configuration holds, which was changed after 12,000 was set by hand"
    ]
    begin(settings, ledger)
    assert [ledger.snapshot(name).cap_tokens for name in "AB"] == [15_000, 15_000]
    assert list(in_force.notes(settings, settings.datasets)) == []
    begin(make(cap=10_000), ledger)
    assert ledger.snapshot("A").cap_tokens == 10_000  # nothing is left of the change by hand


def test_a_weight_set_by_hand_holds_and_that_of_the_configuration_is_no_mark(make: Make, ledger: Ledger) -> None:
    settings = make(weight=1.0)
    begin(settings, ledger)
    assert steer.set_weight(settings, ledger, "A", 3) == "A: weight 1 -> 3"
    begin(settings, ledger)
    assert ledger.snapshot("A").weight == 3
    steer.set_weight(settings, ledger, "A", 1.0)
    begin(make(weight=2.0), ledger)
    assert ledger.snapshot("A").weight == 2


def test_the_cap_of_enqueue_holds_as_one_set_by_hand(make: Make, ledger: Ledger) -> None:
    settings = make(cap=10_000)
    begin(settings, ledger, cap="8k")
    begin(settings, ledger)
    assert ledger.snapshot("A").cap_tokens == 8_000
    ledger.redis.flushall()
    restore(settings, ledger)
    begin(settings, ledger)
    assert ledger.snapshot("A").cap_tokens == 8_000


def test_run_says_that_a_dataset_is_paused_or_cancelled(settings: Settings, ledger: Ledger) -> None:
    steer.pause(settings, ledger, "A")
    steer.cancel(settings, ledger, "B")
    a, b = in_force.notes(settings, settings.datasets)
    assert re.fullmatch(r"A: paused by \S+ at .*; go on with `tokenmill resume A`", a)
    assert re.fullmatch(r"B: cancelled by \S+ at .*; that is final, and nothing more is made of it", b)


def test_books_that_are_half_built_are_not_opened(settings: Settings, ledger: Ledger) -> None:
    ledger.transition("A", "paused", ["open"], "a recovery was cut short; run `tokenmill recover` again")
    with pytest.raises(UsageError, match="the books of A are half built"):
        steer.resume(settings, ledger, "A")
