"""The datasets that a command on files is about."""

from collections.abc import Sequence

from common.errors import UsageError
from common.sections import DATASET_NAME
from common.settings import Settings, nearest


def chosen(settings: Settings, names: Sequence[str]) -> list[str]:
    """The datasets named, or all that are configured; also one that left the configuration and still has its folder."""
    known = [dataset.name for dataset in settings.datasets]
    for name in names:
        on_disk = DATASET_NAME.fullmatch(name) and not name.startswith(".") and (settings.output / name).is_dir()
        if name not in known and not on_disk:
            near = nearest(name, set(known)) or "; the configuration has no [[datasets]]"
            raise UsageError(f"there is no dataset {name!r}{near}")
    found = list(dict.fromkeys(names or known))
    if not found:
        raise UsageError("the configuration has no [[datasets]]; add one, or name a dataset")
    return found
