"""The configuration: one TOML file, every key also as TOKENMILL_… in the environment.

Relative paths are relative to the file. An unknown key is an error that names the nearest known one.
"""

import difflib
import hashlib
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from common.errors import ConfigError
from common.gate_settings import GatesSettings
from common.options import config_path
from common.sections import (
    ControlSettings,
    DatasetSettings,
    RunSettings,
    SamplingSettings,
    ServerSettings,
    TokenizerSettings,
    WorkerSettings,
)

ENV_PREFIX = "TOKENMILL_"
# Read by other parts than this one; every other TOKENMILL_… variable must be a key of the configuration.
RESERVED_ENV = MappingProxyType(
    {
        "TOKENMILL_CONFIG": "the configuration file, where `-c` names none",
        "TOKENMILL_DEBUG": "`1`: a fault shows its traceback, as with `--debug`",
        "TOKENMILL_LOG_FORMAT": "`text` or `json`, whatever standard error is",
        "TOKENMILL_FLOWER_BASIC_AUTH": "USER:PASSWORD that `tokenmill flower` asks for",
        "TOKENMILL_PARENT": "set by `run`, `control` and `audit` for the processes that they start",
        "TOKENMILL_CONTRACT_URL": "the server that the contract tests are to ask",
    }
)
# The longest path that a Unix socket may have (sun_path is 108 bytes on Linux, 104 on macOS, with its NUL).
MAX_SOCKET_PATH = 100
# Keys that were there before, and where what they said is said now.
_MOVED = {"prompt_column": "columns.prompt"}
# An API key is never in the configuration, which is shown around; where a file that holds it is named instead.
KEYS_NOT_IN_THE_FILE = {"api_key": "[server] api_key_file", "api_keys": "[server.api_key_files]"}


class Settings(BaseSettings):
    """The whole configuration; frozen, made once in a command's main function and passed on."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__", case_sensitive=False
    )

    output: Path = Path("out")
    """The folder of records, logs and books."""
    redis: str = "embedded"
    """`"embedded"`: tokenmill starts its own; else a redis://, rediss:// or unix:// address."""
    server: ServerSettings = ServerSettings()
    tokenizer: TokenizerSettings
    sampling: SamplingSettings = SamplingSettings()
    worker: WorkerSettings = WorkerSettings()
    control: ControlSettings = ControlSettings()
    run: RunSettings = RunSettings()
    gates: GatesSettings = GatesSettings()
    datasets: list[DatasetSettings] = []

    @field_validator("redis")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if url != "embedded" and not re.match(r"(redis|rediss|unix)://.", url):
            raise ValueError('must be "embedded" or a redis://, rediss:// or unix:// address')
        try:
            urlsplit(url).port  # noqa: B018
        except ValueError:  # its own message would show a piece of the password
            raise ValueError("has no valid port; write / # @ : in a password as %2F %23 %40 %3A") from None
        return url

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        # Two names that differ in case alone would share one folder on some file systems.
        seen: dict[str, int] = {}
        for i, dataset in enumerate(self.datasets):
            first = seen.setdefault(dataset.name.lower(), i)
            if first != i:
                raise ValueError(
                    f"datasets[{first}] and datasets[{i}] have one name, {dataset.name!r} "
                    "(capitals do not count); give each its own"
                )
        return self

    def sampling_of(self, dataset: DatasetSettings) -> SamplingSettings:
        """[sampling] with what `dataset` has of its own; it need not be one of this configuration."""
        own = {name: getattr(dataset.sampling, name) for name in dataset.sampling.model_fields_set}
        if dataset.max_new_tokens is not None:
            own["max_new_tokens"] = dataset.max_new_tokens
        return self.sampling.model_copy(update=own)

    def gates_of(self, dataset: DatasetSettings) -> GatesSettings:
        """[gates] with what `dataset` has of its own."""
        return dataset.gates.over(self.gates)

    def template_kwargs_of(self, dataset: DatasetSettings) -> dict[str, Any]:
        """chat_template_kwargs of [tokenizer] with what `dataset` has of its own."""
        return {**self.tokenizer.chat_template_kwargs, **dataset.chat_template_kwargs}

    @property
    def embedded(self) -> bool:
        """Whether tokenmill starts its own Redis (Valkey) for this output folder."""
        return self.redis == "embedded"

    @property
    def redis_dir(self) -> Path:
        """Where the embedded server keeps its append-only file."""
        return self.output / ".redis"

    @property
    def redis_socket(self) -> Path:
        """The embedded server's socket; in the temporary folder where the output's own path is too long for one."""
        path = self.redis_dir / "valkey.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}-{digest}.sock"

    @property
    def redis_url(self) -> str:
        """The address as redis-py takes it."""
        return f"unix://{self.redis_socket}" if self.embedded else self.redis

    @property
    def api_key(self) -> str | None:
        """The API key of servers that have none of their own, from the environment, else from [server] api_key_file."""
        if self.server.api_key:
            return _one_line(self.server.api_key.get_secret_value(), "TOKENMILL_SERVER__API_KEY")
        return _key_in(self.server.api_key_file, "[server] api_key_file") if self.server.api_key_file else None

    def api_key_of(self, url: str) -> str | None:
        """The API key for one server: its own, else the general one; raises ConfigError if its file holds none."""
        url = url.rstrip("/")
        if url in self.server.api_keys:  # "" there: this one gets none
            return _one_line(self.server.api_keys[url].get_secret_value(), "TOKENMILL_SERVER__API_KEYS") or None
        if url in self.server.api_key_files:
            return _key_in(self.server.api_key_files[url], f'[server.api_key_files] "{url}"')
        return self.api_key

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file."""
        return env_settings, init_settings


def load_settings(given: Path | None = None) -> Settings:
    """Read and check the configuration; raises ConfigError with every fault on a line of its own."""
    path = config_path(given)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; write it (docs/configuration.md has the keys) or name another with -c FILE"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    server = table.get("server")
    for name, instead in KEYS_NOT_IN_THE_FILE.items():
        if isinstance(server, dict) and name in server:
            raise ConfigError(
                f"{path}: [server] {name} does not belong in a configuration file; "
                f"put it into TOKENMILL_SERVER__{name.upper()}, or into a file named by {instead}"
            )
    _refuse_unknown_environment()
    try:
        settings = Settings(**table)
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(path, error))) from None
    except SettingsError as error:
        field = str(error).partition('"')[2].partition('"')[0]
        raise ConfigError(
            f"the environment variables of {ENV_PREFIX}{field.upper()} cannot be read; write lists and tables as JSON, "
            f"as in {ENV_PREFIX}SERVER__URLS='[\"http://127.0.0.1:30000\"]'"
        ) from None
    try:
        return _absolute(settings, path.parent)
    except RuntimeError as error:
        raise ConfigError(f"{path}: a path starts with ~ and has no home directory behind it: {error}") from error


def _key_in(path: Path, named_by: str) -> str:
    try:
        key = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{named_by} {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{named_by} {path} is not text; write the key alone into it") from None
    if not key.strip():
        raise ConfigError(f"{named_by} {path} is empty; write the key into it")
    return _one_line(key, f"{named_by} {path}")


def _one_line(key: str, source: str) -> str:
    """What a header can carry; a key of several lines would break every request."""
    key = key.strip()
    if not key.isprintable():
        raise ConfigError(
            f"{source} holds more than one line, or characters that no key has; let it hold the key alone"
        )
    return key


def _absolute(settings: Settings, folder: Path) -> Settings:
    """Paths made absolute against the configuration file's folder."""
    server = settings.server
    key_files = {url: folder / file.expanduser() for url, file in server.api_key_files.items()}
    server = server.model_copy(update={"api_key_files": key_files})
    if server.api_key_file is not None:
        server = server.model_copy(update={"api_key_file": folder / server.api_key_file.expanduser()})
    tokenizer = settings.tokenizer.model_copy(update={"path": folder / settings.tokenizer.path.expanduser()})
    datasets = [d.beside(folder) for d in settings.datasets]
    output = Path(os.path.normpath(folder / settings.output.expanduser()))
    return settings.model_copy(
        update={"output": output, "server": server, "tokenizer": tokenizer, "datasets": datasets}
    )


