"""Rows of each kind, counted, with the first of them as examples."""

from collections import Counter

EXAMPLES = 3


class Counts:
    """How many rows of each kind, and where the first three are: their index, and what is to be told of them."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.examples: dict[str, list[tuple[int, str]]] = {}

    def add(self, what: str, index: int, detail: str = "") -> None:
        """Count a row of kind `what`."""
        rows = self.rows[what] = self.rows.get(what, 0) + 1
        if rows <= EXAMPLES:
            self.examples.setdefault(what, []).append((index, detail))

    def merge(self, later: "Counts", base: int) -> None:
        """Count what was counted from row `base` on, with indices from there."""
        for what, rows in later.rows.items():
            wanted = EXAMPLES - self.rows.get(what, 0)
            if wanted > 0:
                more = [(base + index, detail) for index, detail in later.examples[what][:wanted]]
                self.examples.setdefault(what, []).extend(more)
            self.rows[what] = self.rows.get(what, 0) + rows

    def add_to(self, other: "Counts", what: str, name: str) -> None:
        """Count the rows of kind `what` in `other`, too, as kind `name`."""
        rows = self.rows[what]
        wanted = EXAMPLES - other.rows.get(name, 0)
        if wanted > 0:
            other.examples.setdefault(name, []).extend(self.examples[what][:wanted])
        other.rows[name] = other.rows.get(name, 0) + rows

    def told(self, what: str) -> tuple[str, ...]:
        """The examples of a kind: `row 1,234: what is told of it`."""
        found = self.examples.get(what, ())
        return tuple(f"row {index:,}: {detail}" if detail else f"row {index:,}" for index, detail in found)

    def __getitem__(self, what: str) -> int:
        return self.rows[what]
