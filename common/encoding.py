"""Text to ids, in batches, by the tokenizer that the model comes with."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tokenizers

from common.control_tokens import ControlTokens
from common.stretches import Stretches, can_cut

# From here on tokenizers go ways of their own: Kimi's cuts a text after 400,000 characters, and a run of white space or
# of anything else after 25,000, wherever that falls, also within a control token of the template.
_LONG, _LONG_RUN = 400_000, 25_000
_RUNS = re.compile(r"\s+|\S+")


class Encoder(Protocol):
    """Encodes texts whole, and plain ones, in which control tokens are text; nothing is added in front or behind."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]: ...

    def may_cut(self, text: str) -> bool:
        """Whether a text is so long that its ids should be looked at."""


def is_refusal(error: BaseException) -> bool:
    """Whether a tokenizer raised this for what is in a text.

    A panic of Rust, as tiktoken's at a long run of one letter or that of `tokenizers` where added tokens that take
    blanks along meet, is no Exception: it would end the process that feeds, and the next one at the same row.
    """
    if isinstance(error, Exception):
        return not isinstance(error, MemoryError)
    return type(error).__name__ == "PanicException"


class FastEncoder:
    """By a tokenizer of the `tokenizers` library, on all cores."""

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # The same model, normalizer and pre-tokenizer without the control tokens; the model is shared, not copied.
        self._plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            self._plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = self._backend.pre_tokenizer
        self._plain.add_tokens(control.others)
        # One that the model's own vocabulary has not is given another id there than it has.
        names = [one.content for one in control.others]
        ours = {self._plain.token_to_id(name): self._backend.token_to_id(name) for name in names}
        self._renamed = {theirs: own for theirs, own in ours.items() if theirs != own}
        self._stretches = Stretches(control.ids, self.encode_plain) if can_cut(self._backend, control) else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._stretches is not None:
            return self._stretches.encode(texts)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        many = [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]
        return [[self._renamed.get(one, one) for one in ids] for ids in many] if self._renamed else many

    def may_cut(self, text: str) -> bool:
        return len(text) > _LONG


class SlowEncoder:
    """By a tokenizer of Python code, such as Kimi's over tiktoken.

    Threads do not help: at 2 cores Kimi's took 410 us a prompt of 740 tokens with one, 450 with two and 400 with four,
    since it walks through the characters in Python. Several feeders do.
    """

    def __init__(self, tokenizer: Any, probe: str, wanted: Sequence[int]) -> None:
        """`wanted` are the ids of `probe`, as the library's own way to a prompt gives them."""
        # Keyword arguments lead tiktoken-based tokenizers to a path four times as slow. It is the library's own, which
        # cuts at control tokens first, so that a text which is cut in its middle gets other ids there.
        own: dict[str, Any] = {"add_special_tokens": False}
        quick: dict[str, Any] = {} if list(tokenizer.encode(probe)) == list(wanted) else own
        of_its_own = "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters
        plain = {"allow_special_tokens": False} if of_its_own else {"split_special_tokens": True}
        self._encode: Callable[[str], list[int]] = lambda text: list(
            tokenizer.encode(text, **own if self.may_cut(text) else quick)
        )
        self._encode_plain: Callable[[str], list[int]] = lambda text: list(tokenizer.encode(text, **quick, **plain))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(str(text)) for text in texts]  # Kimi's refuses a subclass of str

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_plain(text) for text in texts]

    def may_cut(self, text: str) -> bool:
        return len(text) > _LONG or (len(text) > _LONG_RUN and any(len(run) > _LONG_RUN for run in _RUNS.findall(text)))
