"""Training rows from records: ids, the spans that a trainer learns, and what is cut, dropped or split by length.

The loss mask is the plain boundary of SpecForge and speculators: 0 on the prompt, 1 on what the model wrote, its end
token included, unshifted. The ids are the served model's own; nothing is tokenized here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.segments import NOT_JSON
from producer.export.id_texts import Ids, apart, read_ids

TooLong = Literal["cut", "drop", "split"]
Tallies = Mapping[str, Counter[str]]  # by dataset: how many, by what became of them
# Flags that an export gives to rows, beside those that their records have.
CUT = "cut"  # the end of the answer is not in the row
SPLIT = "split"  # the row is `part` of the `parts` that a record's ids make


@dataclass(frozen=True, slots=True)
class Row:
    """One training row. `spans` are the (start, stop) of `input_ids` that a model wrote: mask 1 there, 0 elsewhere.

    All is of the row, not of its record: `prompt_tokens` stand before the first id to learn, `completion_tokens` are
    those to learn, and `finish_reason` is that of the last answer, "length" where its end is not in the row.
    """

    id: str
    dataset: str
    index: int
    row_id: str  # the source row's own id, "" where it has none
    finish_reason: str
    flags: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    input_ids: Ids
    spans: tuple[tuple[int, int], ...]
    part: int = 1
    parts: int = 1

    @property
    def trained_tokens(self) -> int:
        total = 0
        for start, stop in self.spans:
            total += stop - start
        return total

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """0 or 1 for each id."""
        mask = np.zeros(len(self.input_ids), np.int8)
        for start, stop in self.spans:
            mask[start:stop] = 1
        return mask

    def shortened(self, start: int, stop: int, flag: str) -> "Row":
        """The ids from `start` to before `stop`, with the spans that lie there, and `flag` among its flags."""
        spans = tuple((max(a, start) - start, min(b, stop) - start) for a, b in self.spans if a < stop and b > start)
        finish_reason = self.finish_reason
        if spans and (end := spans[-1][1] + start) != self.spans[-1][1]:
            # An answer that another turn follows has ended by itself (common/turns.py).
            finish_reason = "stop" if any(end == b for _, b in self.spans) else "length"
        row = replace(self, input_ids=self.input_ids[start:stop], spans=spans, finish_reason=finish_reason)
        return replace(
            row,
            flags=tuple(dict.fromkeys((*self.flags, flag))),
            prompt_tokens=spans[0][0] if spans else len(row.input_ids),
            completion_tokens=row.trained_tokens,
        )


class _Flat(msgspec.Struct, frozen=True, kw_only=True):
    """What a row has of a record, but for its ids."""

    dataset: str
    index: int
    sample_id: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    flags: tuple[str, ...]
    meta: dict[str, Any]
    parent: int | None = None


class _Lean(_Flat, frozen=True, kw_only=True):
    """A record whose ids are still text: they go into arrays, without an object for each."""

    input_ids: msgspec.Raw
    output_ids: msgspec.Raw


_decode = msgspec.json.Decoder(_Lean).decode
_decode_flat = msgspec.json.Decoder(_Flat).decode
NOT_A_ROW = (*NOT_JSON, ValueError)  # what row_of raises where a line is no whole record


def rows_of(lines: Sequence[bytes]) -> list[tuple[Row, int | None]] | None:
    """What row_of makes of each of `lines`, in a third of the time; None where one of them must be looked at alone."""
    flats: list[_Flat] = []
    texts: list[bytes] = []
    for line in lines:
        if (parts := apart(line)) is None:
            return None
        try:
            flats.append(_decode_flat(parts.rest))
        except NOT_JSON:
            return None
        texts += parts[1:]
    ids = read_ids(texts, [n for flat in flats for n in (flat.prompt_tokens, flat.completion_tokens)])
    if ids is None:
        return None
    ends = accumulate((flat.prompt_tokens + flat.completion_tokens for flat in flats), initial=0)
    return [_row(flat, ids[start:end]) for flat, (start, end) in zip(flats, pairwise(ends), strict=True)]


def row_of(line: bytes) -> tuple[Row, int | None]:
    """The row of a record's line, and the index of its parent. Raises one of NOT_A_ROW."""
    record = _decode(line)
    prompt = _ids(record.input_ids, record.prompt_tokens)
    return _row(record, np.concatenate([prompt, _ids(record.output_ids, record.completion_tokens)], dtype=np.int32))