def _refuse_unknown_environment() -> None:
    known = {name.upper() for name in Settings.model_fields}
    nested = {
        f"{name}__{key}".upper()
        for name, field in Settings.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    for name in os.environ:
        key = name.removeprefix(ENV_PREFIX)
        if name != key and name not in RESERVED_ENV and key.split("__")[0] not in known:
            near = nearest(key, known | nested, prefix=ENV_PREFIX)
            raise ConfigError(f"the environment variable {name} is not a key of the configuration{near}")


def _faults(path: Path, error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        place, source = _place(fault["loc"]), _source(path, fault["loc"])
        if fault["type"] == "extra_forbidden":
            key, known = str(fault["loc"][-1]), _siblings(fault["loc"])
            near = f"; use {_MOVED[key]}" if key in _MOVED else nearest(key, known)
            yield f"{source}: unknown key {place}{near}"
        elif fault["type"] == "missing":
            yield f"{source}: {place} is missing"
        else:
            message = fault["msg"].removeprefix("Value error, ").partition(" or instance of")[0]
            message = message.replace("dictionary", "table")
            yield f"{source}: {place}: {message}" if place else f"{source}: {message}"


def _source(path: Path, loc: tuple[int | str, ...]) -> str:
    """Where a value came from: the environment wins over the file."""
    for end in range(len(loc), 0, -1):
        name = ENV_PREFIX + "__".join(str(part) for part in loc[:end]).upper()
        if name in os.environ:
            return f"the environment variable {name}"
    return str(path)


def _place(loc: tuple[int | str, ...]) -> str:
    """`("datasets", 1, "cap_tokens")` as `datasets[1].cap_tokens`, counted from 0 as TOML tools do."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _siblings(loc: tuple[int | str, ...]) -> set[str]:
    """The keys known at the place where an unknown one was found."""
    model: Any = Settings
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        if field is None:
            return set()
        model = DatasetSettings if part == "datasets" else field.annotation
    return set(getattr(model, "model_fields", {}))


def nearest(word: str, known: set[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.4)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(sorted(known))}" if known else ""
