"""What the keeper counts of a segment while its writer is at it: nothing that may still be taken back."""

import errno
from pathlib import Path

import pytest

from common.durable import try_lock
from common.ledger import Ledger
from common.segments import count
from common.settings import Settings, load_settings
from tests.lines import record_line, write_config
from tests.syscalls import Call, Short, under
from workers.adoption import adopt
from workers.segment_writer import SegmentWriter

BIG = 2**20


class Site:
    """A dataset of four samples in flight, the writer of their worker, and the keeper's."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.ledger = ledger
        self.output = settings.output
        ledger.register(settings.datasets[0])
        rows = [(index, b"prompt") for index in range(4)]
        ledger.feed("A", before="", after="end", ended=True, rejected=[], samples=rows)
        ledger.admit("A", room=9, window=9, tokens_per_second=0)
        claimed, _ = ledger.claim("A", "w", 60, range(4))
        self.lines = [record_line(one.index, one.attempt) for one in claimed]
        self.worker = SegmentWriter(self.output, "w", BIG)
        self.keeper = SegmentWriter(self.output, "keeper", BIG)

    def adopt(self) -> int:
        return adopt(self.ledger, self.keeper, self.output, "A")

    def done(self) -> int:
        return self.ledger.snapshot("A").done


@pytest.fixture
def site(tmp_path: Path, valkey: str, ledger: Ledger) -> Site:
    return Site(load_settings(write_config(tmp_path, valkey)), ledger)


@pytest.mark.parametrize("fails", ["write", "fdatasync"])
def test_lines_that_an_append_takes_back_are_not_counted(site: Site, fails: str) -> None:
    """A whole line is in the file, and seen by all, when the disk turns out to be full."""
    adopted: list[int] = []
    writes = iter([Short(len(site.lines[0]) + 5)])

    def judge(call: Call) -> int | None:
        if call.name == "write" and fails == "write" and (first := next(writes, None)):
            return first
        if call.name != fails:
            return None
        assert count(site.output, "A").entries
        adopted.append(site.adopt())
        return errno.ENOSPC

    with pytest.raises(OSError):
        under(judge, lambda: site.worker.append("A", site.lines))
    assert (adopted, site.done(), count(site.output, "A").entries) == ([0], 0, {})

    site.worker.append("A", site.lines)
    assert (site.adopt(), site.done(), len(count(site.output, "A").entries)) == (4, 4, 4)


def test_lines_that_are_durable_are_counted_whether_their_writer_lives_or_not(site: Site) -> None:
    site.worker.append("A", site.lines[:2])
    assert (site.adopt(), site.done()) == (2, 2)
    site.worker.append("A", site.lines[2:3])
    assert (site.adopt(), site.done()) == (1, 3)
    site.worker.append("A", site.lines[3:])
    site.worker.close()
    assert (site.adopt(), site.adopt(), site.done()) == (1, 0, 4)
    assert [path.name for path in (site.output / "A").iterdir()] == ["w-0.jsonl"]


def test_a_writer_does_not_wait_for_the_keeper(site: Site) -> None:
    site.worker.append("A", site.lines[:1])
    with (site.output / "A" / "w-0.jsonl").open("rb") as file:
        assert try_lock(file.fileno(), shared=True)  # a keeper that stands still in the middle of its reading
        assert site.worker.append("A", site.lines[1:3])[0] == "A/w-1.jsonl"
    assert site.worker.append("A", site.lines[3:])[0] == "A/w-1.jsonl"
    assert (site.adopt(), site.done()) == (4, 4)


def test_what_cannot_be_forced_to_disk_is_written_again_before_it_is_counted(site: Site) -> None:
    """A sync that failed once would succeed at the next tick, and prove nothing."""
    site.worker.append("A", site.lines[:3])
    site.worker.close()
    segment = str(site.output / "A" / "w-0.jsonl")
    judge = lambda call: errno.EIO if call.name == "fsync" and call.file == segment else None  # noqa: E731
    assert under(judge, site.adopt) == 3
    assert site.done() == 3
    assert (site.output / "A" / "keeper-0.jsonl").read_bytes() == b"".join(site.lines[:3])
    counted = count(site.output, "A")
    assert (sorted(counted.entries), counted.superseded) == ([0, 1, 2], 3)
    site.adopt()
    assert site.done() == 3


def test_what_can_nowhere_be_forced_to_disk_is_not_counted(site: Site) -> None:
    site.worker.append("A", site.lines[:3])
    site.worker.close()
    with pytest.raises(OSError):
        under(lambda call: errno.EIO if call.name in {"fsync", "fdatasync"} else None, site.adopt)
    assert site.done() == 0
