"""An export copied to a bucket or a hub, by fsspec and huggingface_hub; the extra `remote` installs what they need."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from common.errors import UnavailableError, UsageError
from producer.export.manifest import NAME, Manifest

_HUB = "hf://datasets/"


class Target:
    """A folder behind a URL, or a repository of a hub: hf://datasets/OWNER/NAME."""

    def __init__(self, url: str, *, overwrite: bool) -> None:
        """Look whether it is there. Raises UsageError for another export there, UnavailableError."""
        self.url = url.rstrip("/")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise UsageError("--push has a user or a password in its URL; give these in the environment instead")
        if url.startswith("hf://") and (not url.startswith(_HUB) or self.url.count("/") < 4):
            raise UsageError(f"--push {url}: a hub has data sets as hf://datasets/OWNER/NAME")
        try:
            self._system, self._path = fsspec.core.url_to_fs(self.url)
            self._earlier = self._listed()
        except ImportError as error:
            raise UnavailableError(
                f"--push {url} needs a package that is not installed ({error}); "
                "install what it needs from a clone of tokenmill, with: pip install '.[remote]'"
            ) from None
        except ValueError as error:  # an unknown protocol
            raise UsageError(
                f"--push {url}: {error}; use hf://datasets/OWNER/NAME, s3://, gs:// or another of fsspec"
            ) from None
        except Exception as error:
            raise self._unavailable(error) from error
        if self._earlier and not overwrite:
            raise UsageError(f"{url} has an export already; name another place, or replace it with --overwrite")

    def _listed(self) -> list[str]:
        """The files of an export that is there already, its manifest first."""
        try:
            manifest = msgspec.json.decode(self._system.cat_file(f"{self._path}/{NAME}"), type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError):  # the first also where a hub has no such repository yet
            return []
        return [NAME, *(file.path for file in manifest.files)]

    def push(self, folder: Path, files: Sequence[str]) -> None:
        """Copy `files` of `folder`, the last one last: the manifest, by which a reader sees that all is there.

        A hub gets them in one commit, into a repository that is made private if it is not there yet. Raises
        UnavailableError.
        """
        try:
            if self.url.startswith(_HUB):
                self._commit(folder, files)
                return
            for name in self._earlier:
                if self._system.exists(path := f"{self._path}/{name}"):
                    self._system.rm_file(path)
            for name in files:
                path = f"{self._path}/{name}"
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._system.put_file(str(folder / name), path)
        except Exception as error:
            raise self._unavailable(error) from error

    def _commit(self, folder: Path, files: Sequence[str]) -> None:
        from huggingface_hub import HfApi  # noqa: PLC0415 - takes a second; only who pushes to a hub pays for it

        owner, name, *within = self.url.removeprefix(_HUB).split("/")
        api = HfApi()
        repository: dict[str, Any] = {"repo_id": f"{owner}/{name}", "repo_type": "dataset"}
        api.create_repo(**repository, private=True, exist_ok=True)
        api.upload_folder(
            **repository,
            folder_path=folder,
            path_in_repo="/".join(within) or ".",
            allow_patterns=[*files],
            delete_patterns=[name for name in self._earlier if name not in files] or None,
            commit_message="Export of tokenmill",
        )

    def _unavailable(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self.url} cannot be written ({type(error).__name__}: {error}); look at the URL and the credentials, "
            "and export again with --overwrite"
        )
