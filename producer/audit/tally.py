"""What an audit keeps of the rows that went by: counts, lengths, digests; how much memory that takes is said here."""

from array import array
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import Self

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.bool_]  # by row
EXAMPLES = 3
# Above so many different lengths new ones are kept to three digits, so that the table stays below some 20 MB.
_DISTINCT = 100_000


class Counts:
    """How many rows of each kind, and where the first three are."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, what: str, where: str) -> None:
        """Count a row of kind `what`."""
        self.rows[what] += 1
        if self.rows[what] <= EXAMPLES:
            self.examples.setdefault(what, []).append(where)

    def __getitem__(self, what: str) -> int:
        return self.rows[what]


class Lengths:
    """Lengths, with the exact number of each; 8 bytes times the number of different ones, not of rows."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.total = 0

    def add(self, length: int) -> None:
        """Take one length."""
        if len(self.rows) >= _DISTINCT and length not in self.rows:
            step = 10 ** max(0, len(str(length)) - 3)
            length -= length % step
        self.rows[length] += 1
        self.total += length

    @classmethod
    def of(cls, lengths: "array[int]", which: Places) -> Self:
        """The lengths of the rows that are True in `which`; a row of length 0 has none."""
        made = cls()
        values, counts = np.unique(np.frombuffer(lengths, np.uint32)[which], return_counts=True)
        made.rows.update({int(value): int(count) for value, count in zip(values, counts, strict=True) if value})
        made.total = sum(value * count for value, count in made.rows.items())
        return made

    @property
    def count(self) -> int:
        return self.rows.total()

    @property
    def mean(self) -> float:
        """0 if there are none."""
        return self.total / self.count if self.rows else 0.0

    def percentiles(self, shares: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)) -> list[int]:
        """The smallest length that so large a share of the rows does not exceed; empty if there are none."""
        ordered, wanted, found, seen = sorted(self.rows.items()), list(shares), [], 0
        for length, rows in ordered:
            seen += rows
            while wanted and seen >= wanted[0] * self.count - 1e-9:
                found.append(length)
                wanted.pop(0)
        return found

    def pile(self, least: int, share: float, rows: int) -> tuple[int, int] | None:
        """The length of `least` or more that far too many rows have, and how many; None if none is.

        Far too many: `rows` and a `share` of all, and ten times as many as the lengths within a tenth of it have, on
        the average.
        """
        for length, count in self.rows.most_common(3):
            if length < least:
                continue
            near = [n for other, n in self.rows.items() if other != length and abs(other - length) <= length / 10]
            usual = sum(near) / (length / 5)
            # Where all answers are of a few fixed lengths anyway, nothing was cut.
            varied = len(self.rows) >= 10 or len(self.rows) == 1
            if varied and count >= max(rows, share * self.count) and count > 10 * usual:
                return length, count
        return None


def digest_of(data: bytes) -> int:
    """64 bits for a text; 0 if it is empty, and only then."""
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1) if data else 0


def joined(one: int, two: int) -> int:
    """The digest of two texts, from those of each; 0 if one of them is empty."""
    return digest_of(one.to_bytes(8, "little") + two.to_bytes(8, "little")) if one and two else 0


class Digests:
    """Finds equal texts by 8 bytes of BLAKE2b for each row; as much again while they are counted.

    Of a hundred million rows two that differ are taken for equal with a chance of one in 3,700.
    """

    def __init__(self) -> None:
        self._digests = array("Q")

    def add(self, digest: int) -> None:
        """Take the digest of the next row; 0 if it has no text that counts."""
        self._digests.append(digest)

    def first(self) -> Places:
        """For each row whether no earlier one has its text; True too where it has none that counts."""
        kept = np.frombuffer(self._digests, np.uint64)
        first: Places = kept == 0
        first[np.unique(kept, return_index=True)[1]] = True
        return first

    def repeated(self) -> int:
        """How many rows have the text of an earlier one."""
        known = self._known()
        known.sort()
        return int(np.count_nonzero(known[1:] == known[:-1]))

    def examples(self) -> Iterator[tuple[int, int, int]]:
        """Of the text that is there most often and others: the row, counted from 0, of its first and second place.

        The third number is how often it is there.
        """
        kept = np.frombuffer(self._digests, np.uint64)
        values, firsts, counts = np.unique(kept, return_index=True, return_counts=True)
        counts[values == 0] = 0
        for at in np.lexsort((firsts, -counts))[:EXAMPLES]:
            if counts[at] > 1:
                places = np.flatnonzero(kept == values[at])[:2]
                yield int(places[0]), int(places[1]), int(counts[at])

    def _known(self) -> NDArray[np.uint64]:
        kept = np.frombuffer(self._digests, np.uint64)
        known: NDArray[np.uint64] = kept[kept != 0]
        return known
