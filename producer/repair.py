"""Takes out of a run's files the lines that `verify` names as faults, and torn last lines; keeps each file as it was.

A line is taken out whole or left as it is, byte for byte: no record is guessed from its pieces. What a sample loses by
that is made again. Only where no worker and no keeper runs: they append to these files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path

import redis

from common.durable import replace_file, sync_folder
from common.errors import RedisUnavailable, UsageError
from common.ledger import Ledger
from common.segments import REJECTS, Fault, lines, segment_paths
from common.settings import Settings
from producer.in_force import in_force
from producer.recover import LIVE_SECONDS, live_processes, recover_dataset
from producer.verify import Finding, Repair, check


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was done for one dataset."""

    name: str
    files: list[Repair]
    recounted: bool  # the ledger was built anew, since it may have counted what was taken out


def repair(settings: Settings, ledger: Ledger, datasets: Sequence[str]) -> list[Repaired]:
    """Repair the files of `datasets`, and count those that had faults anew into `ledger`; answers them.

    A dataset that is not configured any more is repaired, but not counted.

    Raises UsageError while processes are at work on the ledger, RedisUnavailable, OSError.
    """
    try:
        _refuse_if_live(ledger)
    except redis.RedisError as error:
        raise RedisUnavailable(f"Redis failed ({error}), and nothing was repaired; repeat the command") from error
    configured = {dataset.name: dataset for dataset in settings.datasets}
    done = []
    for name in datasets:
        files = repair_files(settings.output, name)
        recounted = bool(files) and name in configured
        if recounted:
            try:
                recover_dataset(settings.output, in_force(settings, configured[name])[0], ledger)
            except redis.RedisError as error:
                raise RedisUnavailable(
                    f"Redis failed ({error}); the files of {name} are repaired: run `tokenmill recover`"
                ) from error
        if files:
            done.append(Repaired(name, files, recounted))
    return done


def _refuse_if_live(ledger: Ledger) -> None:
    live = live_processes(ledger)
    if live:
        names = ", ".join(f"{name} (seen {age:.0f} s ago)" for name, age in sorted(live.items()))
        raise UsageError(
            f"these files are in use by {names}; stop them first, or wait {LIVE_SECONDS:.0f} s if they are dead"
        )


def repair_files(output: Path, dataset: str) -> list[Repair]:
    """Rewrite each file of `dataset` that has faults without the lines at fault; answers what was taken out.

    Raises OSError, and UsageError if a file is being written to; that file is then as it was.
    """
    paths = [*segment_paths(output, dataset), output / dataset / REJECTS]
    sizes = {path: path.stat().st_size for path in paths if path.exists()}
    faults: dict[Path, list[Fault]] = {}
    for fault in check(output, dataset).faults:
        faults.setdefault(fault.path, []).append(fault)
    return [_rewrite(path, sizes.get(path, 0), faults[path]) for path in sorted(faults)]


def _rewrite(path: Path, size: int, faults: Sequence[Fault]) -> Repair:
    reasons: dict[int, list[Fault]] = {}
    for fault in faults:
        reasons.setdefault(fault.offset, []).append(fault)
    ends = {fault.offset: fault.end for fault in faults}
    kept = _keep(path)
    try:
        replace_file(path, _lines_without(path, size, ends))
    except BaseException:
        if kept.samefile(path):  # else the new file has its name, and this is the only copy of the old one
            kept.unlink()
        raise
    return Repair(
        path=str(path),
        kept=kept.name,
        bytes=sum(end - offset for offset, end in ends.items()),
        lines=[
            Finding(str(path), of_line[0].line, offset, "; ".join(fault.reason for fault in of_line))
            for offset, of_line in sorted(reasons.items())
        ],
    )


def _keep(path: Path) -> Path:
    """Give the file a second name that no reader takes for a segment; the first name then gets another file."""
    for number in numbers(1):
        kept = path.with_name(f"{path.name}.before-repair-{number}")
        try:
            # A link costs no space and no time, and cannot be half a copy.
            kept.hardlink_to(path)
        except FileExistsError:
            continue
        sync_folder(path.parent)
        break
    return kept


def _lines_without(path: Path, size: int, ends: Mapping[int, int]) -> Iterator[bytes]:
    """The lines of a file, but for those that start and end as `ends` says."""
    end = taken = 0
    for line in lines(path):
        end = line.end
        if ends.get(line.offset) == line.end:
            taken += 1
        else:
            yield line.text
    if end != size or taken != len(ends):
        raise UsageError(f"{path} was written to while it was read; stop every worker, then repeat the command")
