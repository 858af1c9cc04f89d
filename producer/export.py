"""Training files from the records that count: one JSONL file a dataset, alone in its folder.

SpecForge's `data.prompts_path` and speculators' `prepare-data` both read it. They want every column in every row,
never null, of one type over the whole export, and nothing nested beside the ids; speculators reads every .json and
.jsonl file of the folder as data, so nothing else is put there. The ids are the served model's: nothing is tokenized.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.durable import sync_folder
from common.errors import UsageError
from common.records import Record
from common.segments import count, records

# Not .json or .jsonl, so that no trainer reads the leftovers of a killed export.
_PART = ".part"
_BUFFER_BYTES = 1024 * 1024


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training row: `loss_mask` is 0 on the prompt and 1 on what the model wrote, the end token included."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    dataset: str
    index: int
    finish_reason: str
    truncated: bool


@dataclass(slots=True)
class Exported:
    """One file written: `trained_tokens` are those with mask 1, `longest` is the longest row in tokens."""

    dataset: str
    path: Path
    rows: int = 0
    trained_tokens: int = 0
    longest: int = 0
    faults: int = 0  # lines of the segments that are no record and were passed over


_encode = msgspec.json.Encoder().encode


def _row(record: Record) -> bytes:
    row = Row(
        id=record.sample_id,
        input_ids=record.input_ids + record.output_ids,
        loss_mask=[0] * len(record.input_ids) + [1] * len(record.output_ids),
        dataset=record.dataset,
        index=record.index,
        finish_reason=record.finish_reason,
        truncated="truncated" in record.flags,
    )
    return _encode(row) + b"\n"


FORMATS: dict[str, Callable[[Record], bytes]] = {"jsonl": _row}


def export(output: Path, datasets: Sequence[str], layout: str, folder: Path, *, force: bool = False) -> list[Exported]:
    """Write `folder`/<dataset>.jsonl for each dataset that has records, in one of FORMATS; answers what was written.

    The files get their names when all are complete and on disk, so that an interrupted export leaves none. Raises
    UsageError if there is nothing to export, or if `folder` is not empty (unless `force`) or holds the run itself;
    DataError for a record that cannot be read; OSError.
    """
    _refuse(output, datasets, folder, force=force)
    parts = {dataset: folder / f".{dataset}.{layout}{_PART}" for dataset in datasets}
    done: list[Exported] = []
    try:
        for dataset, part in parts.items():
            counted = count(output, dataset)
            if counted.entries:
                folder.mkdir(parents=True, exist_ok=True)
                exported = Exported(dataset, folder / f"{dataset}.{layout}")
                exported.faults = sum(not fault.torn for fault in counted.faults)
                _write(records(output, dataset, counted), FORMATS[layout], part, exported)
                done.append(exported)
        if not done:
            raise UsageError(f"{output} has no records of {', '.join(datasets)} yet; `tokenmill run` makes them")
        for exported in done:
            parts[exported.dataset].replace(exported.path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    sync_folder(folder)
    return done


def _refuse(output: Path, datasets: Sequence[str], folder: Path, *, force: bool) -> None:
    ours = folder.resolve()
    if ours == output.resolve() or any(ours.is_relative_to((output / dataset).resolve()) for dataset in datasets):
        raise UsageError(f"{folder} holds the run's own files; name another folder with -o")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with -o")
    if not force and folder.is_dir() and any(not path.name.endswith(_PART) for path in folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name another folder, or add --force to replace files of its name")


def _write(rows: Iterable[Record], encode: Callable[[Record], bytes], part: Path, exported: Exported) -> None:
    """Write `rows` to `part`, durably, and count them in `exported`."""
    with part.open("wb", buffering=_BUFFER_BYTES) as file:
        for record in rows:
            file.write(encode(record))
            exported.rows += 1
            exported.trained_tokens += len(record.output_ids)
            exported.longest = max(exported.longest, len(record.input_ids) + len(record.output_ids))
        file.flush()
        os.fsync(file.fileno())
