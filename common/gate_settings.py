"""[gates]: which share of which flag stops a dataset, and what becomes of flagged records."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from common.flags import FLAGS

Action = Literal["halt", "pause", "none"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
# The last answers that the ledger keeps of each dataset (settle.lua).
KEPT_ANSWERS = 1024


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GateSettings(_Section):
    """What follows from one flag."""

    share: Share | None = None
    """Above this share of the window the dataset is stopped; 1: never."""
    action: Action | None = None
    """How it is stopped; if not set, as `[gates] action` says."""
    drop_from_export: bool = False
    """Whether records with the flag are left out of exports."""
    counts: bool = True
    """Whether records with the flag count against the cap."""


class ChangeSettings(_Section):
    """What follows from a sudden change of the lengths of answers, or of how they end."""

    action: Action | None = None
    """How it is stopped; if not set, as `[gates] action` says."""
    factor: Annotated[float, Field(gt=1)] = 2.0
    """Answers so many times as long as before, or as short, are a change."""


def gate_in(reason: str) -> str | None:
    """The gate that has stopped a dataset, given why it is stopped; None if it was none (workers/gatekeeping.py)."""
    found = re.match(r"gate (\w+): ", reason)
    return found[1] if found else None


# Where nothing else is set.
SHARES = MappingProxyType(
    {
        "truncated": 0.5,
        "clipped": 0.1,
        "no_think": 0.4,
        "no_think_end": 0.1,
        "empty_think": 0.4,
        "empty_answer": 0.1,
        "think_only": 0.1,
        "unbalanced_tool_calls": 0.2,
        "tool_call_not_json": 0.2,
        "repetition": 0.1,
        "control_tokens": 0.1,
        "bad_text": 0.2,
        "duplicate_answer": 0.2,
        "copied_prompt": 0.3,
    }
)


class GatesSettings(_Section):
    """The gates of a dataset. The defaults suit models that reason, at the lengths that they need."""

    action: Action = "halt"
    """`halt`: the dataset ends, and `run` with 3; `pause`: it waits for `tokenmill resume`; `none`: it goes on."""
    window: Annotated[int, Field(ge=20, le=KEPT_ANSWERS)] = 100
    """The last answers that shares are taken over."""
    at_least: Positive = 20
    """Answers before which no gate closes."""
    change: ChangeSettings = ChangeSettings()
    truncated: GateSettings = GateSettings()
    clipped: GateSettings = GateSettings()
    no_think: GateSettings = GateSettings()
    no_think_end: GateSettings = GateSettings()
    empty_think: GateSettings = GateSettings()
    empty_answer: GateSettings = GateSettings()
    think_only: GateSettings = GateSettings()
    unbalanced_tool_calls: GateSettings = GateSettings()
    tool_call_not_json: GateSettings = GateSettings()
    repetition: GateSettings = GateSettings()
    control_tokens: GateSettings = GateSettings()
    bad_text: GateSettings = GateSettings()
    duplicate_answer: GateSettings = GateSettings()
    copied_prompt: GateSettings = GateSettings()

    def gate(self, flag: str) -> GateSettings:
        """The gate of one of FLAGS."""
        gate = getattr(self, flag)
        assert isinstance(gate, GateSettings)
        return gate

    def share(self, flag: str) -> float:
        """Above which share of a flag the dataset is stopped."""
        share = self.gate(flag).share
        return SHARES[flag] if share is None else share

    def own(self) -> dict[str, Any]:
        """What is set here, and not by default."""
        return self.model_dump(mode="json", exclude_unset=True)

    def over(self, general: Self) -> Self:
        """These, with those of `general` where nothing is set here."""
        return type(self)(**_merged(general.model_dump(exclude_unset=True), self.model_dump(exclude_unset=True)))

    @property
    def uncounted(self) -> frozenset[str]:
        """The flags that keep a record from counting against the cap."""
        return frozenset(flag for flag in FLAGS if not self.gate(flag).counts)

    @property
    def dropped(self) -> frozenset[str]:
        """The flags that keep a record out of exports."""
        return frozenset(flag for flag in FLAGS if self.gate(flag).drop_from_export)


def _merged(general: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(general)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
