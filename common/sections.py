"""The sections of the configuration: what each key may be."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer, field_validator, model_validator

from common.amounts import tokens_of
from common.errors import UsageError
from common.gate_settings import GatesSettings

DATASET_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

# The layouts of rows (producer/datasets/layouts).
Format = Literal[
    "auto",
    "message_list",
    "input_ids",
    "messages",
    "conversations",
    "conversation",
    "glaive",
    "swe_agent",
    "trajectory",
    "ultrachat",
    "bfcl",
    "turns",
    "magicoder",
    "alpaca",
    "opencode",
    "openorca",
    "question",
    "query",
    "prompt",
]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # strict: `shuffle = false` is no seed


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def server_url(url: str) -> str:
    """A server's address without a slash at its end; raises ValueError, with what is wrong, if it cannot be one."""
    if "@" in url:  # not repeated: it may hold a password
        raise ValueError(
            "an address holds a user name or password; leave it out, and put an API key into the environment or a file"
        )
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or " " in url:
        raise ValueError(f"{url!r} is no http:// or https:// address, as in http://127.0.0.1:30000")
    return url.rstrip("/")


class ServerSettings(Section):
    """Model servers, all serving the same model."""

    urls: Annotated[list[str], Field(min_length=1)] = ["http://127.0.0.1:30000"]
    """The addresses of the servers; `tokenmill servers add` and `drain` change them while a job runs."""
    api_key: SecretStr | None = None
    """The key that is sent to servers which have none of their own; in the environment only."""
    api_key_file: Path | None = None
    """A file that holds that key and nothing else."""
    api_keys: dict[str, SecretStr] = {}
    """The keys of single servers, by address; in the environment only, as a JSON object."""
    api_key_files: dict[str, Path] = {}
    """Files with the keys of single servers, by address, also of servers that are added later."""
    context_length: Positive | None = None
    """Tokens of prompt and answer together; if not set, as the servers say."""
    request_timeout_seconds: Seconds | None = None
    """How long one answer may take; if not set, it is waited for while its server is at work."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        return list(dict.fromkeys(map(server_url, urls)))

    @field_validator("api_keys", "api_key_files")
    @classmethod
    def _by_address(cls, keys: dict[str, Any]) -> dict[str, Any]:
        return {server_url(url): key for url, key in keys.items()}


class TokenizerSettings(Section):
    """The tokenizer and chat template that the prompts are made with."""

    path: Path
    """The model's own folder, or a copy of its tokenizer files, chat template and config.json."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{ thinking = true }`."""
    trust_remote_code: bool = False
    """Whether Python code in that folder may be run, where its tokenizer is written in it."""
    vocab_size: Positive | None = None
    """Ids that the model knows; if not set, as config.json in that folder says."""


class SamplingSettings(Section):
    """`sampling_params` of every call; what is not set here is not sent, and takes the server's own default."""

    max_new_tokens: Positive = 10240
    """The tokens at which an answer is cut."""
    fit: Literal["reject", "cut"] = "reject"
    """What becomes of a prompt that leaves no room for max_new_tokens; `cut` asks for fewer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 always takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that have this much probability together."""
    top_k: int | None = None
    """Sample from so many of the likeliest tokens; -1: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this share of the likeliest one's probability."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken off a token's logit for each time that it was written."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken off a token's logit once it was written."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Divides the logits of tokens in prompt and answer; 1: no change."""
    stop_token_ids: list[int] | None = None
    """Ids that end an answer, beside the model's own."""
    logit_bias: dict[str, float] | None = None
    """What is added to the logits of ids, as in `{ "1234" = -5.0 }`."""

    def params(self) -> dict[str, Any]:
        """`sampling_params` as /generate takes them."""
        return self.model_dump(exclude_none=True, exclude={"fit"})

    def own(self) -> dict[str, Any]:
        """What is set here, and not by default."""
        return self.model_dump(mode="json", exclude_unset=True)


class WorkerSettings(Section):
    """One generate worker."""

    concurrency: Positive = 512
    """Answers in flight at most, at all servers; how many of these is the governor's to say."""
    governed: bool = True
    """Whether the answers in flight at each server follow its load, so that few wait there."""
    load_seconds: Seconds = 2.0
    """How often the load of each server is read."""
    least_in_flight: Positive = 1
    """What the governor may not go below, at each server."""
    most_in_flight: Positive | None = None
    """What it may not go above, at each server."""
    lease_seconds: Seconds = 60.0
    """How long after a worker's death its samples go to others."""
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0
    """How long TERM and Ctrl-C wait for answers in flight before the rest is given back."""
    commit_seconds: Annotated[float, Field(ge=0)] = 0.02
    """Answers that come within this time share one fsync."""
    segment_bytes: Positive = 256 * 1024 * 1024
    """A segment that reaches this size is followed by the next."""

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> Self:
        if self.most_in_flight is not None and self.most_in_flight < self.least_in_flight:
            raise ValueError(f"least_in_flight {self.least_in_flight} is above most_in_flight {self.most_in_flight}")
        return self


