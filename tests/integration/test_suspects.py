"""Samples that lost two workers are handed out one at a time, so that the one that kills ends, and no other with it."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from common.broker import make_celery
from common.ledger import SUSPECT_AFTER, Claimed, Lapsed, Ledger
from common.ledger._keys import keys_of
from common.rejects import read_rejects
from common.sections import TokenizerSettings
from common.settings import Settings
from tests.integration.ledger_steps import (
    HOUR,
    KEYS,
    PatientKeeper,
    claim,
    counts,
    every_key,
    feed,
    given_back,
    lapse,
    lapse_all,
    pair,
    record,
    settings,
)
from workers.keeper import MAX_TRIES


def suspect(ledger: Ledger, *indices: int) -> None:
    """Let workers die over these until they are suspects."""
    for death in range(SUSPECT_AFTER):
        lapse(ledger, *claim(ledger, *indices, owner=f"dead-{death}"))
        assert len(ledger.expire("b1", max_tries=MAX_TRIES)[0]) == len(indices)
    assert set(ledger.resend("b1", 1, indices)) == set(indices)


def outlive(ledger: Ledger) -> None:
    """Turn the clock: all suspects that are in flight were claimed so long ago that their time alone is over."""
    notes = cast("dict[bytes, bytes]", ledger.redis.hgetall(KEYS.suspects))
    now_ms = ledger.snapshot("b1").now_ms
    for name, note in notes.items():
        ledger.redis.hset(KEYS.suspects, name.decode(), b"%d %b" % (now_ms, note.split()[1]))


def test_a_worker_gets_one_suspect_at_a_time_and_the_others_are_sent_again(ledger: Ledger) -> None:
    feed(ledger, 5)
    suspect(ledger, 0, 1, 2)

    claimed, refused = ledger.claim("b1", "w1", HOUR, [3, 0, 1, 4, 2])

    assert [sample.index for sample in claimed] == [3, 0, 4]
    assert refused == {1: "alone", 2: "alone"}
    assert ledger.claim("b1", "w1", HOUR, [2, 2]) == ([], {2: "alone"})
    assert given_back(ledger) == [1, 2]
    assert counts(ledger) == (2, 3, 0, 0)
    assert [sample.index for sample in ledger.claim("b1", "w2", HOUR, [0, 1, 2])[0]] == [1]


def test_a_sample_that_lost_one_worker_is_no_suspect(ledger: Ledger) -> None:
    feed(ledger, 2)
    lapse(ledger, *claim(ledger, 0, 1))
    ledger.expire("b1", max_tries=MAX_TRIES)

    assert len(claim(ledger, 0, 1)) == 2


END: dict[str, Callable[[Ledger, Claimed], object]] = {
    "settled": lambda ledger, sample: ledger.settle("b1", [record(sample)]),
    "released": lambda ledger, sample: ledger.release("b1", [pair(sample)], failed=False),
    "rejected": lambda ledger, sample: ledger.reject("b1", [(*pair(sample), "empty")]),
}


@pytest.mark.parametrize("end", END.values(), ids=END)
def test_the_next_suspect_goes_when_the_one_before_has_ended(
    ledger: Ledger, end: Callable[[Ledger, Claimed], object]
) -> None:
    feed(ledger, 2)
    suspect(ledger, 0, 1)
    (first,) = claim(ledger, 0)
    end(ledger, first)

    assert KEYS.suspects not in every_key(ledger)
    assert [sample.index for sample in claim(ledger, 1)] == [1]


def test_a_suspect_that_ends_lets_no_second_one_beside_another(ledger: Ledger) -> None:
    """A late answer to an attempt of another worker says nothing of the suspect that this one has."""
    feed(ledger, 3)
    suspect(ledger, 0, 1, 2)
    (elsewhere,) = claim(ledger, 0, owner="w2")
    claim(ledger, 1)
    ledger.settle("b1", [record(elsewhere)])

    assert ledger.claim("b1", "w1", HOUR, [2]) == ([], {2: "alone"})


def test_a_worker_that_outlived_its_suspect_gets_the_next(ledger: Ledger) -> None:
    """It shows that by a renewal after the time alone; its claims may come from another process of its name."""
    feed(ledger, 2)
    suspect(ledger, 0, 1)
    (first,) = claim(ledger, 0)
    ledger.renew("b1", "w1", HOUR, [pair(first)])
    assert ledger.claim("b1", "w1", HOUR, [1]) == ([], {1: "alone"})
    outlive(ledger)
    assert ledger.claim("b1", "w1", HOUR, [1]) == ([], {1: "alone"})
    assert ledger.renew("b1", "w1", HOUR, [pair(first)]) == []

    (second,) = claim(ledger, 1)
    lapse(ledger, first, second)

    assert ledger.expire("b1", max_tries=MAX_TRIES) == (
        [Lapsed(0, first.attempt, "w1")],
        [Lapsed(1, second.attempt, "w1")],
    )


def test_a_worker_dies_and_its_suspect_alone_ends(ledger: Ledger) -> None:
    feed(ledger, 4)
    suspect(ledger, 2)
    samples = claim(ledger, 0, 1, 2, 3)
    lapse(ledger, *samples)

    back, ended = ledger.expire("b1", max_tries=MAX_TRIES)

    assert ended == [Lapsed(2, samples[2].attempt, "w1")]
    assert {lapsed.index: lapsed.attempt for lapsed in back} == {i: samples[i].attempt for i in (0, 1, 3)}
    assert counts(ledger) == (3, 1, 0, 0)


def test_the_suspect_of_a_dead_worker_ends_though_another_process_bears_its_name(ledger: Ledger) -> None:
    """The lease outlasts the time alone: the new process must not take another one before the dead one's has ended."""
    feed(ledger, 2)
    suspect(ledger, 0, 1)
    (poison,) = claim(ledger, 0)
    outlive(ledger)
    assert ledger.claim("b1", "w1", HOUR, [1]) == ([], {1: "alone"})
    lapse(ledger, poison)

    assert ledger.expire("b1", max_tries=MAX_TRIES) == ([], [Lapsed(0, poison.attempt, "w1")])
    ledger.reject("b1", [(*pair(poison), "worker_lost")])
    assert len(claim(ledger, 1)) == 1


