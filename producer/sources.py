"""Whether a source is still the file that a dataset's rows were read from.

A sample is known by its index, the position of its row in the source; a row that has a record is never read again, and
a resume goes on from a byte. So all of it holds as long as the bytes that were read stay what they are: they alone
decide which row has which index, and how many rows there are before the next. What comes behind them was never read:
rows may be appended, or changed there. Times say nothing: a copy has new ones, a changed file can have its old ones.

What is kept are the number of rows and bytes that were read, and SHA-256 of the first and the last 64 KiB of those
bytes. A hash of them all would have to read 100 GB again at each start. Rows put in or taken out shift the last part,
another file or order has another first one. What this cannot see is a change between the two that keeps every length:
there all other rows keep their index, unless rows of one length were exchanged.

Compressed and columnar files, and those behind a URL, are replaced whole if rows are added: of these the size counts,
and the first and the last 64 KiB of the file as it lies there. Of a folder or pattern that is so for each file that was
read to its end; for the one that is being read what its kind says; and those behind it may come, go and change. So a
file that sorts behind the last is growth, and one in between is a change.

A shuffled source counts as read to its end from the start, since any of its rows may be the next. How many rows it had
then is kept as well: what is appended is shuffled by itself, or the order of all would be another.

It stands in `<output>/<dataset>/source.log`, not in Redis, which may be lost: after that the segments alone say which
rows are done, and they mean the same rows only in the same source. A line is appended for each step of the feed, before
its rows are queued, so that no record is of a row that it does not cover; the last whole line counts. Only the first is
forced to disk, since a sync would add some milliseconds to each step: a power cut may take the lines of the last
seconds, and what is left covers all rows but theirs.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from common.durable import make_folder, replace_file, write_all
from common.errors import ConfigError, DataError, UsageError
from common.ledger import Ledger
from common.registered import registering
from common.sections import DatasetSettings
from common.segments import NOT_JSON
from common.settings import Settings
from producer.datasets.cursor import Cursor
from producer.datasets.kinds import Kind, kind_of
from producer.datasets.places import cache_key, is_url, open_file, size_of
from producer.datasets.row_table import ShuffledReader, Table, keep_table, make_table, read_table
from producer.datasets.shards import files_of
from producer.datasets.standard_input import STANDARD_INPUT, keep_standard_input, refuse_no_input, source_of
from producer.recover import live_processes, recover_dataset

_NAME = "source.log"
# A log that has grown to this is begun anew with its last line.
_LOG_BYTES = 64 * 1024
_PART_BYTES = 64 * 1024
# How much of what follows a last row without a newline is looked at: it may go on there.
_REST_BYTES = 4096
# A source of more is said to be read for a shuffle before it is: that takes more than a few seconds.
_LONG_BYTES = 1_000_000_000


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was read of a source: its first `rows` rows; of its file number `file` the first `bytes` bytes or rows.

    `size` is that of all its files. The hashes are of what was read of the file, or of the whole file where it cannot
    grow: then `file_size` is its size.
    """

    rows: int
    bytes: int
    size: int
    first_sha256: str
    last_sha256: str
    kind: str = ""
    file: int = 0
    file_size: int = 0
    name: str = ""  # of the file, where the source is a folder or a pattern
    before_sha256: str = ""  # of what is known of the files before it
    shuffle: int | None = None  # the seed of the order in which rows are fed
    parts: list[int] = []  # how many rows it had each time that it was shuffled

    def change(self, source: str | Path) -> str | None:
        """What is no longer as it was read; None if all of it is. Raises OSError, DataError."""
        files = files_of(source)
        if self.file >= len(files):
            return f"it has {len(files):,} files, of which {self.file + 1:,} were read"
        if not self.rows:
            return None
        now = look(source, Cursor(self.rows, self.file, self.bytes), self)
        if self.name and now.name != self.name:
            return f"its file {self.file + 1:,} was {self.name} and is {now.name}"
        if self.file and _before(files[: self.file]) != self.before_sha256:
            return f"one of the {self.file:,} files before {self.name}, which were read to their end, is another"
        if "array" in {now.kind, self.kind} and self.kind not in {"", now.kind}:
            return f"it was read as {self.kind}, and is {now.kind}"
        change = self._change(now, files[self.file])
        return f"its file {self.name}: {change}" if change and self.name else change

    def _change(self, now: "Source", where: str) -> str | None:
        if self.file_size or now.file_size:
            return self._change_of_whole(now)
        size, part = size_of(where), min(_PART_BYTES, self.bytes)
        if size < self.bytes:
            return f"it has {size:,} bytes, of which {self.bytes:,} were read"
        if now.first_sha256 != self.first_sha256:
            return f"its first {part:,} bytes are others"
        if now.last_sha256 != self.last_sha256:
            return f"the {part:,} bytes before its row {self.rows:,} (byte {self.bytes:,}) are others"
        if kind_of(where).layout in {"jsonl", "csv"} and _goes_on(where, self.bytes):
            return f"its row {self.rows - 1:,}, which had no newline, goes on beyond byte {self.bytes:,}"
        return None

    def _change_of_whole(self, now: "Source") -> str | None:
        if now.file_size != self.file_size:
            return f"it has {now.file_size:,} bytes, and had {self.file_size:,} when it was read"
        if (now.first_sha256, now.last_sha256) != (self.first_sha256, self.last_sha256):
            return f"its {now.file_size:,} bytes are others"
        return None


