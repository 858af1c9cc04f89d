"""The workers' tasks; thin, wiring only."""

from functools import cache
from typing import NoReturn

from common.broker import GENERATE, KEEP
from workers.app import app, settings
from workers.keeper import Keeper, keeper_of


@app.task(name=GENERATE)
def generate(dataset: str, indices: list[int]) -> NoReturn:
    """Make the answers of some samples. Run by workers.pool, which does not call this."""
    raise RuntimeError(
        f"{dataset} {indices}: generate runs in the pool workers.pool:AsyncioPool; start it with `tokenmill worker`"
    )


@app.task(name=KEEP, send_events=False)
def keep() -> None:
    """One tick of the keeper; without events, which would bury the answers in Flower."""
    _keeper().tick()


@cache
def _keeper() -> Keeper:
    return keeper_of(settings, app)
