"""An export from start to end: chosen, written beside its final place, checksummed, and moved there whole."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common.durable import sync_file, sync_folder
from common.errors import DataError, UnavailableError, UsageError
from common.run_file import read_run_file
from producer.export.card import card
from producer.export.choose import Chosen, SplitName, Wanted, choose
from producer.export.manifest import NAME, Manifest, Split, encode, file_of
from producer.export.place import move, part_of
from producer.export.rows import Row, Tallies, TooLong, capped, fitted, joined
from producer.export.writers import Writer

# Of run.json: what the ids of all rows have in common, or must; and what each dataset may have of its own.
_MADE_WITH = ("model_path", "weight_version", "tokenizer_sha256", "template_sha256", "special_ids", "vocab_size")
_ASKED_WITH = ("chat_template_kwargs", "sampling_params")
# A sum over the whole vocabulary for each row would take longer than all the rest.
_COUNTED_TOGETHER = 1_000_000
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
    if make is None:
        exported = _exported(output, names, wanted, shape, None, folder, folder)[0]
        _refuse_nothing(exported, output, names)
        return exported
    with part_of(output, folder, overwrite=overwrite) as part:
        try:
            exported, files = _exported(output, names, wanted, shape, make, part, folder)
            _refuse_nothing(exported, output, names)
            _finish(part, files, exported, made_with(run, names), layout, command)
            move(part, folder)
        except OSError as error:
            if error.filename is None:  # of a write, which does not say where it was to go
                raise UnavailableError(
                    f"{folder} cannot be written ({error.strerror or error}), and is as it was before; free space or "
                    "mend the disk, and export again"
                ) from error
            raise
    return exported


def _exported(
    output: Path,
    names: Sequence[str],
    wanted: Wanted,
    shape: Shape,
    make: MakeWriter | None,
    part: Path,
    folder: Path,
) -> tuple[Exported, list[tuple[Path, int]]]:
    """The files, in `part`, each with its number of rows. Caps and mix are of what is left for training."""
    chosen = choose(output, names, wanted)
    caps = _mixed(chosen, shape, wanted) if wanted.mix else dict(wanted.caps)
    exported = Exported(folder, {}, chosen.tallies)
    files = _write_split(chosen, "train", shape, caps, make, part, exported)
    if wanted.held_out > 0:
        files += _write_split(chosen, "eval", shape, {}, make, part, exported)
    return exported, files


def _mixed(chosen: Chosen, shape: Shape, wanted: Wanted) -> dict[str, int]:
    """Caps that give each dataset its share of `train`: the one that has least for its share is taken whole.

    Where rows may be left out as they are read, they are read once more for that. Raises DataError where one has none.
    """
    has = Counter[str]()
    if shape.max_length is None and shape.check is None:
        picks = chosen.of("train")
        for number, name in enumerate(chosen.names):
            has[name] = int(picks["trained"][picks["dataset"] == number].sum())
    else:
        for row in _rows(chosen, "train", shape, {}, defaultdict(Counter)):
            if shape.check is None or not shape.check(row)[0]:
                has[row.dataset] += row.trained_tokens
    for name in wanted.mix:
        has[name] = min(has[name], wanted.caps.get(name, has[name]))
        if not has[name]:
            raise DataError(
                f"--mix gives {name} a share, and nothing of it is there to train on; leave it out of --mix, or "
                "choose with fewer conditions"
            )
    # As fractions: 1001 / 49 * 49 is 1000.9999999999999, and the last answer of that dataset would lose its end.
    shares = {name: Fraction(str(share)) for name, share in wanted.mix.items()}
    unit = min(has[name] / share for name, share in shares.items())
    return {name: int(unit * share) for name, share in shares.items()}


def _write_split(
    chosen: Chosen,
    split: SplitName,
    shape: Shape,
    left: dict[str, int],
    make: MakeWriter | None,
    folder: Path,
    exported: Exported,
) -> list[tuple[Path, int]]:
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
        return writer.close() if writer is not None else []
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _rows(chosen: Chosen, split: SplitName, shape: Shape, left: dict[str, int], tallies: Tallies) -> Iterator[Row]:
    """The rows of a split in order: joined, fitted, and up to what is left of the caps."""
    rows = joined(chosen.rows(split), tallies) if shape.join_turns else (row for row, _ in chosen.rows(split))
    return capped(fitted(rows, shape.max_length, shape.too_long, tallies), left, tallies, whole=shape.whole)


def made_with(run: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Of run.json what made the rows, and for each of the datasets `names` what it was asked with."""
    everyone = {key: run[key] for key in _ASKED_WITH if key in run}
    own = run.get("datasets", {})
    asked = {name: own.get(name, everyone) for name in names}
    return {key: run[key] for key in _MADE_WITH if key in run} | ({"datasets": asked} if any(asked.values()) else {})


def _finish(
    part: Path,
    files: list[tuple[Path, int]],
    exported: Exported,
    made: dict[str, Any],
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
        made_with=made,
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
