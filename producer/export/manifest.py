"""manifest.json: what an export was made from, what it holds, and a checksum of each of its files."""

from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import Any

import msgspec

from common.errors import DataError

NAME = "manifest.json"


class File(msgspec.Struct, frozen=True):
    """`path` is relative to the export's folder; `rows` is 0 for what holds no rows."""

    path: str
    bytes: int
    sha256: str
    rows: int


class Split(msgspec.Struct, frozen=True):
    """Sums of one split: rows, all tokens, tokens with mask 1, and the longest row in tokens."""

    rows: int
    tokens: int
    trained_tokens: int
    longest: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in it follows from the records, the options and the release: the same export has the same bytes."""

    tokenmill_version: str
    command: list[str]
    format: str
    made_with: dict[str, Any]  # of run.json: model, tokenizer, template; by dataset, sampling and template kwargs
    splits: dict[str, Split]
    datasets: dict[str, dict[str, int]]  # by dataset: records, rows, and what was left out or changed, by reason
    files: list[File]


def file_of(folder: Path, path: Path, rows: int) -> File:
    """What the manifest says of a file. Raises OSError."""
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    return File(path=str(path.relative_to(folder)), bytes=path.stat().st_size, sha256=digest, rows=rows)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None if there is none. Raises DataError if it cannot be read."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{folder / NAME} cannot be read ({error}); export again") from error


def differences(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What of an export's files is not as its manifest says, one sentence each. Raises OSError."""
    for file in manifest.files:
        path = folder / file.path
        if not path.is_file():
            yield f"{path} is missing; export again"
        elif path.stat().st_size != file.bytes:
            yield f"{path} has {path.stat().st_size:,} bytes and had {file.bytes:,}; export again"
        elif file_of(folder, path, 0).sha256 != file.sha256:
            yield f"{path} was changed: its sha256 is another; export again"
    for path in strangers(folder, manifest):
        yield f"{path} is not of this export; trainers that read whole folders would take it for data"


def strangers(folder: Path, manifest: Manifest) -> list[Path]:
    """The files in an export's folder that its manifest does not name. Raises OSError."""
    known = {file.path for file in manifest.files} | {NAME}
    return sorted(
        path for path in folder.rglob("*") if not path.is_dir() and str(path.relative_to(folder)) not in known
    )
