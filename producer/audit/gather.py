"""Goes through the rows of one source, once, and keeps what the findings need."""

import functools
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

from common.errors import DataError
from producer.audit.batches import Batch, Unpaired, paired, rows_in
from producer.audit.counts import Counts
from producer.audit.digests import Digests
from producer.audit.lengths import Lengths
from producer.audit.part import Part
from producer.audit.pool import parts_by
from producer.audit.sample import Candidates
from producer.audit.sources import Source
from producer.audit.stretches import STRETCH_BYTES, Wanted, part_of, stretches
from producer.datasets.containers import MAX_ROW_BYTES, Cursor, Row
from producer.datasets.kinds import Kind, kind_of
from producer.datasets.places import is_url, size_of

# Other processes are worth their start, a tenth of a second of a core each, above so many bytes.
_WORTH_BYTES = 32 * 1024 * 1024
# One process merges what the others see, which takes it some 3 % of their time.
_MOST_PROCESSES = 16
_MOST_REASONS = 50  # that are told apart: what stands in the column may be anything
_MOST_ROWS = 16_384  # of a part, where rows may have no size


class Gathered:
    """What was seen of one source. `fault` says why it could not be read to its end, if so."""

    def __init__(self, source: str, sample_rows: int = 0) -> None:
        self.source = source
        self.ours = False  # that tokenmill wrote it
        self.rows = self.bytes = 0
        self.fault = ""
        self.is_damaged = True  # if there is a fault: in what was read, and not in the reading
        self.layouts: Counter[str] = Counter()
        # By layout, of files in which no row of it has an answer: rows that end with none, as prompts do.
        self.prompt_rows: Counter[str] = Counter()
        self.unpaired = Unpaired()
        self.broken, self.notes, self.damages, self.roles = Counts(), Counts(), Counts(), Counts()
        self.finish_reasons: Counter[str] = Counter()
        # Of rows that have an answer.
        self.answers = self.reasoned = self.empty_fields = self.in_content = self.ids_claimed = 0
        self.characters, self.reasoning_characters = Lengths(), Lengths()
        self.claimed, self.id_tokens = Lengths(), Lengths()
        self.cut_claimed = Lengths()  # of those that ended by length
        # By row; 0 is none: digests of prompt and reply, ids or tokens claimed, characters.
        self.prompts, self.replies = array("q"), array("q")
        self.tokens, self.sizes = array("I"), array("I")
        self.numbers = Numbers()
        self.longest_seconds = 0.0
        self.sample = Candidates(sample_rows)
        self.file_layouts: Counter[str] = Counter()  # as `layouts`, of the file that is read
        self.silent = Counts()  # its rows that end with no answer, by layout

    @functools.cached_property
    def of_replies(self) -> Digests:
        """Equal replies; only once all rows are there."""
        return Digests(self.replies)

    def add(self, part: Part) -> None:
        """Take what was seen of the rows that follow."""
        self.file_layouts.update(part.layouts)
        self.silent.merge(part.silent, self.rows)
        self.broken.merge(part.broken, self.rows)
        self.notes.merge(part.notes, self.rows)
        self.damages.merge(part.damages, self.rows)
        self.roles.merge(part.roles, self.rows)
        self.sample.merge(part.candidates, self.rows)
        self.rows += part.rows
        self.bytes += part.bytes
        self.layouts.update(part.layouts)
        for reason, rows in part.finish_reasons.items():
            known = reason in self.finish_reasons or len(self.finish_reasons) < _MOST_REASONS
            self.finish_reasons[reason if known else "others"] += rows
        self.answers += part.answers
        self.ids_claimed += part.ids_claimed
        self.reasoned += part.reasoned
        self.empty_fields += part.empty_fields
        self.in_content += part.in_content
        self.characters.add_all(part.characters)
        self.reasoning_characters.add_all(part.reasoning_characters)
        self.claimed.add_all(part.claimed)
        self.cut_claimed.add_all(part.cut_claimed)
        self.id_tokens.add_all(part.id_tokens)
        self.prompts.extend(part.prompts)
        self.replies.extend(part.replies)
        self.tokens.extend(part.tokens)
        self.sizes.extend(part.sizes)
        self.numbers.add_all(part.numbers)
        self.longest_seconds = max(self.longest_seconds, part.longest_seconds)

    def end_file(self) -> None:
        """The rows that follow are of another file, or there are none."""
        layouts, self.file_layouts = self.file_layouts, Counter()
        silent, self.silent = self.silent, Counts()
        for layout, rows in silent.rows.items():
            if rows == layouts[layout]:
                self.prompt_rows[layout] += rows
            else:
                silent.add_to(self.roles, layout, "no_answer")


