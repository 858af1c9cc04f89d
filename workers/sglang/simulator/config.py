"""What a simulated server is told to be: one frozen dataclass, checked when it is made."""

import math
from dataclasses import dataclass, field

from common.errors import UsageError
from workers.sglang.simulator.faults import parse
from workers.sglang.simulator.profiles import PROFILES


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorConfig:
    """Settings of one simulated server. Raises `UsageError` for a value that makes no sense.

    `speed` is how many times faster than real time the model runs; 0 and infinity both mean that answers come at
    once. Three models of time, of which one holds: steps (the default), a constant `tokens_per_second` for each
    request, or `latency_mean_seconds` for each answer whatever its length.

    By default a decode step takes 29.9 ms + 0.322 ms for each running request + 0.1 us for each KV token in use, and
    a prefill 20 ms + 1 s for 8,000 prompt tokens. The step's three constants were chosen to meet two measured points
    of one real server (about 740 tokens/s with long answers, 1,350 with short ones), so their split is a choice.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    model_path: str = "simulated"
    weight_version: str = "default"
    keep_alive_seconds: float = 5.0  # the real server closes an idle connection after 5 s, and clients must know

    vocab_size: int = 32_000
    context_length: int = 131_072
    max_total_tokens: int = 159_277
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    profile: str = "0.5.23"  # the release that it plays: a key of profiles.PROFILES
    skip_tokenizer_init: bool = False
    allow_auto_truncate: bool = False
    stream_output: bool = False  # streams carry the new ids alone
    stream_interval: int = 1  # ids in an event of a stream, save the first
    router: bool = False  # a router stands in front; see router.py
    says: tuple[str, ...] = ()  # KEY=VALUE of /server_info that it says in place of its own; values in JSON, or text
    tokenizer: str | None = None  # a folder with a tokenizer.json, by which it reads the texts of /tokenize

    die_on_bad_id: bool = True  # as every real server does
    restart_seconds: float | None = None  # from a death to the next life; None: it stays dead
    faults: tuple[str, ...] = ()  # as faults.parse reads them

    seed: int = 0
    mean_tokens: float = 600.0
    cv: float = 1.0
    end_token_id: int = 2
    think_end_token_id: int | None = None
    first_id: int = 3
    last_id: int | None = None  # None: the last of the vocabulary

    speed: float = 1.0
    step_base_seconds: float = 0.0299
    step_request_seconds: float = 0.000322
    step_token_seconds: float = 1e-7
    prefill_base_seconds: float = 0.02
    prefill_tokens_per_second: float = 8_000.0
    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int = 8_192  # what the real one takes on a GPU of 60 to 160 GB
    schedule_conservativeness: float = 1.0
    prefix_cache: bool = True
    tokens_per_second: float | None = None
    latency_mean_seconds: float | None = None
    latency_cv: float = 0.0

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ids()
        self._check_names()
        self._check_time()

    @property
    def instant(self) -> bool:
        """True if answers take no time, and nothing is ever running or waiting."""
        return self.speed == 0 or math.isinf(self.speed)

    def real_seconds(self, seconds: float) -> float:
        """How long so many simulated seconds take."""
        return 0.0 if self.instant else seconds / self.speed

    @property
    def ordinary_last_id(self) -> int:
        """The largest id that an answer may hold besides the special ones."""
        return self.vocab_size - 1 if self.last_id is None else self.last_id

    @property
    def effective_max_running_requests(self) -> int:
        """The real server never runs more than half as many as its pool has tokens."""
        return max(min(self.max_running_requests, self.max_total_tokens // 2), 1)

    def _check_names(self) -> None:
        if self.profile not in PROFILES:
            raise UsageError(f"The simulator has no profile {self.profile}; give one of {', '.join(PROFILES)}.")
        for text in self.faults:
            parse(text)
        for text in self.says:
            if "=" not in text:
                raise UsageError(f"The simulator is to say {text!r}; give KEY=VALUE, as in kv_cache_dtype=fp8_e5m2.")

    def _check_numbers(self) -> None:
        for name in (
            "vocab_size",
            "context_length",
            "max_total_tokens",
            "max_running_requests",
            "mean_tokens",
            "step_base_seconds",
            "prefill_tokens_per_second",
            "max_prefill_tokens",
            "chunked_prefill_size",
            "stream_interval",
            "schedule_conservativeness",
            "tokens_per_second",
            "latency_mean_seconds",
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"The simulator's {name} is {value}; give a number above 0.")
        if self.restart_seconds is not None and not self.restart_seconds >= 0:
            raise UsageError(f"The simulator's restart_seconds is {self.restart_seconds}; give 0 or more.")
        for name in ("cv", "latency_cv", "speed", "step_request_seconds", "step_token_seconds", "prefill_base_seconds"):
            value = getattr(self, name)
            if not value >= 0:
                raise UsageError(f"The simulator's {name} is {value}; give 0 or more.")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise UsageError(f"The simulator's max_queued_requests is {self.max_queued_requests}; give 0 or more.")

    def _check_ids(self) -> None:
        for name in ("end_token_id", "think_end_token_id", "first_id", "last_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise UsageError(
                    f"The simulator's {name} {value} is outside its vocabulary of {self.vocab_size} ids; "
                    "give one that is inside, or a larger vocab_size."
                )
        if self.think_end_token_id == self.end_token_id:
            raise UsageError("The simulator's think_end_token_id equals its end_token_id; give two different ids.")
        special = {self.end_token_id, self.think_end_token_id}
        if not any(token not in special for token in range(self.first_id, self.ordinary_last_id + 1)):
            raise UsageError(
                f"The simulator has no ordinary id from first_id {self.first_id} to last_id {self.ordinary_last_id}; "
                "give a wider range."
            )

    def _check_time(self) -> None:
        if self.tokens_per_second is not None and self.latency_mean_seconds is not None:
            raise UsageError(
                "The simulator was given both tokens_per_second and latency_mean_seconds; give one of them."
            )
        if self.instant and (self.tokens_per_second is not None or self.latency_mean_seconds is not None):
            raise UsageError(
                "The simulator's speed is infinite, so its answers take no time; leave out the rate or the latency."
            )
