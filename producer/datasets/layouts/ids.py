"""Ready `input_ids`, in each way that they are written down."""

import base64
import binascii
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from producer.datasets.reasons import BadRow

_NUMBERS = re.compile(r"[\s\[\](),;0-9]*")
_DIGITS = 10  # of the largest id there can be
_UNTRAINED = -100  # what `labels` hold where nothing is learnt


def ready_ids(row: Mapping[str, Any], turns: str) -> Sequence[int]:
    """The prompt's ids. A list, a text of numbers, or packed: little-endian int32 or int64 as bytes or base64.

    With a `loss_mask` or `labels` beside them they are a conversation with someone else's answers, and are cut where
    the last of these ("last") or the first ("first") begins. What an `attention_mask` leaves out is padding, and
    no part of the prompt. Raises BadRow.
    """
    ids = _ids(row["input_ids"])
    mask = _mask(row, len(ids))
    seen = _seen(row, len(ids))
    if seen is not None:
        ids = [one for one, is_seen in zip(ids, seen, strict=True) if is_seen]
        mask = mask and [one for one, is_seen in zip(mask, seen, strict=True) if is_seen]
        if not ids:
            raise BadRow("bad_input_ids", "the attention_mask leaves no id")
    if mask is None or 1 not in mask:
        return ids
    end = mask.index(1) if turns == "first" else _last_run(mask)
    if end == 0:
        raise BadRow("no_user_turn", "the loss mask has no prompt before the answer")
    return ids[:end]


def _ids(value: Any) -> Sequence[int]:
    if isinstance(value, str):
        value = _written(value)
    if isinstance(value, bytes | bytearray | memoryview):
        value = _packed(bytes(value))
    try:
        ids = msgspec.convert(value, list[int])  # refuses true and 1.0; 9 us for 1,000 ids, a Python loop takes 35
    except (msgspec.ValidationError, RecursionError):
        raise BadRow("bad_input_ids") from None
    if not ids:
        raise BadRow("bad_input_ids")
    return ids


def _written(text: str) -> Any:
    if _NUMBERS.fullmatch(text):
        words = re.findall("[0-9]+", text)
        return [int(word) for word in words] if max(map(len, words), default=0) <= _DIGITS else None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRow("bad_input_ids", "input_ids is a text of neither numbers nor base64") from None


def _packed(data: bytes) -> Any:
    """int32, unless every second one is 0: no prompt is like that, and ids that were packed as int64 are."""
    if len(data) % 4:
        raise BadRow("bad_input_ids", f"packed input_ids of {len(data)} bytes are not int32 or int64")
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    if len(ids) > 1 and len(ids) % 2 == 0 and not any(ids[1::2]):
        return ids[::2].tolist()
    return ids.tolist()


def _seen(row: Mapping[str, Any], length: int) -> list[int] | None:
    """The attention_mask; None if nothing is padding."""
    seen = row.get("attention_mask")
    if isinstance(seen, str) and _NUMBERS.fullmatch(seen):
        seen = _written(seen)
    if not isinstance(seen, list) or 0 not in seen:
        return None
    if len(seen) != length:
        raise BadRow("bad_input_ids", "the attention_mask has not one number for each id")
    return seen


def _mask(row: Mapping[str, Any], length: int) -> list[int] | None:
    """1 where an answer is learnt; None if nothing says so."""
    mask = row.get("loss_mask")
    if mask is None:
        labels = row.get("labels")
        if not isinstance(labels, list) or _UNTRAINED not in labels:
            return None
        mask = [int(label != _UNTRAINED) for label in labels]
    if not isinstance(mask, list) or len(mask) != length or not all(one in (0, 1) for one in mask):
        raise BadRow("bad_input_ids", "the loss mask is not a list of 0 and 1 with one for each id")
    return [int(one) for one in mask]


def _last_run(mask: Sequence[int]) -> int:
    """Where the last run of ones begins."""
    end = len(mask) - 1 - mask[::-1].index(1)
    while end and mask[end - 1]:
        end -= 1
    return end
