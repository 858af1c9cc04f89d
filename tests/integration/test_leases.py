"""The thread that keeps a worker's leases alive, on a real ledger."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.ledger import Ledger
from tests.conftest import wait_until
from tests.integration.ledger_steps import KEYS, claim, feed, lapse, pair, record
from workers.leases import Leases

LEASE_SECONDS = 1.0


@contextmanager
def renewing(redis_url: str, facts: Callable[[], Mapping[str, Any]] | None = None) -> Iterator[Leases]:
    leases = Leases(Ledger.connect(redis_url), "w1", LEASE_SECONDS)
    leases.start(facts or (lambda: {"kind": "worker", "limit": 4, "held": leases.held}), dict)
    yield leases
    leases.stop()


def runs_out(ledger: Ledger, index: int) -> float:
    """When the lease of a sample runs out (ms)."""
    score = ledger.redis.zscore(KEYS.leases, index)
    assert isinstance(score, float)
    return score


def renewed(ledger: Ledger, index: int) -> None:
    """Wait until the lease of a sample has been renewed once more."""
    before = runs_out(ledger, index)
    wait_until("it is renewed", lambda: runs_out(ledger, index) > before)


def test_what_is_held_is_renewed_and_what_was_dropped_is_not(valkey: str, ledger: Ledger) -> None:
    feed(ledger, 2)
    with renewing(valkey) as leases:
        (kept, dropped), _ = ledger.claim("b1", "w1", LEASE_SECONDS, [0, 1])
        leases.hold([kept, dropped])
        assert leases.holds(kept)
        assert leases.held == 2
        leases.drop([dropped])
        assert not leases.holds(dropped)
        renewed(ledger, 0)  # both, by a renewal that was under way
        first = runs_out(ledger, 1)
        for _ in range(2):
            renewed(ledger, 0)
        assert runs_out(ledger, 1) == first
    assert ledger.settle("b1", [record(kept)]) == [True]


def test_a_sample_that_went_to_another_attempt_is_told_once_and_let_go(valkey: str, ledger: Ledger) -> None:
    feed(ledger, 2)
    with renewing(valkey) as leases:
        lost, kept = claim(ledger, 0, 1)
        lapse(ledger, lost)
        ledger.expire("b1", max_tries=3)
        (other,) = claim(ledger, 0, owner="w2")
        before = runs_out(ledger, 0)
        leases.hold([lost, kept])
        wait_until("it is noticed", lambda: leases.lost == 1)
        assert leases.held == 1
        for _ in range(2):
            renewed(ledger, 1)
        assert leases.lost == 1
        assert runs_out(ledger, 0) == before  # the other's lease is its own affair
        leases.drop([lost])  # the late answer came; it must not let go of what another attempt has
    assert ledger.release("b1", [pair(other)], failed=False) == 1


def test_each_heartbeat_tells_what_the_worker_does_and_the_end_takes_it_back(valkey: str, ledger: Ledger) -> None:
    feed(ledger, 1)
    with renewing(valkey) as leases:
        wait_until("it is there", lambda: "w1" in ledger.processes())
        leases.hold(claim(ledger, 0))
        wait_until("it says so", lambda: ledger.processes()["w1"][1] == {"kind": "worker", "limit": 4, "held": 1})
    assert ledger.processes() == {}


def test_a_fault_in_what_a_heartbeat_tells_does_not_cost_the_leases(valkey: str, ledger: Ledger) -> None:
    feed(ledger, 1)

    def facts() -> Mapping[str, Any]:
        raise ValueError("a bug")

    with renewing(valkey, facts) as leases:
        leases.hold(ledger.claim("b1", "w1", LEASE_SECONDS, [0])[0])
        for _ in range(2):
            renewed(ledger, 0)
