"""The histogram of answer lengths.

Bucket 0 ends at 16 tokens, 80 buckets spaced evenly in the logarithm go up to 4 million, and one lies above.
A bucket spans a factor of 1.168, so a percentile read from it is right within 8 %.
"""

import math
from collections.abc import Mapping

_FIRST, _LAST, _STEPS = 16.0, 4_000_000.0, 80
_SCALE = _STEPS / math.log(_LAST / _FIRST)


def bucket_of(tokens: int) -> int:
    """The bucket of an answer of `tokens` tokens."""
    if tokens < _FIRST:
        return 0
    return min(_STEPS + 1, 1 + int(_SCALE * math.log(tokens / _FIRST)))


def upper_edge(bucket: int) -> float:
    """The length in tokens at which `bucket` ends."""
    return _FIRST * math.exp(min(bucket, _STEPS) / _SCALE)


def percentile(lengths: Mapping[int, int], share: float, longest: int) -> int:
    """The length in tokens that `share` (0 to 1) of the answers do not exceed; 0 with no answers."""
    total = sum(lengths.values())
    seen = 0
    for bucket in sorted(lengths):
        seen += lengths[bucket]
        if seen >= share * total:
            # The middle of the bucket on its own scale, and never more than the longest answer.
            lower = upper_edge(bucket - 1) if bucket else 1.0
            return min(longest, round(math.sqrt(lower * upper_edge(bucket))))
    return 0