def test_a_suspect_that_was_to_be_rejected_and_was_not_is_told_again(ledger: Ledger) -> None:
    feed(ledger, 1)
    suspect(ledger, 0)
    (poison,) = claim(ledger, 0)
    lapse(ledger, poison)

    ended = [ledger.expire("b1", max_tries=MAX_TRIES, hold_seconds=0)[1] for _ in range(2)]

    assert ended == [[Lapsed(0, poison.attempt, "w1")]] * 2


def test_a_worker_gets_one_suspect_of_all_datasets(ledger: Ledger) -> None:
    feed(ledger, 2)
    suspect(ledger, 0, 1)
    ledger.register(settings("b2"))
    ledger.feed("b2", before="", after="1", ended=True, rejected=[], samples=[(0, b"p"), (1, b"q")])
    ledger.admit("b2", room=9, window=64, tokens_per_second=0)
    ledger.redis.hset(keys_of("b2").tries, "0", SUSPECT_AFTER)
    (mine,) = claim(ledger, 0)

    claimed, refused = ledger.claim("b2", "w1", HOUR, [0, 1])
    assert [sample.index for sample in claimed] == [1]
    assert refused == {0: "alone"}

    lapse_all(ledger, "b2")
    lapse(ledger, mine)
    assert ledger.expire("b2", max_tries=MAX_TRIES) == ([Lapsed(1, claimed[0].attempt, "w1")], [])
    assert [lapsed.index for lapsed in ledger.expire("b1", max_tries=MAX_TRIES)[1]] == [0]


