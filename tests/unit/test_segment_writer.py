"""The path by which answers reach the disk: names, rotation, short writes, and what a failed append leaves behind."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.durable import make_folder, write_all
from common.segments import count
from tests.conftest import REPO, wait_until
from tests.disk import small_disk
from tests.lines import record_line, void_line
from workers.segment_writer import SegmentWriter

LINES = [record_line(index) for index in range(6)]
BIG = 2**20


@contextmanager
def most_bytes_a_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size`: the write that would is cut short, the next one is refused."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def files(output: Path) -> dict[str, bytes]:
    """Every file below `output` and what it holds."""
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_appended_lines_stand_in_the_segment_in_order(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w1-host", BIG)
    first = writer.append("A", LINES[:2])
    second = writer.append("A", LINES[2:5])
    writer.close()
    assert first == ("A/w1-host-0.jsonl", len(b"".join(LINES[:2])))
    assert second == ("A/w1-host-0.jsonl", len(b"".join(LINES[:5])))
    assert files(tmp_path) == {"A/w1-host-0.jsonl": b"".join(LINES[:5])}


def test_each_dataset_has_segments_of_its_own(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("A", LINES[:1])
    writer.append("B", LINES[1:2])
    writer.append("A", LINES[2:3])
    writer.close()
    assert files(tmp_path) == {"A/w-0.jsonl": LINES[0] + LINES[2], "B/w-0.jsonl": LINES[1]}


def test_a_segment_that_is_full_is_followed_by_the_next(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", segment_bytes=len(LINES[0]) + 1)
    sizes = [writer.append("A", [line]) for line in LINES[:5]]
    writer.close()
    one, two = len(LINES[0]), len(LINES[0] + LINES[1])
    assert sizes == [(f"A/w-{n // 2}.jsonl", two if n % 2 else one) for n in range(5)]
    assert files(tmp_path) == {
        "A/w-0.jsonl": LINES[0] + LINES[1],
        "A/w-1.jsonl": LINES[2] + LINES[3],
        "A/w-2.jsonl": LINES[4],
    }


def test_a_segment_is_never_opened_again(tmp_path: Path) -> None:
    for line in LINES[:3]:
        writer = SegmentWriter(tmp_path, "w", BIG)
        writer.append("A", [line])
        writer.close()
    assert files(tmp_path) == {f"A/w-{n}.jsonl": LINES[n] for n in range(3)}


def test_two_writers_of_one_name_never_share_a_file(tmp_path: Path) -> None:
    writers = [SegmentWriter(tmp_path, "w", segment_bytes=1) for _ in range(2)]
    start = threading.Barrier(2)
    names: list[list[str]] = [[], []]

    def write(which: int) -> None:
        start.wait()
        names[which] = [writers[which].append("A", [record_line(which * 15 + n)])[0] for n in range(15)]

    threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*names[0], *names[1]}) == 30
    assert all(text.count(b"\n") == 1 for text in files(tmp_path).values())
    assert sorted(count(tmp_path, "A").entries) == list(range(30))


def test_a_gap_in_the_numbers_is_stepped_over(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    for name in ("w-1.jsonl", "w-5.jsonl"):
        (tmp_path / "A" / name).write_bytes(LINES[5])
    writer = SegmentWriter(tmp_path, "w", segment_bytes=1)
    assert [writer.append("A", [line])[0] for line in LINES[:3]] == ["A/w-2.jsonl", "A/w-3.jsonl", "A/w-4.jsonl"]
    assert writer.append("A", LINES[3:4])[0] == "A/w-6.jsonl"


def test_a_write_that_a_signal_cuts_short_goes_on_where_it_stopped() -> None:
    data = os.urandom(300_000)
    source, sink = os.pipe()
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    received = bytearray()

    def interrupt_then_read() -> None:
        def is_full() -> bool:
            (waiting,) = struct.unpack("i", fcntl.ioctl(source, termios.FIONREAD, b"\0" * 4))
            return bool(waiting >= 65536)

        wait_until("the pipe is full, and the write waits", is_full)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        wait_until("the signal came", lambda: signals)
        while part := os.read(source, 65536):
            received.extend(part)

    reader = threading.Thread(target=interrupt_then_read)
    reader.start()
    try:
        write_all(sink, data)
    finally:
        os.close(sink)
        reader.join()
        os.close(source)
        signal.signal(signal.SIGUSR1, before)
    assert received == data


def test_nothing_is_left_of_a_failed_append_and_the_same_lines_go_to_a_new_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("A", LINES[:2])
    kept = files(tmp_path)
    with most_bytes_a_file(len(b"".join(LINES[:2])) + 10):  # ten bytes of the next line fit
        with pytest.raises(OSError) as caught:
            writer.append("A", LINES[2:4])
        assert caught.value.errno == errno.EFBIG
        assert files(tmp_path) == kept
    segment, size = writer.append("A", LINES[2:4])
    writer.close()
    assert (segment, size) == ("A/w-1.jsonl", len(b"".join(LINES[2:4])))
    assert files(tmp_path) == kept | {"A/w-1.jsonl": b"".join(LINES[2:4])}


def test_a_full_disk_that_is_tried_again_and_again_fills_no_folder_with_empty_files(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    with most_bytes_a_file(10):
        for _ in range(5):
            with pytest.raises(OSError):
                writer.append("A", LINES[:1])
            assert files(tmp_path) == {}
    assert writer.append("A", LINES[:1]) == ("A/w-0.jsonl", len(LINES[0]))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path) as folder:
        yield folder


def test_a_disk_without_space_loses_no_line(disk: Path) -> None:
    """A real ENOSPC: the write is cut short where the space ends."""
    (disk / "filler").write_bytes(bytes(30_000))
    writer = SegmentWriter(disk, "w", BIG)
    lines = [record_line(index, answer=range(500)) for index in range(50)]
    written = 0
    while shutil.disk_usage(disk).free > len(lines[written]):
        writer.append("A", [lines[written]])
        written += 1
    with pytest.raises(OSError) as caught:
        writer.append("A", lines[written : written + 2])
    assert caught.value.errno == errno.ENOSPC
    assert files(disk / "A") == {"w-0.jsonl": b"".join(lines[:written])}
    (disk / "filler").unlink()
    assert writer.append("A", lines[written : written + 2])[0] == "A/w-1.jsonl"
    writer.close()
    books = count(disk, "A")
    assert (list(books.entries), books.faults) == (list(range(written + 2)), [])


def test_a_folder_that_cannot_be_made_is_an_error_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "A").write_text("in the way")
    writer = SegmentWriter(tmp_path, "w", BIG)
    with pytest.raises(OSError):
        writer.append("A", LINES[:1])
    (tmp_path / "A").unlink()
    assert writer.append("A", LINES[:1]) == ("A/w-0.jsonl", len(LINES[0]))


def test_one_dataset_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("B", LINES[:1])
    (tmp_path / "A").write_text("in the way")
    with pytest.raises(OSError):
        writer.append("A", LINES[1:2])
    assert writer.append("B", LINES[2:3]) == ("B/w-0.jsonl", len(LINES[0] + LINES[2]))


def test_no_line_is_no_change(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    _, before = writer.append("A", [void_line(1)])
    assert writer.append("A", []) == ("A/w-0.jsonl", before)


def test_folders_are_made_from_the_top(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


WITNESS = """
import os, sys
from pathlib import Path
from workers.segment_writer import SegmentWriter

