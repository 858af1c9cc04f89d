#!/usr/bin/env python3
"""Writes docs/configuration.md from common/settings.py, common/sections.py and common/gate_settings.py.

    python docs/make_configuration.py

A key's sentence is the docstring under it. A test says when this must be run again.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from common.flags import FLAGS
from common.gate_settings import SHARES, ChangeSettings, GateSettings, GatesSettings
from common.sections import (
    ColumnSettings,
    ControlSettings,
    DatasetSettings,
    RunSettings,
    SamplingSettings,
    ServerSettings,
    TokenizerSettings,
    WorkerSettings,
)
from common.settings import ENV_PREFIX, KEYS_NOT_IN_THE_FILE, RESERVED_ENV, Settings

FILE = Path(__file__).with_name("configuration.md")
_HEAD = """\
# Configuration

<!-- Made by docs/make_configuration.py from common/settings.py, sections.py and gate_settings.py; change these. -->

One file in [TOML](https://toml.io): `tokenmill.toml` in the current folder, or what `-c` or `TOKENMILL_CONFIG` names.
Only `[tokenizer] path` must be there, and of each dataset `name` and `path`. Relative paths are relative to the file.
A key that is not known is an error that names the nearest one. Times are in seconds.

```toml
output = "out"
redis = "embedded"

[server]
urls = ["http://gpu1:30000", "http://gpu2:30000"]
api_key_file = "keys/server"

[tokenizer]
path = "/models/kimi-k2.5"
chat_template_kwargs = { thinking = true }

[sampling]
max_new_tokens = 10240
temperature = 1.0
top_p = 0.95

[worker]
concurrency = 512

[control]
feeders = 2

[run]
workers = 1
allowed_failures = 0.01

[gates.truncated]
action = "pause"

[[datasets]]
name = "chat"
path = "data/chat/*.parquet"
columns = { messages = "conversation" }
cap_tokens = "10M"

[[datasets]]
name = "tools"
path = "data/tools.jsonl"
turns = "all"
shuffle = 1
limit = 50_000
cap_tokens = 2_500_000
count = "total"
max_new_tokens = 4096
chat_template_kwargs = { thinking = false }
[datasets.sampling]
temperature = 0.6
[datasets.gates.repetition]
share = 0.3
```
"""
_SECTIONS: Mapping[str, tuple[type[BaseModel], str]] = {
    "At the top": (Settings, "Before the first section."),
    "[server]": (ServerSettings, ""),
    "[tokenizer]": (TokenizerSettings, ""),
    "[sampling]": (SamplingSettings, ""),
    "[worker]": (WorkerSettings, ""),
    "[control]": (ControlSettings, ""),
    "[run]": (RunSettings, ""),
    "[[datasets]]": (DatasetSettings, "Once for each; [datasets.md](datasets.md) says more."),
    "[datasets.columns]": (ColumnSettings, ""),
    "[gates]": (GatesSettings, "Also as `[datasets.gates]`, for one dataset; [quality.md](quality.md) says more."),
    "[gates.change]": (ChangeSettings, ""),
    "[gates.FLAG]": (GateSettings, "FLAG is one of those in the next table; also as `[datasets.gates.FLAG]`."),
}
_TYPES = {
    "boolean": "`true`, `false`",
    "object": "table",
    "string": "text",
    "integer": "whole number",
    "number": "number",
}
_TABLE = "| key | type | default | means |\n| --- | --- | --- | --- |\n"
_ENVIRONMENT = f"""\
## The environment

Each key can be set in the environment as well, which wins over the file: `{ENV_PREFIX}OUTPUT`, and with its section
`{ENV_PREFIX}SAMPLING__MAX_NEW_TOKENS=4096`. Lists and tables are JSON: `{ENV_PREFIX}SERVER__URLS='["http://gpu1:30000"]'`,
and `{ENV_PREFIX}DATASETS` is the list of all datasets. A variable `{ENV_PREFIX}...` that is none of these is an error.

| variable | means |
| --- | --- |
"""


def page() -> str:
    """The whole page, with a table for each section."""
    parts = [_HEAD]
    for title, (model, more) in _SECTIONS.items():
        about = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        words = more if model is Settings else f"{about} {more}".strip()
        heading = title if model is Settings else f"`{title}`"
        rows = "\n".join(_rows(model))
        parts.append(
            f"## {heading}\n\n{words}\n\n| key | type | default | means |\n| --- | --- | --- | --- |\n{rows}\n"
        )
    shares = "\n".join(f"| `{flag}` | {SHARES[flag]:g} |" for flag in SHARES if flag in FLAGS)
    parts.append(f"| FLAG | `share`, if not set |\n| --- | ---: |\n{shares}\n")
    reserved = "\n".join(f"| `{name}` | {means} |" for name, means in RESERVED_ENV.items())
    return "\n".join([*parts, f"{_ENVIRONMENT}{reserved}\n"])


def _rows(model: type[BaseModel]) -> Iterator[str]:
    schema, said = model.model_json_schema(), docstrings(model)
    for name, field in schema["properties"].items():
        if name in SHARES or name == "change" or (model is Settings and name not in said):
            continue  # tables of their own
        shown = name
        if model is ServerSettings and name in KEYS_NOT_IN_THE_FILE:
            shown = f"{ENV_PREFIX}SERVER__{name.upper()}"
        default = "needed" if name in schema.get("required", ()) else _value(field.get("default"))
        yield f"| `{shown}` | {_type(field)} | {'' if '$ref' in field else default} | {said[name]} |"


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The sentence under each key of a section."""
    (section,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(section, ast.ClassDef)
    found = {}
    for key, below in zip(section.body, section.body[1:], strict=False):
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(below, ast.Expr):
            found[key.target.id] = inspect.cleandoc(ast.literal_eval(below.value)).replace("\n", " ")
    return found


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"] if one.get("type") != "null"))
    if "enum" in field:
        return ", ".join(f'`"{one}"`' for one in field["enum"])
    kind = field.get("type", "object")
    if kind == "array":
        return f"list of {_type(field['items'])}s"
    if field.get("format") == "path":
        return "path"
    return _TYPES[kind] + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f", {low:g} to {high:g}"
    above = field.get("exclusiveMinimum")
    least = f", {low:g} or more" if low is not None else f", above {above:g}" if above is not None else ""
    return f"{least} and up to {high:g}" if high is not None else least


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"`{value:_}`" if value > 99_999 else f"`{value}`"
    return f"`{msgspec.json.encode(value).decode()}`"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        fresh = FILE.read_text(encoding="utf-8") == page()
        sys.exit(0 if fresh else "docs/configuration.md is stale: python docs/make_configuration.py")
    FILE.write_text(page(), encoding="utf-8")