class Numbers:
    """The numbers that rows have, as far as it takes to see that some are missing."""

    def __init__(self) -> None:
        self.count, self.low, self.high = 0, 0, -1

    def add_all(self, numbers: list[int]) -> None:
        """Take the numbers of some rows."""
        if numbers:
            self.low = min(numbers) if not self.count else min(self.low, *numbers)
            self.high = max(self.high, *numbers)
            self.count += len(numbers)

    @property
    def missing(self) -> int:
        """How many are not there between the lowest and the highest; 0 where that says nothing.

        Numbers that are mostly not there are those of a selection, and none of a row that was lost.
        """
        span = self.high - self.low + 1
        lost = span - self.count
        return lost if self.count >= 20 and 0 < lost <= 0.4 * span else 0


def gather(
    source: Source, sample_rows: int = 0, max_row_bytes: int = MAX_ROW_BYTES, processes: int | None = None
) -> Gathered:
    """Read all rows of `source`, by so many processes; None is as many as its size is worth.

    Raises OSError, DataError if not a single row can be read, and TokenmillError if a process dies.
    """
    seen = Gathered(source.name, sample_rows)
    seen.ours = source.ours
    try:
        files = paired(source.files())
        cut = [file for file in files if isinstance(file, str) and _can_be_cut(file)]
        by = _processes_for(cut) if processes is None else processes
        if by > 1 and len(cut) == len(files):
            _gather_by(by, cut, seen, max_row_bytes)
        else:
            for number, file in enumerate(files):
                for part in _parts(file, number, seen, max_row_bytes):
                    seen.add(part)
                    if part.error is not None:
                        raise part.error
                seen.end_file()
    except (OSError, DataError) as error:
        if not seen.rows:
            raise
        seen.fault, seen.is_damaged = str(error), isinstance(error, DataError)
        seen.end_file()
    return seen


def _gather_by(processes: int, files: list[str], seen: Gathered, limit: int) -> None:
    """Raises OSError, TokenmillError."""
    wanted = (one for number, file in enumerate(files) for one in _wanted(file, number, seen, limit))
    file = 0
    with closing(parts_by(processes, wanted)) as parts:
        for part in parts:
            if part.file != file:
                seen.end_file()
                file = part.file
            seen.add(part)
            if part.error is not None:
                raise part.error
    seen.end_file()


def _processes_for(files: list[str]) -> int:
    """1 where it is not worth more."""
    cores = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    return cores if cores > 1 and sum(map(size_of, files)) >= _WORTH_BYTES else 1


def _can_be_cut(file: str) -> bool:
    """Whether it is JSON lines as they are, on this machine; what is wrong with it is said when it is read."""
    try:
        return not is_url(file) and kind_of(file) == Kind("jsonl")
    except (OSError, DataError):
        return False


def _wanted(file: str, number: int, seen: Gathered, limit: int) -> Iterator[Wanted]:
    """What is wanted of the stretches of a file, the next as what was seen before stands then."""
    for stretch in stretches(file, size_of(file), number):
        yield Wanted(stretch, limit, seen.sample.wanted, seen.sample.below, _seed(number, stretch.start))


def _seed(file: int, start: int) -> int:
    return (file << 48) + start


def _parts(file: str | Batch, number: int, seen: Gathered, limit: int) -> Iterator[Part]:
    """The parts of a file, seen by this process. Raises DataError once all rows before were given."""
    if isinstance(file, str) and _can_be_cut(file):
        yield from map(part_of, _wanted(file, number, seen, limit))
        return
    rows = rows_in(file, Cursor(0, number), limit, seen.unpaired)
    whole = True
    while whole:
        part = Part(Candidates(seen.sample.wanted, seen.sample.below, _seed(number, seen.rows)))
        try:
            whole = _fill(part, rows)
        except (OSError, DataError) as error:
            part.error = error
            whole = False
        yield part


def _fill(part: Part, rows: Iterator[Row]) -> bool:
    """Take rows until there are enough for a part; answers whether there may be more."""
    for row in rows:
        part.take(row.value, row.size)
        if part.bytes >= STRETCH_BYTES or part.rows >= _MOST_ROWS:
            return True
    return False