class ControlSettings(Section):
    """The control process."""

    feeders: Positive = 1
    """Processes that read, render and tokenize; short prompts are bound by them."""
    window: Positive | None = None
    """Samples that wait in Redis, a dataset; if not set, it follows the rate."""
    metrics: str = "127.0.0.1:9464"
    """HOST:PORT where `control` and `run` serve Prometheus's /metrics; `""`: nowhere."""
    landing: Literal["precise", "fast"] = "precise"
    """How a dataset ends at its cap; `fast` stops up to 0.5 % short, and waits less for it."""

    @field_validator("metrics")
    @classmethod
    def _host_and_port(cls, metrics: str) -> str:
        host, colon, port = metrics.rpartition(":")
        if metrics and not (host and colon and port.isdecimal() and int(port) < 65536):
            raise ValueError(f'{metrics!r} is no address; use HOST:PORT, as in 127.0.0.1:9464, or "" for none')
        return metrics


class RunSettings(Section):
    """`tokenmill run`."""

    workers: Positive = 1
    """Workers that `run` starts."""
    allowed_failures: Annotated[float, Field(ge=0, le=1)] = 0.01
    """The share of rejected samples up to which `run` and `enqueue --wait` leave with 0, not 3."""


class ColumnSettings(Section):
    """The columns of a dataset that have names of its own, by what they hold; each value is a column's name."""

    messages: str | None = None
    """A list of turns."""
    prompt: str | None = None
    """A text, which is asked as one user turn, or a list of turns."""
    input_ids: str | None = None
    """Ready ids."""
    tools: str | None = None
    """The tools that the model may call."""
    system: str | None = None
    """The system prompt."""

    @property
    def asks(self) -> set[str]:
        """Which of those that can be a prompt are named; with any, no other column is looked at."""
        return {name for name in ("messages", "prompt", "input_ids") if getattr(self, name) is not None}


class DatasetSettings(Section):
    """One source and its budget."""

    name: str
    """Its name, and that of its folder in `output`: 1 to 64 of A-Z a-z 0-9 . _ - with no dot in front."""
    path: Path | str
    """A file, a folder or a pattern of files; a URL as in s3://bucket/rows.jsonl; `"-"`: standard input."""
    max_row_bytes: Positive = 64 * 1024 * 1024
    """A longer row is rejected."""
    format: Format = "auto"
    """The layout of its rows; by default each row is read by its own shape."""
    columns: ColumnSettings = ColumnSettings()
    """Where the rows have columns of other names."""
    turns: Literal["last", "first", "all"] = "last"
    """Up to which user or tool turn a conversation is the prompt; `all`: every answer in it is made anew, in order."""
    system: str | None = None
    """The system prompt of the rows that have none."""
    chat_template_kwargs: dict[str, Any] = {}
    """These go over those of `[tokenizer]`."""
    max_new_tokens: Positive | None = None
    """In place of that of `[sampling]`."""
    sampling: SamplingSettings = SamplingSettings()
    """What is set here holds in place of `[sampling]`."""
    drop_media: bool = False
    """Leave images, audio and video out, where text remains; else such rows are rejected."""
    meta: list[str] | None = None
    """Columns that are carried through into the records; if not set, ids and labels."""
    shuffle: Seed | None = None
    """The seed of the order in which its rows are fed; if not set, they are fed in that of the source."""
    limit: Positive | None = None
    """Rows that are fed, rejected ones included; if not set, all."""
    dedupe: Literal["dataset", "all"] | None = None
    """Reject rows whose prompt was fed before; `all`: also those that another dataset with `all` has fed."""
    cap_tokens: Positive | None = None
    """The tokens that it shall have, also as in `"12M"`; if not set, its whole source is answered."""
    count: Literal["completion", "total"] = "completion"
    """What counts against the cap: answers, or prompts as well."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the slots, compared with those of the other datasets."""
    gates: GatesSettings = GatesSettings()
    """What is set here holds in place of `[gates]`."""
    mean_tokens: Positive | None = None
    """What an answer may take, until it is known; if not set, half of max_new_tokens."""

    @field_validator("name")
    @classmethod
    def _stays_in_the_output_folder(cls, name: str) -> str:
        if not DATASET_NAME.fullmatch(name) or name.startswith(".") or name.lower() == "run.json":
            raise ValueError(
                f"{name!r} cannot be a dataset's name; use 1 to 64 of the characters A-Z a-z 0-9 . _ - "
                "and no dot in front"
            )
        return name

    @field_validator("sampling")
    @classmethod
    def _has_no_length(cls, sampling: SamplingSettings) -> SamplingSettings:
        if "max_new_tokens" in sampling.model_fields_set:
            raise ValueError("max_new_tokens is a key of the dataset itself; put it in front of [datasets.sampling]")
        return sampling

    @field_serializer("sampling", "gates")
    def _only_its_own(self, section: SamplingSettings | GatesSettings) -> dict[str, Any]:
        return section.own()

    @model_validator(mode="after")
    def _has_one_prompt_a_row(self) -> Self:
        if self.dedupe and self.turns == "all":
            raise ValueError(
                'dedupe compares the one prompt of a row, and with turns = "all" a row has many; leave one of them out'
            )
        return self

    @field_validator("cap_tokens", mode="before")
    @classmethod
    def _tokens(cls, cap: Any) -> Any:
        try:
            return tokens_of(cap) if isinstance(cap, str) else cap
        except UsageError as error:
            raise ValueError(str(error)) from None

    @field_validator("path")
    @classmethod
    def _url_or_path(cls, path: Path | str) -> Path | str:
        if not str(path):
            raise ValueError("names nothing")
        return str(path) if str(path) == "-" or "://" in str(path) else Path(path)

    def beside(self, folder: Path) -> Self:
        """The same with a path that is not relative, or was to `folder`."""
        return (
            self.model_copy(update={"path": folder / self.path.expanduser()}) if isinstance(self.path, Path) else self
        )
