"""The folder of an export: what is replaced and what is not, two exports at once, and an end between two steps."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import UsageError
from producer.cli.main import cli
from producer.export.choose import Wanted
from producer.export.export import Shape
from producer.export.export import export as write
from producer.export.jsonl import JsonLines
from producer.export.place import move, part_of
from producer.export.rows import Row
from tests.unit.export_steps import export, manifest, many, run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return many(tmp_path, [3, 10, 7])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_stays_of_an_earlier_export_in_another_format(output: Path) -> None:
    export(output, "--eval", "0.5", layout="parquet")
    folder = export(output, "--overwrite")
    assert sorted(files(folder)) == ["ids/train.jsonl", "manifest.json", "token_counts.json"]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["ids"]


def test_files_of_others_in_the_folder_are_not_lost(output: Path) -> None:
    folder = export(output)
    (folder / "ids" / "vocab_mapping.pt").write_text("mine")
    before = files(folder)
    done = run(output, "-o", str(folder), "--overwrite")
    assert isinstance(done.exception, UsageError)
    assert "not of its export and would be lost, as ids/vocab_mapping.pt; move or delete" in str(done.exception)
    assert files(folder) == before
    (folder / "ids" / "vocab_mapping.pt").unlink()
    export(output, "--overwrite")


def test_a_link_stays_one_and_what_it_points_to_is_replaced(output: Path) -> None:
    disk = output.parent / "disk"
    (disk / "mine").mkdir(parents=True)
    (output.parent / "train").symlink_to(disk / "mine")
    for options in ([], ["--overwrite"]):
        folder = export(output, *options)
        assert folder.is_symlink()
        assert sorted(files(disk / "mine")) == ["ids/train.jsonl", "manifest.json", "token_counts.json"]
        assert [path.name for path in disk.iterdir()] == ["mine"]
    assert sorted(path.name for path in output.parent.iterdir()) == ["disk", "out", "tokenmill.toml", "train"]


def test_the_folder_that_one_is_in_is_refused(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = output.parent / "place"
    (place / "below").mkdir(parents=True)
    monkeypatch.chdir(place / "below")
    for given in (".", "..", str(place)):
        done = run(output, "-o", given)
        assert isinstance(done.exception, UsageError)
        assert f"{given} is the folder that you are in, or one above it" in str(done.exception)
    monkeypatch.chdir(place)
    assert run(output, "-o", "below").exit_code == 0


def test_what_is_missing_or_changed_in_the_earlier_one_is_no_matter(output: Path) -> None:
    folder = export(output)
    before = files(folder)
    (folder / "token_counts.json").unlink()
    (folder / "ids/train.jsonl").write_text("")
    made = files(export(output, "--overwrite"))
    assert {name: made[name] for name in made if name != "manifest.json"} == {
        name: before[name] for name in before if name != "manifest.json"
    }


class _Waiting(JsonLines):
    """A writer that waits at its first row until the test has looked."""

    begun, go_on = threading.Event(), threading.Event()

    def add(self, row: Row) -> str:
        self.begun.set()
        assert self.go_on.wait(60)
        return super().add(row)


def test_of_two_exports_at_once_the_second_is_refused_and_the_first_unharmed(output: Path) -> None:
    folder = output.parent / "train"
    first = threading.Thread(
        target=write,
        args=(output, ["A"], Wanted(), Shape(), _Waiting, folder),
        kwargs={"layout": "ids", "command": ["first"]},
    )
    first.start()
    try:
        assert _Waiting.begun.wait(60)
        for options in ([], ["--overwrite"]):
            done = run(output, "-o", str(folder), *options)
            assert isinstance(done.exception, UsageError)
            assert f"another export writes {folder} at this moment" in str(done.exception)
        assert not folder.exists()
    finally:
        _Waiting.go_on.set()
        first.join(60)
    assert manifest(folder)["command"] == ["first"]
    assert CliRunner().invoke(cli, ["verify", str(folder)]).exit_code == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "tokenmill.toml", "train"]


def test_what_a_killed_export_left_is_no_part_of_the_next(output: Path) -> None:
    part = output.parent / ".train.part"
    (part / "ids").mkdir(parents=True)
    (part / "ids" / "train.jsonl").write_text("half")
    (part / "half.json").write_text("half")
    assert sorted(files(export(output))) == ["ids/train.jsonl", "manifest.json", "token_counts.json"]
    assert not part.exists()


def test_an_earlier_export_comes_back_if_an_end_came_between_the_two_renames(output: Path) -> None:
    folder = export(output)
    before = files(folder)
    old = folder.with_name(".train.old")
    folder.rename(old)  # as a kill leaves it
    done = run(output, "-o", str(folder))
    assert isinstance(done.exception, UsageError)
    assert "is not empty" in str(done.exception)
    assert files(folder) == before
    # A rename that fails puts it back at once.
    with pytest.raises(FileNotFoundError):
        move(folder.with_name(".nothing.part"), folder)
    assert files(folder) == before
    assert not old.exists()


_KILLED = """
import os, sys
from pathlib import Path
from producer.export.choose import Wanted
from producer.export.export import Shape, export
from producer.export.jsonl import JsonLines

class Killed(JsonLines):
    def add(self, row):
        if row.index:
            os._exit(9)
        return super().add(row)

output, folder = map(Path, sys.argv[1:])
export(output, ["A"], Wanted(), Shape(), Killed, folder, layout="ids", command=[], overwrite=True)
"""


def test_a_killed_export_leaves_the_earlier_one(output: Path) -> None:
    folder = export(output)
    before = files(folder)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(output), str(folder)], timeout=120, check=False)
    assert done.returncode == 9
    assert [path.name for path in output.parent.glob(".train.*")] == [".train.part"]
    assert files(folder) == before
    assert files(export(output, "--overwrite")).keys() == before.keys()  # and locks nobody out


def test_the_part_is_left_to_who_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    with part_of(tmp_path / "out", folder, overwrite=False) as part:
        (part / "mine").write_text("")
        with pytest.raises(UsageError, match="another export"), part_of(tmp_path / "out", folder, overwrite=False):
            pass
        assert (part / "mine").exists()
    assert not part.exists()


@pytest.mark.parametrize("layout", ["ids", "parquet", "arrow"])
def test_the_same_options_give_the_same_bytes_in_a_folder_of_any_name(tmp_path: Path, layout: str) -> None:
    place = tmp_path / "a b,ü'"
    place.mkdir()
    odd = many(place, [3, 10, 7])
    options = ["--shuffle", "3", "--mix", "A=2", "--eval", "0.4", "--cap", "9", "--max-length", "7", "--join-turns"]
    made = []
    for _ in range(2):
        found = files(export(odd, *options, "--overwrite", layout=layout))
        told = json.loads(found.pop("manifest.json"))
        made.append((found, told["files"], told["splits"], told["datasets"]))
    assert made[0] == made[1]
