"""The one path by which answers reach the disk.

Trade-offs: one write and one fdatasync for the answers of a commit window (20 ms), since an fsync costs the disk the
same for one answer as for a hundred; a segment belongs to one process and is never opened again by another, so no two
writers meet in a file; a write that fails (disk full, quota, I/O error) leaves no part of its lines behind, and the
same lines are written again, to a new segment where the old one is in doubt: after a failed fsync the kernel may have
dropped the pages and say "ok" the next time.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.durable import make_folder, sync_folder, write_all


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
                    (self._output / segment.name).unlink()
            self._close(dataset)
            raise
        segment.size += len(data)
        answer = segment.name, segment.size
        if segment.size >= self._segment_bytes:
            self._close(dataset)
        return answer

    def close(self) -> None:
        """Seal all segments."""
        for dataset in list(self._open):
            self._close(dataset)

    def _close(self, dataset: str) -> None:
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
                os.close(descriptor)
                path.unlink(missing_ok=True)
                raise
            segment = _Segment(f"{dataset}/{path.name}", descriptor, 0)
            self._open[dataset] = segment
            return segment
