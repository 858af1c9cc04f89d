"""What a worker writes onto an answer that it accepts: its flags, and whether it counts against the cap."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.flagging import flags_of
from common.flags import UNCOUNTED
from common.payload import Payload
from common.reading import UNREADABLE, Reading, find_reading
from common.records import MAX_NEW_TOKENS_CUT
from common.sections import DatasetSettings
from common.settings import Settings
from workers.sglang.answer import Answer

log = logging.getLogger(__name__)
# So many answers of a dataset are remembered, at some 150 bytes each; two of shorter ones than this may well be equal.
_REMEMBERED = 10_000
_MIN_DUPLICATE = 16
# chat_template_kwargs with which a person says that the model shall not think hold one of these.
_OF_THINKING = ("think", "reason")
_OFF = (False, 0, None, "", "none", "off", "false", "no")


class Marker:
    """Marks the answers of one dataset; for one event loop."""

    def __init__(
        self, reading: Reading | None, *, uncounted: frozenset[str], asked_to_think: bool, seen: "Answered"
    ) -> None:
        """`uncounted` are the flags that keep a record from counting against the cap."""
        self._reading = reading
        self._uncounted = uncounted
        self._asked_to_think = asked_to_think
        self._seen = seen

    def mark(self, index: int, payload: Payload, answer: Answer) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The flags of a record, and what there is to say of them."""
        found = flags_of(
            answer.output_ids,
            payload.input_ids,
            self._reading,
            truncated="truncated" in answer.flags,
            asked_to_think=self._asked_to_think,
        )
        if (other := self._seen.before(index, answer.output_ids)) is not None:
            found["duplicate_answer"] = {"of": other}
        flags = with_cut(payload, answer) + tuple(found)
        if not self._uncounted.isdisjoint(flags):
            flags = (*flags, UNCOUNTED)
        return flags, {flag: detail for flag, detail in found.items() if detail is not None}


def with_cut(payload: Payload, answer: Answer) -> tuple[str, ...]:
    """The flags that a record has in any case."""
    return answer.flags if payload.max_new_tokens is None else (*answer.flags, MAX_NEW_TOKENS_CUT)


class Answered:
    """The last answers of one dataset, by a hash, with the sample that was the first to have each."""

    def __init__(self) -> None:
        self._index_of: OrderedDict[int, int] = OrderedDict()

    def before(self, index: int, output_ids: list[int]) -> int | None:
        """Another sample that has this answer; remembers it. A sample that is made a second time is not another."""
        if len(output_ids) < _MIN_DUPLICATE:
            return None
        first = self._index_of.setdefault(hash(tuple(output_ids)), index)
        if len(self._index_of) > _REMEMBERED:
            self._index_of.popitem(last=False)
        return None if first == index else first


class Markers:
    """The markers of all datasets of a worker, made as their specs in the ledger say."""

    def __init__(self, settings: Settings, model: Mapping[str, Any]) -> None:
        """`model` are the facts of the job in the ledger, which say with what its answers are read."""
        self._settings = settings
        self._reading = _reading(settings.output, model)
        self._seen: dict[str, Answered] = {}
        self._markers: dict[tuple[str, bytes], Marker] = {}

    def of(self, dataset: str, spec: bytes) -> Marker:
        """The marker of a dataset whose settings in the ledger are `spec`."""
        if (dataset, spec) not in self._markers:
            told = msgspec.json.decode(spec or b"{}", type=dict[str, Any])
            own = {key: told[key] for key in ("chat_template_kwargs", "gates") if key in told}
            settings = DatasetSettings(name=dataset, path=Path(), **own)
            self._markers[dataset, spec] = Marker(
                self._reading,
                uncounted=self._settings.gates_of(settings).uncounted,
                asked_to_think=_asks_to_think(self._settings.template_kwargs_of(settings)),
                seen=self._seen.setdefault(dataset, Answered()),
            )
        return self._markers[dataset, spec]


def _asks_to_think(kwargs: Mapping[str, Any]) -> bool:
    """Whether nobody has said that the model shall not think."""
    off = (value.lower() if isinstance(value, str) else value for key, value in kwargs.items() if _is_of_thinking(key))
    return not any(value in _OFF for value in off)


def _is_of_thinking(key: str) -> bool:
    return any(word in key.lower() for word in _OF_THINKING)


def _reading(output: Path, model: Mapping[str, Any]) -> Reading | None:
    try:
        reading = find_reading(output, model)
    except (OSError, *UNREADABLE) as error:
        log.error("how answers are read cannot be read (%s); flags that need it are left out", error)
        return None
    if reading is None:
        log.warning("nothing in %s says how answers are read; flags that need it are left out", output)
    return reading