def look(source: str | Path, cursor: Cursor, known: Source | None = None) -> Source:
    """The source as it is now, up to `cursor`. Raises OSError, DataError.

    Of many files those before the one at hand, and the size of all, are taken from `known` where it is of the same
    file: they were compared a moment ago.
    """
    files = files_of(source)
    where = files[cursor.file]
    kind = kind_of(where)
    whole = cursor.index > 0 and not _grows(where, kind)
    size, first, last = _whole(where, cache_key(where)) if whole else (0, *_parts(where, cursor.offset))
    same = known is not None and known.name != "" and known.file == cursor.file and known.kind == str(kind)
    return Source(
        rows=cursor.index,
        bytes=cursor.offset,
        size=known.size if known and same else sum(map(size_of, files)),
        first_sha256=first,
        last_sha256=last,
        kind=str(kind),
        file=cursor.file,
        file_size=size,
        name="" if where == str(source) else _name(where),
        before_sha256=known.before_sha256 if known and same else _before(files[: cursor.file]),
    )


def _grows(where: str, kind: Kind) -> bool:
    return kind.grows and not is_url(where)


def _name(where: str) -> str:
    return where.rpartition("/")[2]


def _before(files: Sequence[str]) -> str:
    if not files:
        return ""
    facts = hashlib.sha256()
    for where in files:
        facts.update(repr((_name(where), *_whole(where, cache_key(where)))).encode())
    return facts.hexdigest()


@lru_cache(maxsize=16384)
def _whole(where: str, _key: tuple[object, ...]) -> tuple[int, str, str]:
    size = size_of(where)
    return size, *_parts(where, size)


def _parts(where: str, end: int) -> tuple[str, str]:
    """SHA-256 of the first and of the last part of the first `end` bytes."""
    with open_file(where) as file:
        first = file.read(min(_PART_BYTES, end))
        file.seek(max(0, end - _PART_BYTES))
        last = file.read(min(_PART_BYTES, end))
    return hashlib.sha256(first).hexdigest(), hashlib.sha256(last).hexdigest()


def _goes_on(where: str, end: int) -> bool:
    """Whether the row that ended at byte `end` with the file, and not with a newline, is longer by now."""
    with open_file(where) as file:
        file.seek(max(0, end - 1))
        return end > 0 and file.read(1) != b"\n" and bool(file.readline(_REST_BYTES).strip())


