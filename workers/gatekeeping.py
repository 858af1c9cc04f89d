"""The keeper's part in the gates: it shows them a dataset's last answers, and stops the dataset when one closes."""

import logging

import numpy as np

from common.events import make_event, tell
from common.gate_settings import GatesSettings
from common.ledger import OPEN_STATES, DatasetState, Ledger
from common.logs import about
from common.settings import Settings
from workers import in_flight
from workers.gates import RECENT, Closed, judge

log = logging.getLogger(__name__)
_STATE = {"halt": "halted", "pause": "paused"}


class Gatekeeper:
    """Looks at a dataset whenever answers have come to it; keeps nothing that it could not lose."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._seen: dict[str, int] = {}

    def stops(self, state: DatasetState) -> bool:
        """Whether a gate of the dataset has closed, so that it was paused or halted. Raises OSError, RedisError."""
        if state.state not in OPEN_STATES or state.recent == self._seen.get(state.name):
            return False
        self._seen[state.name] = state.recent
        closed = self._judged(state)
        if closed is None:
            return False
        target, why = _STATE[closed.action], sentence(state.name, closed)
        if self._ledger.transition(state.name, target, OPEN_STATES, why) in OPEN_STATES:
            log.error("%s: %s by its gates: %s", state.name, target, why, extra=about(state.name))
            if target == "paused":  # what is halted is told of by workers/news.py
                tell(self._settings.output, self._ledger, make_event("paused", why, state.name, "keeper"))
        return True

    def _judged(self, state: DatasetState) -> Closed | None:
        gates = GatesSettings(**state.spec.get("gates", {})).over(self._settings.gates)
        if state.recent < gates.at_least:
            return None
        flying = in_flight.in_flight(self._ledger.progress(state.name), self._settings.worker.lease_seconds)
        return judge(np.frombuffer(self._ledger.recent(state.name), RECENT), flying, gates, state.gates_since_ms)


def sentence(dataset: str, closed: Closed) -> str:
    """Why the dataset is stopped, and what to do, in one sentence."""
    example = f"`tokenmill show {dataset} {closed.samples[-1]}`" if closed.samples else "its samples"
    return f"gate {closed.gate}: {closed.why} ({example}), then `tokenmill resume {dataset}`"
