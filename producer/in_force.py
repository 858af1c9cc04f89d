"""What holds of a dataset: its configuration, or what a person has changed by hand since.

The last word holds. A cap or weight that was set by hand (`tokenmill cap`, `weight`, `enqueue --cap`) holds over
restarts, until the configuration says something else than it said then. A pause holds until `resume`; cancelled is
final. All that stands in the dataset's dataset.json, so that it outlives Redis.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from common.ledger import Ledger
from common.registered import Steering, read_kept
from common.sections import DatasetSettings
from common.settings import Settings

TUNED = ("cap_tokens", "weight")


def in_force(settings: Settings, asked: DatasetSettings) -> tuple[DatasetSettings, Steering]:
    """`asked` with the cap and weight that hold, and what else was asked of it. Raises DataError, OSError."""
    kept, steering = read_kept(settings.output, asked.name) or (None, Steering())
    marks = dict(steering.configured)
    held: dict[str, Any] = {}
    for key in TUNED:
        given, said = getattr(asked, key), configured(settings, asked, key)
        if kept is not None and given == getattr(kept, key):
            if said == given:
                marks.pop(key, None)
        elif given != said:
            marks[key] = said  # by hand, now
        elif kept is not None and key in marks and marks[key] == said:
            held[key] = getattr(kept, key)
        else:
            marks.pop(key, None)
    return asked.model_copy(update=held), Steering(steering.state, steering.reason, marks)


def configured(settings: Settings, dataset: DatasetSettings, key: str) -> Any:
    """What the configuration says of `dataset`; where it does not know it, what was asked."""
    return next((getattr(one, key) for one in settings.datasets if one.name == dataset.name), getattr(dataset, key))


def put_in_force(ledger: Ledger, dataset: str, steering: Steering) -> None:
    """Let the ledger, which may have been built anew, know that `dataset` is paused or cancelled."""
    if steering.state == "paused":
        ledger.transition(dataset, "paused", ["open", "closing", "paused"], steering.reason)
    elif steering.state == "cancelled":
        ledger.cancel(dataset, steering.reason)


def notes(settings: Settings, datasets: Sequence[DatasetSettings]) -> Iterator[str]:
    """A line for each thing that is not as the configuration says, or that it has changed since it was set by hand.

    To be asked before `datasets` are registered. Raises DataError, OSError.
    """
    for asked in datasets:
        if (found := read_kept(settings.output, asked.name)) is None:
            continue
        kept, before = found
        holds, steering = in_force(settings, asked)
        for key in TUNED:
            said, value = configured(settings, asked, key), getattr(holds, key)
            if key in steering.configured:
                yield (
                    f"{asked.name}: {key} {_shown(value)} was set by hand and holds, not {_shown(said)} of the "
                    f"configuration, until it is changed there or by `tokenmill {_COMMAND[key]}`"
                )
            elif key in before.configured and getattr(kept, key) != value:
                yield (
                    f"{asked.name}: {key} {_shown(value)} of the configuration holds, which was changed after "
                    f"{_shown(getattr(kept, key))} was set by hand"
                )
        if steering.state == "paused":
            yield f"{asked.name}: {steering.reason}; go on with `tokenmill resume {asked.name}`"
        elif steering.state == "cancelled":
            yield f"{asked.name}: {steering.reason}; that is final, and nothing more is made of it"


_COMMAND = {"cap_tokens": "cap", "weight": "weight"}


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:,}"