def refuse_unreadable(output: Path, dataset: DatasetSettings) -> None:
    """Raises ConfigError if the source of `dataset` is not there, or is of no kind that can be read."""
    if dataset.path == STANDARD_INPUT:
        refuse_no_input(output, dataset)
        return
    source = source_of(output, dataset)
    what = f"the source of dataset {dataset.name}, {source},"
    try:
        for number, where in enumerate(files_of(source)):
            if is_url(where) and number:
                break  # of many remote files one tells whether they can be reached
            named = what if where == str(source) else f"{where}, of {what}"
            if not is_url(where) and not Path(where).is_file():
                raise ConfigError(f"{named} is not a file; correct its path")
            if not is_url(where) and not os.access(where, os.R_OK):
                raise ConfigError(f"{named} may not be read by this user")
            kind_of(where)
    except DataError as error:
        raise ConfigError(f"the source of dataset {dataset.name} cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror or error}; correct its path") from error


def read_source(output: Path, dataset: str) -> Source | None:
    """What was read of the dataset's source; None if nothing was. Raises DataError if that cannot be read."""
    path = output / dataset / _NAME
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    for line in reversed(lines):
        try:
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=Source)
        except NOT_JSON:
            continue
    raise DataError(f"{path} has no whole line; remove it if the source of {dataset} was not replaced")


def keep_source(output: Path, dataset: str, seen: Source, known: Source | None) -> None:
    """Write down what was read, unless more than that is known. Raises OSError."""
    # After a recovery the source is read from its start: what was read before stays what counts.
    if seen == known or (known and seen.rows < known.rows):
        return
    path = output / dataset / _NAME
    line = msgspec.json.encode(seen) + b"\n"
    if known is None or path.stat().st_size >= _LOG_BYTES:
        make_folder(path.parent)
        replace_file(path, [line])
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        write_all(descriptor, line)
    finally:
        os.close(descriptor)


def refuse_replaced(output: Path, datasets: Sequence[DatasetSettings]) -> None:
    """Raises UsageError if the source of one of `datasets` is not the one that its samples were read from."""
    for one in datasets:
        if order := _other_order(read_source(output, one.name), one):
            raise UsageError(
                f"the rows of dataset {one.name} were fed in another order ({order}); put the earlier `shuffle` back, "
                "choose another name for the dataset, or go on with --accept-changes, which keeps what is answered and "
                "feeds all other rows in the new order"
            )
    changes = [f"{one.path} of dataset {one.name}: {change}" for one in datasets if (change := _change(output, one))]
    if changes:
        raise UsageError(
            f"a source is not the one that was read before, so that its rows would get the indices of others: "
            f"{'; '.join(changes)}; put the earlier file back, choose another name for the dataset, or go on with "
            "--accept-changes, which keeps what is answered and reads all other rows from the new file"
        )


def follow_sources(settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings]) -> Iterator[str]:
    """Take over what has become of the sources, before `datasets` are registered; says in a sentence each what.

    What may take minutes is said before it is begun as well. A source that was replaced was accepted before this is
    called: rows with a record or a reject are kept by their index, and the others are read from the new file. A source
    that has grown is read on. Raises UsageError if one was replaced while workers may have its old rows in flight;
    DataError, OSError, redis.RedisError.
    """
    for dataset in datasets:
        if note := keep_standard_input(settings.output, dataset):
            yield note
        known = read_source(settings.output, dataset.name)
        grown = False
        if change := _change(settings.output, dataset):
            _read_anew(settings, ledger, dataset)
            known = None
            yield f"{dataset.name}: its source was replaced ({change}); rows that are not done are read from it"
        elif order := _other_order(known, dataset):
            _read_anew(settings, ledger, dataset)
            known = None
            yield f"{dataset.name}: its order is another ({order}); rows that are not done are fed in it"
        elif known and (size := _size(settings.output, dataset)) > known.size:
            grown = True
            yield f"{dataset.name}: its source has grown from {known.size:,} to {size:,} bytes"
        if dataset.shuffle is not None:
            yield from keep_table_of(settings.output, dataset, known)
        if grown:  # behind the table: a feed that finds the old one would end the dataset again
            read_on(ledger, dataset.name)


