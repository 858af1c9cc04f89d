"""The files of a source: itself, those of a folder, or those that a pattern means, in the natural order of names."""

import glob
import os
import re
from functools import lru_cache
from pathlib import Path

import msgspec

from common.errors import DataError
from common.segments import NOT_JSON
from producer.datasets import remote
from producer.datasets.places import cache_key, is_file, is_folder, is_url, names_in

# What is taken of a folder. A pattern takes whatever it means.
ENDINGS = (".jsonl", ".ndjson", ".json", ".traj", ".parquet", ".csv", ".tsv", ".arrow", ".feather")
_COMPRESSED = (".gz", ".zst")
# Of no rows, in folders of data as they are published.
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_WILD = re.compile(r"[*?\[]")
_DIGITS = re.compile(r"(\d+)")


def files_of(source: str | Path) -> list[str]:
    """The files of a source in the order in which their rows are counted. Raises OSError, DataError if it has none."""
    where = str(source)
    if not is_url(where) and Path(where).is_dir():
        return list(_files_in_folder(where, cache_key(where)))
    return _files_of(where)


@lru_cache(maxsize=256)
def _files_in_folder(where: str, _key: tuple[object, ...]) -> list[str]:
    return _files_of(where)


def _files_of(where: str) -> list[str]:
    if _is_pattern(where):
        found = remote.matches(where) if is_url(where) else _matches(where)
        none = f"no file matches {where}; correct the pattern"
    elif is_folder(where):
        if not is_url(where) and (saved := _saved_dataset(Path(where))) is not None:
            return saved
        found = [name for name in names_in(where) if _is_data(name)]
        none = f"{where} has no file of rows; known are {', '.join(ENDINGS)}, each with .gz or .zst too"
    else:
        return [where]
    if not found:
        raise DataError(none)
    return sorted(found, key=_natural)


def _is_pattern(source: str | Path) -> bool:
    where = str(source)
    return bool(_WILD.search(where)) and (is_url(where) or not Path(where).exists())


def _matches(pattern: str) -> list[str]:
    """The files that a pattern means, each once.

    `**` follows a link to a folder above itself forty times, and `**/**` finds a file once for each way to part its
    path. Two names of one file within a folder are two files: whoever put them there meant it.
    """
    found = [name for name in glob.glob(pattern, recursive=True) if is_file(name)]  # noqa: PTH207
    if "**" not in pattern:
        return found
    by_place: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (name.count("/"), name)):
        by_place.setdefault(os.path.realpath(name), name)
    return list(by_place.values())


def _is_data(name: str) -> bool:
    last = name.rpartition("/")[2].lower()
    if last.startswith((".", "_")) or last in _DESCRIPTIONS:
        return False
    for ending in _COMPRESSED:
        last = last.removesuffix(ending)
    return last.endswith(ENDINGS)


def _natural(name: str) -> list[tuple[int, str]]:
    """shard-2 before shard-10; names that differ in leading zeros alone keep an order all the same."""
    parts = _DIGITS.split(name)
    return [(int(part), part) if place % 2 else (0, part) for place, part in enumerate(parts)]


def _saved_dataset(folder: Path) -> list[str] | None:
    """The Arrow files of what `datasets` saved to disk, in its own order; None if the folder is none."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in folder.iterdir() if (one / "state.json").is_file())
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; name one of them, as in {folder / splits[0]}")
    state = folder / "state.json"
    if not state.is_file():
        return None
    try:
        facts = msgspec.json.decode(state.read_bytes(), type=dict)
        files = [str(folder / one["filename"]) for one in facts["_data_files"]]
    except (*NOT_JSON, KeyError, TypeError):
        return None  # of another program
    if facts.get("_indices_data_files"):  # as older versions of `datasets` save what was selected or shuffled
        raise DataError(f"{folder} has rows that its index leaves out; save it again behind `flatten_indices()`")
    return files
