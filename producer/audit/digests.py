"""Digests of the texts that went by: which are there again."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from producer.audit.counts import EXAMPLES
from producer.audit.lengths import Lengths

if TYPE_CHECKING:  # of Python 3.11 it cannot be subscripted
    from array import array

Places = NDArray[np.bool_]  # by row
_LOW_BITS = 2**22 - 1


class Digests:
    """Finds equal texts by 8 bytes for each row, with 16 more for a moment, and some 40 for each that is not alone.

    Of a hundred million rows two that differ are taken for equal with a chance of one in 3,700.
    """

    def __init__(self, digests: "array[int] | NDArray[np.uint64]") -> None:
        """`digests` has one number for each row, of 4 billion at most; 0 if it has no text that counts."""
        self._kept = np.frombuffer(digests, np.uint64)
        self._places = _perhaps_again(self._kept)
        _, at, self._counts = np.unique(self._kept[self._places], return_index=True, return_counts=True)
        self._firsts = self._places[at]

    def first(self) -> Places:
        """For each row whether it has a text that counts, and no earlier one has it."""
        first: Places = self._kept != 0
        first[self._places] = False
        first[self._firsts] = True
        return first

    def repeated(self) -> int:
        """How many rows have the text of an earlier one."""
        return len(self._places) - len(self._firsts)

    def examples(self) -> Iterator[tuple[int, int, int]]:
        """Of the text that is there most often and others: the row, counted from 0, of its first and second place.

        The third number is how often it is there.
        """
        for at in np.lexsort((self._firsts, -self._counts))[:EXAMPLES]:
            if self._counts[at] > 1:
                first = int(self._firsts[at])
                second = int(np.flatnonzero(self._kept[first + 1 :] == self._kept[first])[0])
                yield first, first + 1 + second, int(self._counts[at])


def _perhaps_again(kept: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """All rows whose number others have too, but 0, and a few others.

    To sort the numbers takes a third of the time that it takes to sort them with their places, so that is left to be
    done for those alone that have a chance: whose low bits are those of a number that is there again.
    """
    ordered = np.sort(kept)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    del ordered
    known = np.zeros(_LOW_BITS + 1, np.bool_)
    known[again & np.uint64(_LOW_BITS)] = True
    return np.flatnonzero(known[kept & np.uint64(_LOW_BITS)] & (kept != 0)).astype(np.uint32)


def pairs_of(ones: "array[int]", twos: "array[int]") -> NDArray[np.uint64]:
    """The digest of two texts of each row, from those of each; 0 if one of them is 0.

    The first is multiplied by an odd number (of MurmurHash3) and its high half mixed into the low, so that two texts
    that change places do not meet.
    """
    one, two = (np.frombuffer(digests, np.uint64) for digests in (ones, twos))
    mixed = one * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed += two
    mixed[mixed == 0] = 1
    mixed[(one == 0) | (two == 0)] = 0
    return mixed


def lengths_of(lengths: "array[int]", which: Places) -> Lengths:
    """The lengths of the rows that are True in `which`; a row of length 0 has none."""
    made = Lengths()
    values, counts = np.unique(np.frombuffer(lengths, np.uint32)[which], return_counts=True)
    made.rows.update({int(value): int(count) for value, count in zip(values, counts, strict=True) if value})
    made.total = sum(value * count for value, count in made.rows.items())
    return made
