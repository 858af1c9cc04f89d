"""The order of a shuffle: every row once, the same on every machine, another one for each seed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from producer.datasets.permutation import Permutation

SEEDS = st.integers(0, 2**63 - 1)


def order(size: int, seed: int) -> list[int]:
    permutation = Permutation(size, seed)
    return [permutation[step] for step in range(size)]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_every_row_comes_once_for_every_small_size(seed: int) -> None:
    for size in range(130):
        assert sorted(order(size, seed)) == list(range(size))


@hypothesis(deadline=None, max_examples=30)
@given(size=st.integers(1, 5000), seed=SEEDS)
def test_every_row_comes_once(size: int, seed: int) -> None:
    assert sorted(order(size, seed)) == list(range(size))


@hypothesis(deadline=None)
@given(size=st.integers(2, 2**40), seed=SEEDS, data=st.data())
def test_no_two_steps_of_a_large_source_meet(size: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(size, seed)
    steps = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=20))
    rows = {permutation[step] for step in steps}
    assert len(rows) == len(steps)
    assert all(0 <= row < size for row in rows)


def test_an_order_is_the_same_wherever_it_is_computed() -> None:
    assert order(10, 7) == [9, 8, 4, 0, 2, 3, 6, 1, 5, 7]
    assert order(1000, 1)[:6] == [181, 494, 703, 99, 890, 229]
    large = Permutation(10**9, 7)
    assert [large[step] for step in range(6)] == [399645880, 908118709, 762533500, 97266778, 811010972, 525959712]


def test_another_seed_is_another_order() -> None:
    assert len({tuple(order(100, seed)) for seed in range(50)}) == 50


def test_neighbours_do_not_stay_together() -> None:
    rows = order(10_000, 3)
    assert sum(abs(after - row) == 1 for row, after in itertools.pairwise(rows)) < 10
    # Where in the source a row stands says nothing of where it comes in the order: each half has half of each half.
    assert abs(sum(row < 5000 for row in rows[:5000]) - 2500) < 150


@pytest.mark.parametrize("step", [-1, 10])
def test_there_is_nothing_beyond_the_rows(step: int) -> None:
    with pytest.raises(IndexError):
        Permutation(10, 7)[step]
