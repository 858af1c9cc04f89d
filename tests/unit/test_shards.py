"""Which files a source has, in which order; sources by URL; standard input."""

import gzip
import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from common.errors import ConfigError, DataError
from common.sections import DatasetSettings
from common.settings import load_settings
from producer.datasets.containers import Cursor, Row, read_rows
from producer.datasets.shards import files_of
from producer.datasets.standard_input import keep_standard_input, source_of
from producer.sources import look, refuse_unreadable
from tests.containers import CONTAINERS, decoded, table


def read(source: str | Path, start: Cursor | None = None) -> list[Row]:
    return list(read_rows(source, start or Cursor()))


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"name": name}) + "\n")
    return folder


def names(source: str | Path) -> list[Any]:
    return [decoded(row.value)["name"] for row in read(source)]


def test_shards_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    fill(tmp_path, "s-10.jsonl", "s-9.jsonl", "s-1.jsonl", "s-01.jsonl", "a.json", "z.ndjson")
    assert names(tmp_path) == ["a.json", "s-01.jsonl", "s-1.jsonl", "s-9.jsonl", "s-10.jsonl", "z.ndjson"]


def test_a_folder_is_its_own_files_of_rows(tmp_path: Path) -> None:
    fill(tmp_path, "a.jsonl", ".hidden.jsonl", "_tmp.jsonl", "README.md", "dataset_info.json", "sub/b.jsonl", "b.txt")
    assert names(tmp_path) == ["a.jsonl"]


def test_a_pattern_is_every_file_that_it_means(tmp_path: Path) -> None:
    fill(tmp_path, "train-2/b.txt", "train-10/a.txt", "test/c.txt", "d.txt")
    assert names(tmp_path / "train-*" / "*") == ["train-2/b.txt", "train-10/a.txt"]
    assert names(tmp_path / "**" / "*.txt") == ["d.txt", "test/c.txt", "train-2/b.txt", "train-10/a.txt"]


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**/**/*.jsonl"])
def test_a_pattern_means_each_file_once(tmp_path: Path, pattern: str) -> None:
    fill(tmp_path, "a.jsonl", "sub/b.jsonl", "dir.jsonl/c.txt")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    assert names(tmp_path / pattern) == ["a.jsonl", "sub/b.jsonl"]


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_a_link_to_a_shard_that_is_gone_is_missed(tmp_path: Path, pattern: str) -> None:
    fill(tmp_path, "a.jsonl", "c.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"b\.jsonl, of the source of dataset A, .*, is not a file; correct its path"):
        refuse_unreadable(tmp_path, DatasetSettings(name="A", path=str(tmp_path / pattern)))
    with pytest.raises(FileNotFoundError):
        names(tmp_path / pattern)


def test_a_file_whose_name_is_a_pattern_is_a_file(tmp_path: Path) -> None:
    fill(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_a_source_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches .*\*\.jsonl; correct the pattern"):
        files_of(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match=r"has no file of rows; known are \.jsonl"):
        files_of(tmp_path)


def test_the_splits_of_a_saved_dataset_are_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        CONTAINERS["saved dataset"](tmp_path / split, table(4))
    with pytest.raises(DataError, match=r"holds the splits test, train; name one of them, as in .*/test"):
        files_of(tmp_path)
    assert len(read(tmp_path / "train")) == 4


def test_a_saved_dataset_of_which_rows_were_selected_is_refused(tmp_path: Path) -> None:
    CONTAINERS["saved dataset"](tmp_path / "train", table(4))
    state = tmp_path / "train" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match=r"index leaves out; save it again behind `flatten_indices\(\)`"):
        files_of(tmp_path / "train")


# By URL


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("container", sorted(set(CONTAINERS) - {"saved dataset", "shards"}))
def test_every_container_is_read_by_url(tmp_path: Path, memory: Any, container: str) -> None:
    made = CONTAINERS[container](tmp_path / "rows", table(30))
    memory.pipe(f"/{container}/{made.name}", made.read_bytes())
    for url in (f"memory://{container}/{made.name}", f"file://{made}"):
        rows = read(url)
        assert [row.value for row in rows] == [row.value for row in read(made)]
        assert read(url, rows[10].after) == rows[11:]


def test_folders_and_patterns_by_url(memory: Any) -> None:
    for number in (2, 10, 1):
        memory.pipe(f"/many/part-{number}.jsonl", b'{"name": %d}\n' % number)
    assert names("memory://many") == names("memory://many/part-*.jsonl") == [1, 2, 10]


def test_a_replaced_object_is_a_change(memory: Any) -> None:
    memory.pipe("/one.jsonl", b'{"a": 1}\n')
    (row,) = read("memory://one.jsonl")
    seen = look("memory://one.jsonl", row.after)
    assert seen.change("memory://one.jsonl") is None
    memory.pipe("/other.jsonl", b'{"a": 2}\n')
    assert seen.change("memory://other.jsonl") == "its 9 bytes are others"
    memory.pipe("/longer.jsonl", b'{"a": 1}\n{}\n')
    assert seen.change("memory://longer.jsonl") == "it has 12 bytes, and had 9 when it was read"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/a.jsonl", r"s3://bucket/a\.jsonl needs a package .*; install it beside tokenmill: s3fs for s3"),
        (
            "what://bucket/a.jsonl",
            r"what://bucket/a\.jsonl cannot be read: Protocol not known: what; use a path, s3://",
        ),
        ("memory://nowhere/a.jsonl", r"memory://nowhere/a\.jsonl.* cannot be read"),
    ],
)
def test_a_url_that_cannot_be_read_is_a_sentence(tmp_path: Path, url: str, says: str) -> None:
    if url.startswith("s3:") and find_spec("s3fs"):
        pytest.skip("the extra `remote` is installed here")
    with pytest.raises(ConfigError, match=says):
        refuse_unreadable(tmp_path, DatasetSettings(name="A", path=url))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.jsonl", "{}/a.jsonl"),
        ("shards/*.gz", "{}/shards/*.gz"),
        ("/data/a.jsonl", "/data/a.jsonl"),
        ("s3://bucket/a.jsonl", "s3://bucket/a.jsonl"),
        ("-", "-"),
    ],
)
def test_only_paths_are_relative_to_the_configuration(tmp_path: Path, path: str, expected: str) -> None:
    config = tmp_path / "tokenmill.toml"
    config.write_text(f'[tokenizer]\npath = "t"\n[[datasets]]\nname = "A"\npath = "{path}"\n')
    (dataset,) = load_settings(config).datasets
    assert str(dataset.path) == expected.format(tmp_path)
    again = DatasetSettings(**dataset.model_dump(mode="json"))
    assert again == dataset


