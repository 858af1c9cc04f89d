"""Numbers with their words, as sentences for people have them."""


def counted(n: int, word: str, more: str = "") -> str:
    """`1 row`, `2,000 rows`; `more` is the plural where it is another than with an s."""
    return f"{n:,} {word if n == 1 else more or word + 's'}"


def ending(in_flight: int) -> str:
    """What becomes of the answers in flight where nothing new is started: `1 answer in flight ends and counts`."""
    return f"{counted(in_flight, 'answer')} in flight {'ends and counts' if in_flight == 1 else 'end and count'}"
