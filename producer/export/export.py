"""An export from start to end: chosen, written beside its final place, checksummed, and moved there whole."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from common.durable import make_folder, sync_file, sync_folder
from common.errors import DataError, UnavailableError, UsageError
from common.run_file import read_run_file
from producer.export.card import card
from producer.export.choose import Chosen, Wanted, choose
from producer.export.manifest import NAME, Manifest, Split, encode, file_of, read_manifest
from producer.export.rows import Row, TooLong, capped, fitted, joined
from producer.export.writers import Writer

# Of run.json: what the ids of all rows have in common, or must.
_MADE_WITH = (
    "model_path", "weight_version", "tokenizer_sha256", "template_sha256", "chat_template_kwargs", "sampling_params",
    "special_ids", "vocab_size",
)  # fmt: skip
# A sum over the whole vocabulary for each row would take longer than all the rest.
_COUNTED_TOGETHER = 1_000_000
SPLITS: tuple[Literal["train", "eval"], ...] = ("train", "eval")
MakeWriter = Callable[[Path, str], Writer]
# Why a format cannot have a row, and what is counted of one that it has; each is "" where there is none.
Check = Callable[[Row], tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the rows are like: joined turns, and what becomes of those longer than `max_length` tokens.

    `whole` rows are not cut at a cap. `check` is asked for each row, if there is one.
    """

    join_turns: bool = False
    max_length: int | None = None
    too_long: TooLong = "drop"
    whole: bool = False
    check: Check | None = None


@dataclass(slots=True)
class Sums:
    """Of one split, as it is written."""

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    _counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    _uncounted: list[np.ndarray] = field(default_factory=list)
    _uncounted_tokens: int = 0

    def add(self, row: Row) -> None:
        trained = row.trained_tokens
        self.rows += 1
        self.tokens += len(row.input_ids)
        self.trained_tokens += trained
        self.longest = max(self.longest, len(row.input_ids))
        self._uncounted += [row.input_ids[start:stop] for start, stop in row.spans]
        self._uncounted_tokens += trained
        if self._uncounted_tokens > _COUNTED_TOGETHER:
            self._count()

    def counts(self) -> dict[int, int]:
        """How many tokens have mask 1, by id, ascending."""
        self._count()
        return {int(one): int(self._counts[one]) for one in np.flatnonzero(self._counts)}

    def _count(self) -> None:
        if self._uncounted:
            counted = np.bincount(np.concatenate(self._uncounted), minlength=len(self._counts))
            counted[: len(self._counts)] += self._counts
            self._counts, self._uncounted, self._uncounted_tokens = counted, [], 0

    def split(self) -> Split:
        return Split(self.rows, self.tokens, self.trained_tokens, self.longest)


@dataclass(slots=True)
class Exported:
    """What was written, or would be: `splits` by name, and for each dataset what became of its records."""

    folder: Path
    splits: dict[str, Sums]
    datasets: dict[str, Counter[str]]
    files: list[str] = field(default_factory=list)


def export(
    output: Path,
    names: Sequence[str],
    wanted: Wanted,
    shape: Shape,
    make: MakeWriter | None,
    folder: Path,
    *,
    layout: str,
    command: Sequence[str],
    overwrite: bool = False,
) -> Exported:
    """Write the chosen records of the datasets `names` as `layout`; without `make` only count them (a dry run).

    All is written to a folder beside `folder`, which gets its name when every file is on disk: an interrupted export
    leaves nothing under it. Raises UsageError for an empty choice, a folder that is not to be replaced, or records of
    two tokenizers; DataError for a record that cannot be read; UnavailableError for a full disk; OSError.
    """
    run = read_run_file(output) or {}
    refuse_two_tokenizers(run, output)
    if make is not None:
        refuse_folder(output, folder, overwrite=overwrite)
    chosen = choose(output, names, wanted)
    exported = Exported(folder, {}, chosen.tallies)
    if make is None:
        _write_splits(chosen, shape, None, folder, exported)
    else:
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
        make_folder(part)
        try:
            files = _write_splits(chosen, shape, make, part, exported)
            _refuse_nothing(exported, output, names)
            _finish(part, files, exported, run, layout, command)
            _move(part, folder)
        except OSError as error:
            if error.filename is None:  # of a write, which does not say where it was to go
                raise UnavailableError(
                    f"{folder} cannot be written ({error.strerror or error}), and is as it was before; free space or "
                    "mend the disk, and export again"
                ) from error
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    _refuse_nothing(exported, output, names)
    return exported


