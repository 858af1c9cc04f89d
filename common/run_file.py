"""`<output>/run.json`: what made the data of an output folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.durable import make_folder, replace_file
from common.errors import DataError, UsageError

# What was wrong as the job was started all the same, with --force; once said it stays, as its records do.
FORCED = "forced"
# What must be the same in one output folder, or its records are of two kinds.
_SAME = (
    "model_path",
    "weight_version",
    "tokenizer_sha256",
    "template_sha256",
    "chat_template_kwargs",
    "sampling_params",
)


def refuse_changes(output: Path, facts: Mapping[str, Any]) -> None:
    """Raises UsageError if `output` was made by another model, tokenizer, template or with other sampling.

    Records of two models in one folder cannot be told apart by a trainer; whoever wants that says so.
    """
    before = read_run_file(output)
    if before and (changes := list(_changes(before, facts))):
        raise UsageError(
            f"{output / 'run.json'} says that this output was made otherwise: {'; '.join(changes)}; "
            "choose another `output`, or go on with --accept-changes"
        )


def _changes(before: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was: of the whole output, and of the datasets that were in it and are asked for again."""
    for name in _SAME:
        if before.get(name) != facts[name]:
            yield f"{name} was {before.get(name)!r} and is {facts[name]!r}"
    for dataset, then in before.get("datasets", {}).items():
        now = facts["datasets"].get(dataset, then)
        for name in now:
            # What is otherwise for all is said above.
            if then[name] != now[name] and (then[name], now[name]) != (before.get(name), facts[name]):
                yield f"{name} of {dataset} was {then[name]!r} and is {now[name]!r}"


def read_run_file(output: Path) -> dict[str, Any] | None:
    """What `<output>/run.json` says; None if there is none. Raises DataError if it cannot be read."""
    path = output / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); mend it, or move it away if nothing else is there"
        ) from error


def write_run_file(output: Path, facts: Mapping[str, Any]) -> None:
    """`<output>/run.json`: what made the data, with what made it before an accepted change under `earlier`.

    Replaced whole, so that it is never half a file.
    """
    make_folder(output)
    before = read_run_file(output)
    earlier = before.pop("earlier", []) if before else []
    if before and any(_changes(before, facts)):
        earlier = [*earlier, before]
    datasets = {**(before or {}).get("datasets", {}), **facts.get("datasets", {})}  # those not asked for now stay
    whole = {**facts, "datasets": datasets, "earlier": earlier}
    if forced := [*(before or {}).get(FORCED, []), *facts.get(FORCED, [])]:
        whole[FORCED] = list({(one["name"], one["says"]): one for one in reversed(forced)}.values())[::-1]
    text = msgspec.json.format(msgspec.json.encode(whole), indent=2)
    replace_file(output / "run.json", [text, b"\n"])
