"""The one path by which answers reach the disk.

What it trades for what:
- One write and one fdatasync for the answers of a commit window (20 ms): an fsync costs the disk the same for one
  answer as for a hundred. A power cut costs what the window held, none of which was counted.
- A segment belongs to one process, and is never opened again by another: no two writers meet in a file, and a torn
  line can only be a last one. The price is a file for each life of a worker.
- A write that fails (disk full, quota, I/O error) leaves no part of its lines: the file is cut back to its last durable
  line and closed for good, and the same lines are written anew to a new file. A sync that failed is never tried again:
  the kernel reports it once, may have marked the pages clean, and says "ok" the next time (fsync(2); PostgreSQL lost
  data by that until 2018). Only lines that are written again, where no such page is, prove something.
- Where the cut fails too, the lines may stand in both files. They have one attempt, so they count once, and `verify`
  names the second as a fault.
- What an append has written can be seen before it is durable, and is gone again if the append fails. So the file is
  locked meanwhile, and the keeper counts nothing of a locked one (workers/adoption.py). Nobody waits for the other: a
  file that the keeper is reading is left to it, and the lines go to the next.
- The new file's entry is synced before anything is written into it, or a power cut could take the file with all that
  was counted from it.
- What close(2) says is not asked: all that counts was synced before it, and on Linux the descriptor is gone whatever
  it says. A signal (EINTR) interrupts nothing: Python makes the call again (PEP 475).
- No checksum a line: what a disk changes silently is found where it breaks the JSON or the counts, and nowhere else.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.durable import make_folder, sync_folder, try_lock, unlock, write_all


@dataclass(slots=True)
class _Segment:
    name: str
    descriptor: int
    size: int


class SegmentWriter:
    """Appends lines to `<output>/<dataset>/<worker>-<n>.jsonl`, durably. For one thread."""

    def __init__(self, output: Path, worker: str, segment_bytes: int) -> None:
        self._output = output
        self._worker = worker
        self._segment_bytes = segment_bytes
        self._open: dict[str, _Segment] = {}

    def append(self, dataset: str, lines: Sequence[bytes]) -> tuple[str, int]:
        """Write whole lines and force them to disk; answers the segment (`dataset/file`) and its length in bytes.

        Raises OSError with nothing appended: the caller says so and calls again with the same lines.
        """
        segment = self._open.get(dataset) or self._next(dataset)
        while not try_lock(segment.descriptor, shared=False):
            self._close(dataset)
            segment = self._next(dataset)
        data = b"".join(lines)
        try:
            write_all(segment.descriptor, data)
            os.fdatasync(segment.descriptor)
        except OSError:
            # Back to the last durable line, and away from a file that may no longer be trusted.
            with contextlib.suppress(OSError):
                os.ftruncate(segment.descriptor, segment.size)
            if segment.size == 0:
                # A full disk is tried again every second, and must not fill the folder with empty files.
                with contextlib.suppress(OSError):
                    (self._output / segment.name).unlink()
            self._close(dataset)
            raise
        segment.size += len(data)
        answer = segment.name, segment.size
        if segment.size >= self._segment_bytes:
            self._close(dataset)
        else:
            unlock(segment.descriptor)
        return answer

    def close(self) -> None:
        """Seal all segments."""
        for dataset in list(self._open):
            self._close(dataset)

    def _close(self, dataset: str) -> None:
        # An error here, after the sync, must not make the caller write its lines a second time.
        with contextlib.suppress(OSError):
            os.close(self._open.pop(dataset).descriptor)

    def _next(self, dataset: str) -> _Segment:
        """Create the dataset's next segment of this worker; O_EXCL settles it between two of one name."""
        folder = self._output / dataset
        make_folder(folder)
        number = sum(1 for _ in folder.glob(f"{self._worker}-*.jsonl"))
        while True:
            path = folder / f"{self._worker}-{number}.jsonl"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                number += 1
                continue
            try:
                sync_folder(folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
            segment = _Segment(f"{dataset}/{path.name}", descriptor, 0)
            self._open[dataset] = segment
            return segment
