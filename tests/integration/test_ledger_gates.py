"""What the ledger keeps for the gates: the window of the last answers, and what does not count against the cap."""

import numpy as np
from numpy.typing import NDArray

from common.gate_settings import KEPT_ANSWERS
from common.ledger import Ledger, Settled
from common.sections import DatasetSettings
from tests.integration.ledger_steps import claim, feed, record, settings
from workers.gates import RECENT


def window(ledger: Ledger) -> NDArray[np.void]:
    return np.frombuffer(ledger.recent("b1"), RECENT)


def test_the_window_holds_what_counts_once(ledger: Ledger) -> None:
    feed(ledger, 4)
    first, second, third = claim(ledger, 0, 1, 2)
    ended = [record(first, 10, ["truncated", "repetition"]), record(second, 20)]
    ledger.settle("b1", ended)
    ledger.settle("b1", ended)  # again: its answer was lost on the way
    ledger.settle("b1", [Settled(third.index, third.attempt - 1, 100, 30, 60, ())])  # superseded
    ledger.settle("b1", [Settled(third.index, third.attempt, 100, 30, 60, ("clipped",), clock=27.5)])
    found = window(ledger)
    assert found["index"].tolist() == [0, 1, 2]
    assert found["attempt"].tolist() == [first.attempt, second.attempt, third.attempt]
    assert found["tokens"].tolist() == [10, 20, 30]
    assert found["clock"].tolist() == [0.0, 0.0, 27.5]
    assert found["flags"].tolist() == [1 + 256 * 2, 0, 2]
    assert abs(found["settled"] - ledger.now_ms()).max() < 60_000
    assert ledger.snapshot("b1").recent == 3


def test_the_window_is_bounded_and_keeps_the_newest(ledger: Ledger) -> None:
    ledger.register(settings())
    for first in range(0, 3000, 100):
        ledger.settle("b1", [Settled(index, index + 1, 1, 7, 0, ()) for index in range(first, first + 100)])
    assert sorted(window(ledger)["index"].tolist()) == list(range(3000 - KEPT_ANSWERS, 3000))
    assert ledger.snapshot("b1").recent == 3000


def test_a_rebuilt_ledger_has_no_window(ledger: Ledger) -> None:
    ledger.register(settings())
    ledger.settle("b1", [Settled(0, 1, 1, 7, 0, ("repetition",))], rebuild=True)
    assert (len(window(ledger)), ledger.snapshot("b1").recent) == (0, 0)
    assert ledger.snapshot("b1").flags == {"repetition": 1}


def test_opening_a_dataset_again_begins_a_window(ledger: Ledger) -> None:
    feed(ledger, 1)
    assert ledger.snapshot("b1").gates_since_ms == 0
    for how in ("transition", "register"):
        before = ledger.now_ms()
        ledger.transition("b1", "halted", ["open"], "gate repetition: ...")
        if how == "transition":
            ledger.transition("b1", "open", ["halted"])
        else:
            assert ledger.register(settings(cap_tokens=1000)) == "reopened"
        assert ledger.snapshot("b1").state == "open"
        assert ledger.snapshot("b1").gates_since_ms >= before
    since = ledger.snapshot("b1").gates_since_ms
    ledger.transition("b1", "open", ["open"], "a note")  # nobody has looked
    assert ledger.snapshot("b1").gates_since_ms == since


def test_what_does_not_count_is_kept_and_not_spent(ledger: Ledger) -> None:
    ledger.register(settings(cap_tokens=500, count="total"))
    ledger.settle(
        "b1", [Settled(0, 1, 100, 300, 0, ()), Settled(1, 1, 100, 900, 0, ("repetition", "uncounted"))], rebuild=True
    )
    now = ledger.snapshot("b1")
    assert (now.done, now.prompt_tokens, now.completion_tokens) == (2, 200, 1200)
    assert (now.uncounted, now.uncounted_tokens, now.spent_tokens) == (1, 1000, 400)
    # A cap is raised by what is spent, not by all that there is.
    ledger.transition("b1", "capped", ["open"])
    assert ledger.retune(now, capped(501)) == "reopened"
    ledger.transition("b1", "capped", ["open"])
    assert ledger.register(capped(502)) == "reopened"


def capped(tokens: int) -> DatasetSettings:
    return settings(cap_tokens=tokens, count="total")
