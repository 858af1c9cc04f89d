"""Numbers of tokens as people write them, on the command line and in the configuration."""

import re

from common.errors import UsageError

_UNITS = {"": 1, "k": 1000, "M": 10**6, "G": 10**9}


def tokens_of(text: str) -> int | None:
    """`12000000`, `12_000_000`, `12M` or `2.5M` in tokens, `none` for no cap; raises UsageError on anything else."""
    if text == "none":
        return None
    match = re.fullmatch(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)([kMG]?)", text)
    tokens = float(re.sub("[_,]", "", match[1])) * _UNITS[match[2]] if match else 0.5
    if tokens != int(tokens):
        raise UsageError(f"{text!r} is no number of tokens; write it as 12000000, 12_000_000 or 12M")
    return int(tokens)