def test_a_sample_that_is_never_alone_ends_after_the_largest_number_of_tries(ledger: Ledger) -> None:
    feed(ledger, 1)
    for lost in range(1, MAX_TRIES + 1):
        (sample,) = claim(ledger, 0)
        outlive(ledger)
        ledger.renew("b1", "w1", HOUR, [pair(sample)])
        lapse(ledger, sample)
        lapsed = [Lapsed(0, sample.attempt, "w1")]
        assert ledger.expire("b1", max_tries=MAX_TRIES) == (([], lapsed) if lost == MAX_TRIES else (lapsed, []))


def test_a_frozen_worker_comes_back_with_a_sample_that_became_a_suspect(ledger: Ledger) -> None:
    """It was not claimed alone, so it holds up no suspect of its worker, and does not end with it."""
    feed(ledger, 2)
    suspect(ledger, 1)
    ledger.redis.hset(KEYS.tries, "0", SUSPECT_AFTER - 1)
    (frozen,) = claim(ledger, 0)
    lapse(ledger, frozen)
    ledger.expire("b1", max_tries=MAX_TRIES)
    assert ledger.renew("b1", "w1", HOUR, [pair(frozen)]) == []

    claim(ledger, 1)
    lapse_all(ledger, "b1")

    back, ended = ledger.expire("b1", max_tries=MAX_TRIES)
    assert ([lapsed.index for lapsed in back], [lapsed.index for lapsed in ended]) == ([0], [1])


def test_a_ledger_that_is_built_anew_knows_no_suspects(ledger: Ledger) -> None:
    feed(ledger, 2)
    suspect(ledger, 0, 1)
    claim(ledger, 0)
    ledger.redis.hset(KEYS.suspects, f"{keys_of('b11').leases} 0", "1795000000000 w2")
    ledger.forget("b1")

    assert ledger.redis.hkeys(KEYS.suspects) == [b"tokenmill:d:b11:leases 0"]
    feed(ledger, 2)
    assert len(claim(ledger, 0, 1)) == 2


def test_a_suspect_that_the_ledger_forgot_holds_up_no_other_for_longer_than_a_lease(ledger: Ledger) -> None:
    feed(ledger, 1)
    suspect(ledger, 0)
    now_ms = ledger.snapshot("b1").now_ms
    ledger.redis.hset(KEYS.suspects, "tokenmill:d:gone:leases 7", f"{now_ms - 1_800_000} w1")

    assert ledger.claim("b1", "w1", HOUR, [0]) == ([], {0: "alone"})
    assert len(ledger.claim("b1", "w1", HOUR / 2, [0])[0]) == 1


def test_one_sample_kills_three_workers_and_the_thirty_that_flew_with_it_are_answered(
    ledger: Ledger, valkey: str, tmp_path: Path
) -> None:
    poison, rows = 17, 31
    feed(ledger, rows)
    ledger.register(settings())  # without a cap
    given = Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))
    deaths = 0
    with make_celery("tokenmill", given) as app:
        keeper = PatientKeeper(given, app, ledger)
        ledger.heartbeat("w1@host", {"kind": "worker", "limit": 64})
        for _ in range(100):
            assert keeper.tick()
            # Whatever was given back or refused has a message again, save suspects: of these one for each worker.
            assert given_back(ledger) == [] or ledger.snapshot("b1").sent == 1
            samples, _ = ledger.claim("b1", "w1@host", HOUR, range(rows))
            if poison in {sample.index for sample in samples}:
                deaths += 1
                lapse(ledger, *samples)
            else:
                ledger.settle("b1", [record(sample, 1) for sample in samples])
            if counts(ledger) == (0, 0, rows - 1, 1):
                break
        keeper.close()

    assert counts(ledger) == (0, 0, rows - 1, 1)
    assert deaths == SUSPECT_AFTER + 1
    assert {index: row.reason for index, row in read_rejects(tmp_path, "b1").rows.items()} == {poison: "worker_lost"}
