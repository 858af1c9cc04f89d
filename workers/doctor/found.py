"""What the checks look at."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.errors import UnavailableError
from common.sections import DatasetSettings
from common.settings import Settings
from workers.doctor.live import Live
from workers.sglang.preflight import ServerFacts


class Found(msgspec.Struct, frozen=True):
    """What was found of the configuration, the servers and the tokenizer."""

    settings: Settings
    datasets: Sequence[DatasetSettings]  # those that are meant
    servers: list[ServerFacts]  # those that answered
    tokenizer: Tokenizer | None  # None if it does not load, or is not looked at
    failures: list[UnavailableError]  # why what is missing here is missing
    live: Mapping[str, Live] = {}  # what was tried on a server, by its url
    at_start: bool = False  # of a job, which waits for a server to get well

    def asked(self, *, cut: bool = True) -> Iterator[tuple[int, str]]:
        """Each max_new_tokens that is asked for, and where it is configured; without those that `fit` may cut."""
        for one in self.datasets:
            sampling = self.settings.sampling_of(one)
            if cut or sampling.fit != "cut":
                yield sampling.max_new_tokens, _place(one)
        if not self.datasets:
            yield self.settings.sampling.max_new_tokens, _place(None)

    def lengths(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Each max_new_tokens, where it is configured, and the chat_template_kwargs of the prompts that have it."""
        for one in self.datasets:
            yield self.settings.sampling_of(one).max_new_tokens, _place(one), self.settings.template_kwargs_of(one)
        if not self.datasets:
            settings = self.settings
            yield settings.sampling.max_new_tokens, _place(None), settings.tokenizer.chat_template_kwargs

    @property
    def most_asked(self) -> tuple[int, str]:
        """The largest of them."""
        return max(self.asked())


def _place(dataset: DatasetSettings | None) -> str:
    """Where the max_new_tokens of a dataset is configured."""
    if dataset is None or dataset.max_new_tokens is None:
        return "[sampling] max_new_tokens"
    return f"max_new_tokens of {dataset.name}"
