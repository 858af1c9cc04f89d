"""Token ids as they stand in the lines of records: found, checked and read many lines at a time.

Nearly all of a line is its ids. A JSON parser skips one in 13 ns, and numpy reads one from a text in 20; here they
are checked in 2 ns and read in 8, and no object is made for any of them. Only lines as common/records.py writes them
are known here: of all others the answer is None or False, and the caller parses them as JSON.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]
_T = TypeVar("_T")

# A dozen rows of 1,500 ids are enough for numpy. Arrays that are made of more are so large that the allocator gives
# their memory back each time, and the kernel fills it with zeros anew: with four times as much all takes twice as long.
_TOGETHER_BYTES = 64 * 1024
_HEAD = re.compile(rb'\{"dataset":"[^"\\]*","index":[0-9]+,"sample_id":"[^"\\]*","attempt":[0-9]+(?=,"input_ids":\[)')
_INPUT, _OUTPUT = b',"input_ids":[', b'],"output_ids":['
_COMMA, _ZERO, _NINE = b",09"
_DIGITS = 8  # of the ids that are read here: a word of 64 bits
# Each step adds neighbours, the left one times 10, 100 and 10,000: eight digits are a number after three.
_STEPS = tuple(
    (np.uint64(factor), np.uint64(shift), np.uint64(mask))
    for factor, shift, mask in (
        (10 * 2**8 + 1, 8, 0x00FF00FF00FF00FF),
        (100 * 2**16 + 1, 16, 0x0000FFFF0000FFFF),
        (10_000 * 2**32 + 1, 32, 0xFFFFFFFF),
    )
)


class Apart(NamedTuple):
    """A record's line without its ids, which is JSON as well, and what stands between the brackets of both lists."""

    rest: bytes
    input_ids: bytes
    output_ids: bytes


def apart(line: bytes) -> Apart | None:
    """The line taken apart; None if it does not begin as every record does. The ids may be anything yet (are_ids)."""
    head = _HEAD.match(line)
    if head is None:
        return None
    start = head.end() + len(_INPUT)
    stop = line.find(b"]", start)
    begin = stop + len(_OUTPUT)
    end = line.find(b"]", begin)
    if stop < 0 or end < 0 or not line.startswith(_OUTPUT, stop):
        return None
    tail = line[end + 1 :]
    if b'"input_ids":' in tail or b'"output_ids":' in tail:  # of two keys that are equal the last one holds
        return None
    return Apart(line[: head.end()] + tail, line[start:stop], line[begin:end])


def are_ids(texts: Sequence[bytes]) -> bool:
    """Whether each of `texts` is what stands in a JSON list of whole numbers, one at least, without blanks or signs."""
    text = np.frombuffer(b"," + b",".join(texts) + b",", np.uint8)
    comma = text == _COMMA
    if not _are_digits(text, int(np.count_nonzero(comma))) or (comma[1:] & comma[:-1]).any():
        return False
    leading_zero = (text[1:-1] == _ZERO) & comma[:-2] & ~comma[2:]
    return not leading_zero.any()


def read_ids(texts: Sequence[bytes], tokens: Sequence[int]) -> Ids | None:
    """The ids of all `texts`, one after another, as int32; text n must hold `tokens[n]` of them.

    None if one is not as are_ids wants it (leading zeros aside), has another number of ids, or one of 9 digits. Eight
    digits are read at a time in a word of 64 bits (D. Lemire, "Quickly parsing eight digits", 2018).
    """
    text = b"," + b",".join(texts) + b"," + b"0" * _DIGITS
    letters = np.frombuffer(text, np.uint8)
    commas = np.flatnonzero(letters == _COMMA)
    starts = commas[:-1] + 1
    digits = commas[1:] - starts
    ends = np.cumsum(tokens)
    if (
        len(starts) != ends[-1]
        or digits.min() < 1
        or digits.max() > _DIGITS
        or not _are_digits(letters, len(commas))
        or not np.array_equal(commas[ends], np.cumsum([len(one) + 1 for one in texts]))
    ):
        return None
    # A word from each start on; the shift leaves zeros in the place of missing digits, in front, and what follows goes.
    words = np.ndarray((len(text) - _DIGITS + 1,), "<u8", text, strides=(1,)).take(starts)
    words <<= ((_DIGITS - digits) << 3).view(np.uint64)
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    for factor, shift, mask in _STEPS:
        words *= factor
        words >>= shift
        words &= mask
    return words.astype(np.int32)


def together(items: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """`items` in lists of about as many bytes as are best read at once; `size` gives those of one."""
    group: list[_T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= _TOGETHER_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def _are_digits(letters: NDArray[np.uint8], commas: int) -> bool:
    """Whether all but the `commas` are digits."""
    return bool(letters.max() <= _NINE) and np.count_nonzero(letters < _ZERO) == commas