def _row(flat: _Flat, ids: Ids) -> tuple[Row, int | None]:
    row_id = flat.meta.get("id")
    row = Row(
        id=flat.sample_id,
        dataset=flat.dataset,
        index=flat.index,
        row_id="" if row_id is None else row_id if isinstance(row_id, str) else msgspec.json.encode(row_id).decode(),
        finish_reason=flat.finish_reason,
        flags=flat.flags,
        prompt_tokens=flat.prompt_tokens,
        completion_tokens=flat.completion_tokens,
        input_ids=ids,
        spans=((flat.prompt_tokens, len(ids)),),
    )
    return row, flat.parent


def _ids(raw: msgspec.Raw, tokens: int) -> Ids:
    """A JSON list of ids as an array: half the time of a list and its conversion. Raises ValueError."""
    text = bytes(raw)
    if text.translate(None, b"0123456789,[] "):
        raise ValueError("its ids are not plain whole numbers")
    ids = np.fromstring(text[1:-1], dtype=np.int64, sep=",") if tokens else np.zeros(0, np.int64)
    if len(ids) != tokens or (tokens and ids.max() >= 2**31):
        raise ValueError(f"it has {len(ids)} ids where it counts {tokens}, or one of 32 bits and more")
    return ids


def joined(rows: Iterable[tuple[Row, int | None]], tallies: Tallies) -> Iterator[Row]:
    """Rows of the turns of one conversation as one row, where each begins with all the ids of the one before.

    Takes each row with the index of its parent, and counts in `tallies` what became of those that have one. Templates
    that drop earlier reasoning render a history that is not what the model wrote: such turns stay rows of their own.
    """
    last: Row | None = None
    for row, parent in rows:
        if parent is not None:
            if last is None or (last.dataset, last.index) != (row.dataset, parent):
                tallies[row.dataset]["turn_before_left_out"] += 1
            elif not np.array_equal(row.input_ids[: len(last.input_ids)], last.input_ids):
                tallies[row.dataset]["not_joinable"] += 1
            else:
                tallies[row.dataset]["joined"] += 1
                last = _behind(last, row)
                continue
        if last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def _behind(row: Row, following: Row) -> Row:
    """A turn and the one that begins with all its ids, as one row."""
    return replace(
        following,
        spans=row.spans + following.spans,
        flags=tuple(dict.fromkeys(row.flags + following.flags)),
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens + following.completion_tokens,
    )


def fitted(rows: Iterable[Row], max_length: int | None, too_long: TooLong, tallies: Tallies) -> Iterator[Row]:
    """Rows of `max_length` tokens at most, what became of the longer ones counted in `tallies`.

    `cut` keeps the beginning, `split` makes several rows (id#1, id#2, …); what then holds nothing to learn is dropped.
    """
    for row in rows:
        tally = tallies[row.dataset]
        if max_length is None or len(row.input_ids) <= max_length:
            yield row
        elif too_long == "drop":
            tally["too_long_dropped"] += 1
        elif too_long == "cut":
            cut = row.shortened(0, max_length, CUT)
            tally["too_long_cut" if cut.trained_tokens else "prompt_too_long"] += 1
            if cut.trained_tokens:
                yield cut
        else:
            tally["too_long_split"] += 1
            yield from (part for part in _split(row, max_length) if part.trained_tokens)


def _split(row: Row, max_length: int) -> Iterator[Row]:
    starts = range(0, len(row.input_ids), max_length)
    for part, start in enumerate(starts, 1):
        made = row.shortened(start, start + max_length, SPLIT)
        yield replace(made, id=f"{row.id}#{part}", part=part, parts=len(starts))


def capped(rows: Iterable[Row], left: dict[str, int], tallies: Tallies, *, whole: bool = False) -> Iterator[Row]:
    """Rows as long as tokens to learn are `left` for their dataset, to the token: the last row is cut there.

    Takes what it passes on from `left`. `whole` rows are not cut: one that does not fit is left out.
    """
    for row in rows:
        room = left.get(row.dataset)
        trained = row.trained_tokens
        if room is None or trained <= room:
            if room is not None:
                left[row.dataset] = room - trained
            yield row
            continue
        if whole:
            tallies[row.dataset]["over_cap"] += 1
            continue
        left[row.dataset] = 0
        tallies[row.dataset]["over_cap" if room == 0 else "cut_at_cap"] += 1
        if room:
            yield row.shortened(0, _end_of(row, room), CUT)


def _end_of(row: Row, trained: int) -> int:
    """The index behind the `trained`-th id that a model wrote."""
    for start, stop in row.spans:
        if trained <= stop - start:
            return start + trained
        trained -= stop - start
    return len(row.input_ids)