output = Path(sys.argv[1])
def witness(event, args):
    if event in ("open", "os.mkdir"):
        flags = args[2] if event == "open" else None
        path = Path(os.fsdecode(args[0])) if isinstance(args[0], (str, bytes, Path)) else None
        if path is not None and path.is_relative_to(output.parent.parent) and (flags is None or flags & os.O_DIRECTORY):
            print("made" if flags is None else "synced", path.relative_to(output.parent.parent))
        elif path is not None and flags & os.O_CREAT and path.is_relative_to(output):
            print("made", path.relative_to(output.parent.parent))
writer = SegmentWriter(output, "w", 1)
sys.addaudithook(witness)
for dataset in ("A", "A", "B"):
    writer.append(dataset, [b"x"])
"""


def test_every_new_entry_of_a_folder_is_made_durable_at_once(tmp_path: Path) -> None:
    """As Python's audit events tell, in a process of its own: after each new entry its folder is opened for a sync."""
    script = [sys.executable, "-c", WITNESS, str(tmp_path / "runs" / "out")]
    seen = subprocess.run(script, capture_output=True, text=True, check=True, cwd=REPO).stdout.split("\n")
    assert [line for line in seen if line] == [
        "made runs", "synced .", "made runs/out", "synced runs", "made runs/out/A", "synced runs/out",
        "made runs/out/A/w-0.jsonl", "synced runs/out/A",
        "made runs/out/A/w-1.jsonl", "synced runs/out/A",
        "made runs/out/B", "synced runs/out", "made runs/out/B/w-0.jsonl", "synced runs/out/B",
    ]  # fmt: skip