# Standard input


class Input(io.BytesIO):
    name = "<stdin>"


def piped(data: bytes) -> Any:
    return cast("Any", Input(data))


A = DatasetSettings(name="A", path="-")


def test_standard_input_is_copied_once_and_read_from_there(tmp_path: Path) -> None:
    note = keep_standard_input(tmp_path, A, piped(b'{"a": 1}\n{"a": 2}\n'))
    assert note == (
        f"A: standard input was copied to {tmp_path / 'A' / 'standard-input'} (18 bytes); a resume reads it from there"
    )
    assert [row.value for row in read(source_of(tmp_path, A))] == [b'{"a": 1}', b'{"a": 2}']
    assert keep_standard_input(tmp_path, A, piped(b"other")) is None
    assert len(read(source_of(tmp_path, A))) == 2
    refuse_unreadable(tmp_path, A)


def test_standard_input_may_be_of_any_kind(tmp_path: Path) -> None:
    keep_standard_input(tmp_path, A, piped(gzip.compress(b'[{"a": 1}, {"a": 2}]')))
    assert [row.value for row in read(source_of(tmp_path, A))] == [b'{"a": 1}', b'{"a": 2}']


def test_an_empty_standard_input_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'the path of dataset A is "-", and standard input is empty'):
        keep_standard_input(tmp_path, A, piped(b""))
    assert list((tmp_path / "A").iterdir()) == []


def test_other_datasets_read_nothing_from_it(tmp_path: Path) -> None:
    other = DatasetSettings(name="B", path=tmp_path / "b.jsonl")
    assert keep_standard_input(tmp_path, other, piped(b"x")) is None
    assert source_of(tmp_path, other) == tmp_path / "b.jsonl"
