"""A short run of `make chaos`: some fifteen faults at a whole installation, and then the books."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.chaos.run import made_site, storm

SEED, MINUTES = 7, 0.6


@pytest.mark.timeout(300)
def test_the_books_balance_after_forty_seconds_of_chaos() -> None:
    with TemporaryDirectory(prefix="tm-") as folder, made_site(Path(folder), SEED, MINUTES) as site:
        outcome = storm(site, SEED, MINUTES)
        told = "\n".join((*outcome.lines(site), *outcome.books.evidence))
        assert not outcome.books.wrong, f"{site.logs()}\n{told}"
        assert outcome.faults.thrown.total() >= 8, told