def _write_splits(
    chosen: Chosen, shape: Shape, make: MakeWriter | None, folder: Path, exported: Exported
) -> list[tuple[Path, int]]:
    files: list[tuple[Path, int]] = []
    left = dict(chosen.caps)
    for split in SPLITS:
        if split == "eval" and not chosen.picks["held_out"].any():
            continue
        sums = exported.splits[split] = Sums()
        rows = _rows(chosen, split, shape, left, exported.datasets)
        writer = make(folder, split) if make else None
        try:
            for row in rows:
                tally = exported.datasets[row.dataset]
                refused, told = shape.check(row) if shape.check is not None else ("", "")
                if not refused and writer is not None:
                    refused = writer.add(row)
                if refused:
                    tally[refused] += 1
                    if row.dataset in left:  # what it would have taken of the cap is for others
                        left[row.dataset] += row.trained_tokens
                    continue
                if told:
                    tally[told] += 1
                tally[f"{split}_rows"] += 1
                sums.add(row)
            files += writer.close() if writer is not None else []
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
    return files


def _rows(
    chosen: Chosen,
    split: Literal["train", "eval"],
    shape: Shape,
    left: dict[str, int],
    tallies: Mapping[str, Counter[str]],
) -> Iterator[Row]:
    """The rows of a split in order: joined, fitted, and up to what is left of the caps."""
    rows = joined(chosen.rows(split)) if shape.join_turns else (row for row, _ in chosen.rows(split))
    return capped(fitted(rows, shape.max_length, shape.too_long, tallies), left, tallies, whole=shape.whole)


def _finish(
    part: Path,
    files: list[tuple[Path, int]],
    exported: Exported,
    run: Mapping[str, Any],
    layout: str,
    command: Sequence[str],
) -> None:
    """Beside the rows: how often each id is learnt, which SpecForge's vocabulary mapping wants, and the manifest."""
    path = part / "token_counts.json"
    _put(path, msgspec.json.encode(exported.splits["train"].counts()) + b"\n")
    manifest = Manifest(
        tokenmill_version=version("tokenmill"),
        command=[*command],
        format=layout,
        made_with={name: run[name] for name in _MADE_WITH if name in run},
        splits={name: sums.split() for name, sums in exported.splits.items()},
        datasets={name: dict(sorted(tally.items())) for name, tally in exported.datasets.items()},
        files=[file_of(part, found, rows) for found, rows in sorted([*files, (path, 0)])],
    )
    if layout == "parquet":
        path = part / "README.md"
        _put(path, card(manifest).encode())
        listed = sorted([*manifest.files, file_of(part, path, 0)], key=lambda file: file.path)
        manifest = msgspec.structs.replace(manifest, files=listed)
    _put(part / NAME, encode(manifest))
    exported.files = [file.path for file in manifest.files]
    for found in (part, *(found for found in part.rglob("*") if found.is_dir())):
        sync_folder(found)


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync_file(path)


def _move(part: Path, folder: Path) -> None:
    """Put `part` in the place of `folder`, whose files are those of an earlier export."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def refuse_folder(output: Path, folder: Path, *, overwrite: bool) -> None:
    """Raises UsageError unless `folder` is new, empty, or an earlier export that may be replaced."""
    ours = folder.resolve()
    if ours == output.resolve() or ours.is_relative_to(output.resolve()) or output.resolve().is_relative_to(ours):
        raise UsageError(f"{folder} holds the run's own files, or lies among them; name another folder with -o")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with -o")
    if not overwrite:
        raise UsageError(f"{folder} is not empty; name another folder, or replace an earlier export with --overwrite")
    if read_manifest(folder) is None:
        raise UsageError(f"{folder} is no earlier export (it has no {NAME}) and is not replaced; name another folder")


def refuse_two_tokenizers(run: Mapping[str, Any], output: Path) -> None:
    """Raises UsageError if the records of `output` were made with more than one tokenizer: ids then mean two things."""
    tokenizers = {one.get("tokenizer_sha256") for one in (run, *run.get("earlier", [])) if one.get("tokenizer_sha256")}
    if len(tokenizers) > 1:
        raise UsageError(
            f"{output}/run.json says that its records were made with {len(tokenizers)} tokenizers, so that one id "
            "means different texts; give each its own output folder, and export them one by one"
        )


def _refuse_nothing(exported: Exported, output: Path, names: Sequence[str]) -> None:
    if any(sums.rows for sums in exported.splits.values()):
        return
    left_out = Counter[str]()
    for tally in exported.datasets.values():
        left_out.update({reason: n for reason, n in tally.items() if n and reason != "records"})
    if not any(tally["records"] for tally in exported.datasets.values()):
        raise UsageError(f"{output} has no records of {', '.join(names)} yet; `tokenmill run` makes them")
    why = ", ".join(f"{reason} {n:,}" for reason, n in left_out.most_common())
    raise DataError(f"nothing is left to export of {', '.join(names)} ({why}); choose with fewer conditions")