def keep_table_of(output: Path, dataset: DatasetSettings, known: Source | None) -> Iterator[str]:
    """Make the table that a shuffled source is read by, unless it is there; says so.

    Raises OSError, DataError.
    """
    assert dataset.shuffle is not None
    folder, source = output / dataset.name, source_of(output, dataset)
    with registering(output):
        table = read_table(folder)
        if table and (seen := _made_of(table)).change(source) is None and seen.shuffle == dataset.shuffle:
            if known and seen.parts[: len(known.parts)] == known.parts:
                known = seen  # a power cut may have taken the last line of source.log
            is_whole = seen.size == _size(output, dataset) and seen.parts == _parts_of(known, seen.rows)
            if is_whole and table.max_row_bytes == dataset.max_row_bytes:
                return
        if (size := _size(output, dataset)) > _LONG_BYTES:
            yield f"{dataset.name}: its {size:,} bytes are read once for the shuffle"
        began = time.monotonic()
        table = make_table(source, folder, dataset.max_row_bytes)
        seen = look(source, table.after)
        seen = msgspec.structs.replace(seen, shuffle=dataset.shuffle, parts=_parts_of(known, table.rows))
        keep_table(folder, table, msgspec.json.encode(seen).decode())
    what, seconds = "copied" if table.copied else "counted", time.monotonic() - began
    yield (
        f"{dataset.name}: its {table.rows:,} rows were {what} for the shuffle in {seconds:.1f} s; that takes "
        f"{table.bytes:,} bytes in {folder}"
    )


def shuffled_reader(output: Path, dataset: DatasetSettings, known: Source | None) -> tuple[ShuffledReader, Source]:
    """The reader of a shuffled source, and what counts as read of it. Raises OSError, DataError."""
    assert dataset.shuffle is not None
    source, table = source_of(output, dataset), read_table(output / dataset.name)
    seen = _made_of(table) if table else None
    if table is None or seen is None or seen.shuffle != dataset.shuffle or (known and known.rows > seen.rows):
        raise DataError(
            f"the table of its rows for the shuffle is not in {output / dataset.name}, or is not that of its source; "
            f"`tokenmill run` and `tokenmill enqueue {dataset.name}` make it"
        )
    return ShuffledReader(source, output / dataset.name, table, dataset.shuffle, seen.parts), seen


def _made_of(table: Table) -> Source:
    return msgspec.json.decode(table.source, type=Source)


def _parts_of(known: Source | None, rows: int) -> list[int]:
    """The parts of a source that has `rows` rows by now."""
    before = known.parts if known else []
    return before if rows in before[-1:] else [*before, rows]


def _other_order(known: Source | None, dataset: DatasetSettings) -> str | None:
    """How the order of the rows is not that in which some were read; None if it is, or none were."""
    if known is None or not known.rows or known.shuffle == dataset.shuffle:
        return None
    was, now = (
        "that of the source" if seed is None else f"shuffle = {seed}" for seed in (known.shuffle, dataset.shuffle)
    )
    return f"it was {was}, and is {now}"


def _change(output: Path, dataset: DatasetSettings) -> str | None:
    known = read_source(output, dataset.name)
    return known.change(source_of(output, dataset)) if known else None


def _size(output: Path, dataset: DatasetSettings) -> int:
    return sum(map(size_of, files_of(source_of(output, dataset))))


def _read_anew(settings: Settings, ledger: Ledger, dataset: DatasetSettings) -> None:
    # With an embedded Redis the lock of `run` says that nobody else is there.
    live = {} if settings.embedded else live_processes(ledger)
    if live:
        raise UsageError(
            f"the source of dataset {dataset.name} was replaced, and {', '.join(sorted(live))} may have its old rows "
            "in flight; stop them, or wait a minute if they are dead, and repeat the command"
        )
    # In this order: one that is killed in between is refused again, and accepted again.
    recover_dataset(settings.output, dataset, ledger)
    (settings.output / dataset.name / _NAME).unlink()


def read_on(ledger: Ledger, name: str) -> None:
    """Feed a dataset again whose source had ended; the other states keep their reasons."""
    state = ledger.snapshot(name)
    if state.ended:
        ledger.feed(name, before=state.cursor, after=state.cursor, ended=False, rejected=[], samples=[])
        ledger.transition(name, "open", ["exhausted"])
