"""Which servers a job uses: those of its configuration, and what was changed since by `tokenmill servers`."""

from collections.abc import Mapping, Sequence

from common.ledger import ServerChange


def urls_in_use(configured: Sequence[str], changes: Mapping[str, ServerChange]) -> list[str]:
    """The configured urls and the added ones, without those that were drained."""
    known = dict.fromkeys(url.rstrip("/") for url in (*configured, *changes))
    return [url for url in known if changes.get(url) != "drained"]
