"""Lengths of the rows that went by, and what is to be said of them."""

from collections import Counter

# Above so many different lengths new ones are kept to three digits, so that the table stays below some 20 MB.
_DISTINCT = 100_000


class Lengths:
    """Lengths, with the exact number of each: as much memory as there are different ones, not rows."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.total = 0

    def add(self, length: int, rows: int = 1) -> None:
        """Take one length, of so many rows."""
        if len(self.rows) >= _DISTINCT and length not in self.rows:
            step = 10 ** max(0, len(str(length)) - 3)
            length -= length % step
        self.rows[length] += rows
        self.total += rows * length

    def add_all(self, lengths: list[int]) -> None:
        """As add() does, one after the other: new lengths come in their order, and equal ones are one length."""
        for length, rows in Counter(lengths).items():
            self.add(length, rows)

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
        count = self.count
        for length, rows in ordered:
            seen += rows
            while wanted and seen >= wanted[0] * count - 1e-9:
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
