"""The sections of the configuration: what each key may be."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer, field_validator, model_validator

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
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    api_keys: dict[str, SecretStr] = {}  # of single servers, by url; from the environment alone
    api_key_files: dict[str, Path] = {}  # the same; a url that is not in `urls` may be added later
    context_length: Positive | None = None  # tokens; read from the server if not given
    request_timeout_seconds: Seconds | None = None  # one answer; by default it is waited for while its server works

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
    chat_template_kwargs: dict[str, Any] = {}
    trust_remote_code: bool = False
    vocab_size: Positive | None = None  # ids the model knows; by default from config.json beside the tokenizer


class SamplingSettings(Section):
    """`sampling_params` of every call; what is not set here is not sent, and takes the server's own default."""

    max_new_tokens: Positive = 10240
    fit: Literal["reject", "cut"] = "reject"  # of a prompt that leaves no room for max_new_tokens; cut: ask for less
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None

    def params(self) -> dict[str, Any]:
        """`sampling_params` as /generate takes them."""
        return self.model_dump(exclude_none=True, exclude={"fit"})

    def own(self) -> dict[str, Any]:
        """What is set here, and not by default."""
        return self.model_dump(mode="json", exclude_unset=True)


class WorkerSettings(Section):
    """One generate worker."""

    concurrency: Positive = 512  # answers in flight at most; how many of these is the governor's to say
    governed: bool = True  # steer the answers in flight at each server by its load, so that few wait there
    load_seconds: Seconds = 2.0  # how often the load of each server is read
    least_in_flight: Positive = 1  # what the governor may not go below, for each server
    most_in_flight: Positive | None = None  # nor above
    lease_seconds: Seconds = 60.0  # a worker that dies loses its samples after this
    drain_seconds: Annotated[float, Field(ge=0)] = 30.0  # how long TERM waits for answers in flight
    commit_seconds: Annotated[float, Field(ge=0)] = 0.02  # answers of this span share one fsync
    segment_bytes: Positive = 256 * 1024 * 1024  # a segment that reaches this is followed by the next

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> Self:
        if self.most_in_flight is not None and self.most_in_flight < self.least_in_flight:
            raise ValueError(f"least_in_flight {self.least_in_flight} is above most_in_flight {self.most_in_flight}")
        return self


class ControlSettings(Section):
    """The control process."""

    feeders: Positive = 1  # processes that read, render and tokenize
    window: Positive | None = None  # samples waiting in Redis per dataset; by default it follows the rate
    metrics: str = "127.0.0.1:9464"  # where `control` and `run` serve Prometheus's /metrics, as HOST:PORT; "": nowhere
    landing: Literal["precise", "fast"] = "precise"  # on the caps; fast stops up to 0.5 % short, and waits less for it

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
    allowed_failures: Annotated[float, Field(ge=0, le=1)] = 0.01  # share of rejected samples that still exits 0


class ColumnSettings(Section):
    """The columns of a dataset that have names of its own, by what they hold."""

    messages: str | None = None
    prompt: str | None = None
    input_ids: str | None = None
    tools: str | None = None
    system: str | None = None

    @property
    def asks(self) -> set[str]:
        """Which of those that can be a prompt are named; with any, no other column is looked at."""
        return {name for name in ("messages", "prompt", "input_ids") if getattr(self, name) is not None}


class DatasetSettings(Section):
    """One source and its budget."""

    name: str
    path: Path | str  # a file, a folder or a pattern of files; a URL as in s3://bucket/rows.jsonl; "-": standard input
    max_row_bytes: Positive = 64 * 1024 * 1024  # a longer row is rejected
    format: Format = "auto"  # the layout of its rows; by default each row is read by its own shape
    columns: ColumnSettings = ColumnSettings()  # where the rows have columns of other names
    # up to which user or tool turn a conversation is the prompt; all: every answer in it is made anew, in order
    turns: Literal["last", "first", "all"] = "last"
    system: str | None = None  # the system prompt of the rows that have none
    chat_template_kwargs: dict[str, Any] = {}  # over those of [tokenizer]
    max_new_tokens: Positive | None = None  # in place of that of [sampling]
    sampling: SamplingSettings = SamplingSettings()  # what is set here holds in place of [sampling]
    drop_media: bool = False  # leave images, audio and video out, where text remains; else such rows are rejected
    meta: list[str] | None = None  # columns carried through into the records; by default ids and labels
    shuffle: Seed | None = None  # the seed of the order in which its rows are fed; by default that of the source
    limit: Positive | None = None  # rows that are fed, rejected ones included; none: all
    # rows whose prompt was fed before are rejected; all: also those that another dataset with dedupe has fed
    dedupe: Literal["dataset", "all"] | None = None
    cap_tokens: Positive | None = None  # none: the whole source is answered
    count: Literal["completion", "total"] = "completion"
    weight: Annotated[float, Field(gt=0)] = 1.0  # its share of the slots
    gates: GatesSettings = GatesSettings()  # what is set here holds in place of [gates]
    mean_tokens: Positive | None = None  # what an answer may take, until it is known; by default half of max_new_tokens

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
