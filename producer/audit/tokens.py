"""Tokens in the text against tokens claimed, and what ids say when they are decoded: on a sample, by the tokenizer."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from common.messages import BadPrompt
from producer.audit.counts import Counts
from producer.audit.lengths import Lengths
from producer.audit.sample import Taken

if TYPE_CHECKING:
    from common.chat_template import Tokenizer


class Measured:
    """Of the rows in the sample: tokens in their text, and those that they claim where they do."""

    def __init__(self) -> None:
        self.rows = self.rows_of_ids = self.refused = self.too_long = 0
        self.tokens = Lengths()
        self.distinct = Lengths()  # of answers that differ, and that nobody is known to have cut
        self.both: list[tuple[int, int]] = []  # claimed, in the text
        self.counts = Counts()
        self._known: set[int] = set()

    def add(self, tokens: int, answer: Sequence[object], *, cut: bool = False) -> None:
        """Take the length of an answer. Those that are alike are of one length without being cut."""
        self.tokens.add(tokens)
        digest = hash(tuple(answer))
        if not cut and digest not in self._known:
            self._known.add(digest)
            self.distinct.add(tokens)

    @property
    def claimed_mean(self) -> float:
        return sum(one for one, _ in self.both) / len(self.both) if self.both else 0.0

    @property
    def text_mean(self) -> float:
        return sum(two for _, two in self.both) / len(self.both) if self.both else 0.0


def measure(sample: Iterable[Taken], tokenizer: "Tokenizer") -> Measured:
    """Tokenize what was taken."""
    measured = Measured()
    for one in sample:
        if one.texts is None:
            measured.too_long += 1
        elif one.ids is not None:
            _decode(measured, one, one.ids, tokenizer)
        else:
            _encode(measured, one, one.texts, tokenizer)
    return measured


def _encode(measured: Measured, one: Taken, texts: list[str], tokenizer: "Tokenizer") -> None:
    try:
        tokens = sum(map(len, tokenizer.encode(texts)))
    except (BadPrompt, UnicodeError):
        measured.refused += 1
        return
    measured.rows += 1
    # What is not in a text: the mark behind the reasoning, and the end token of what has ended.
    tokens += one.reasoned + (one.finish_reason != "length")
    measured.add(tokens, texts)
    if one.claimed is not None:
        measured.both.append((one.claimed, tokens))


def _decode(measured: Measured, one: Taken, ids: list[int], tokenizer: "Tokenizer") -> None:
    measured.rows += 1
    measured.rows_of_ids += 1
    measured.add(len(ids), ids, cut=one.cut)
    if any(not 0 <= token_id < tokenizer.vocab_size for token_id in ids):
        measured.counts.add("out_of_range", one.index)
        return
    control, ends = set(tokenizer.control_ids.values()), tokenizer.special_ids.end
    if not one.cut and one.finish_reason != "length" and (not ids or ids[-1] not in ends):
        measured.counts.add("no_end", one.index)
    inner = ids[:-1]
    if any(token_id in ends for token_id in inner):
        measured.counts.add("end_within", one.index)
    think, think_end = tokenizer.special_ids.think, tokenizer.special_ids.think_end
    if think_end is not None:
        times = ids.count(think_end)
        opened = think in one.prompt_end and think_end not in one.prompt_end
        kind = "unclosed" if opened and not times else ("no_think_end", "think_end", "think_end_again")[min(times, 2)]
        if times or not one.cut:
            measured.counts.add(kind, one.index)
    text = tokenizer.decode([token_id for token_id in ids if token_id not in control])
    if "\ufffd" in text:
        measured.counts.add("replacement", one.index)
