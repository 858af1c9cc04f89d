"""The tools of a row as OpenAI's: functions with a JSON schema each. What is known to be broken is repaired."""

import json
import marshal
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from producer.datasets.reasons import NOT_JSON, BadRow, quoted

# What BFCL, ToolACE, xLAM and others write for the types of JSON schema.
_TYPES = {
    **{name: name for name in ("object", "array", "string", "number", "integer", "boolean", "null")},
    **dict.fromkeys(("dict", "dictionary", "hashmap", "map"), "object"),
    **dict.fromkeys(("list", "tuple", "set", "arraylist"), "array"),
    **dict.fromkeys(("str", "char", "text"), "string"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("int", "long"), "integer"),
    "bool": "boolean",
    "none": "null",
}
_WRITTEN_TYPE = re.compile(r"([a-z]+)(?:\[([a-z]+)\])?(, ?optional)?")  # str, optional; List[str]
_PLAIN = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_ANY = frozenset({"any"})  # no type at all, in JSON schema
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_OBJECT = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,]*")
_VALUES = ("default", "const")
_DEPTH = 40  # schemas of schemas; a deeper one is an attack on the stack

Tool = dict[str, Any]
# The rows of a dataset have often the same tools, or one of a few sets of them. To read a set takes 100 us.
_KEPT, _KEPT_BYTES = 64, 100_000
_kept: dict[bytes, list[Tool] | None] = {}


def read_tools(value: Any) -> list[Tool] | None:
    """The tools, or None if there are none; a text is read as JSON, a list of texts too. Raises BadRow.

    They are not to be changed: rows that have the same tools are given the same.
    """
    if not value:
        return None
    try:
        given = marshal.dumps(value, 2)
    except ValueError:  # what is no JSON is not kept
        return _read(value)
    if given not in _kept:
        read = _read(value)
        if len(given) > _KEPT_BYTES:
            return read
        if len(_kept) >= _KEPT:
            _kept.clear()
        _kept[given] = read
    return _kept[given]


def _read(value: Any) -> list[Tool] | None:
    if isinstance(value, str):
        value = _decoded(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise BadRow("bad_tools")
    return [_tool(number, one) for number, one in enumerate(value)]


def objects_within(text: str) -> tuple[str, list[Tool]]:
    """The tools that stand in `text` one after the other, as in glaive's system prompt, and the text around them.

    Raises BadRow if what begins like an object is none.
    """
    start = end = text.find("{")
    tools: list[Tool] = []
    while 0 <= end < len(text) and text[end] == "{":
        try:
            value, end = _OBJECT.raw_decode(text, end)
        except (ValueError, RecursionError):
            raise BadRow("bad_tools", f"tool {len(tools)} in the system prompt is not JSON") from None
        tools.append(_tool(len(tools), value))
        found = _BETWEEN.match(text, end)
        end = found.end() if found else end
    return (text, []) if start < 0 else (f"{text[:start].rstrip()} {text[end:].lstrip()}".strip(), tools)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text.strip() else None
    except NOT_JSON:
        raise BadRow("bad_tools", "tools is a text that is not JSON") from None


def _tool(number: int, value: Any) -> Tool:
    if isinstance(value, str):
        value = _decoded(value)
    if not isinstance(value, dict):
        raise BadRow("bad_tools", f"tool {number} is not an object")
    function = value.get("function", value if "name" in value else None)
    if not isinstance(function, dict):
        raise BadRow("bad_tools", f"tool {number} (type {quoted(value.get('type'))}) is no function")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadRow("bad_tools", f"tool {number} has no name")
    own = {key: part for key, part in function.items() if part is not None and key not in {"type", "input_schema"}}
    given = function.get("parameters") or function.get("input_schema")
    parameters = _parameters(f"tool {number} ({name[:60]})", given)
    required = own.pop("required", None)  # outside the schema it reaches no model
    if isinstance(required, list) and "required" not in parameters:
        parameters["required"] = required
    return {"type": "function", "function": {**own, "parameters": parameters}}


def _parameters(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _decoded(value)
    if not value:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise BadRow("bad_tools", f"the parameters of {where} are not an object")
    if "properties" not in value and not isinstance(value.get("type"), str) and _all_schemas(value):
        # xLAM gives the properties alone, and says `str, optional` for those that may be left out.
        needed = [name for name, one in value.items() if "optional" not in str(one.get("type"))[:80]]
        has_default = {name for name, one in value.items() if "default" in one}
        required = [name for name in needed if name not in has_default]
        value = {"type": "object", "properties": value, **({"required": required} if required else {})}
    schema = _schema(where, value, 0)
    if schema.setdefault("type", "object") != "object":
        raise BadRow("bad_tools", f"the parameters of {where} are of type {quoted(schema['type'])}, not object")
    return schema


def _all_schemas(value: Mapping[str, Any]) -> bool:
    return not any(name.startswith("$") for name in value) and all(
        isinstance(one, dict) and ("type" in one or "description" in one) for one in value.values()
    )


def _schema(where: str, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The schema with its types as JSON schema spells them."""
    if depth > _DEPTH:
        raise BadRow("bad_tools", f"the schema of {where} is nested more than {_DEPTH} deep")
    # What is null is what Arrow filled in for the schema of another tool.
    made = {key: one for key, one in schema.items() if one is not None or key in _VALUES}
    if "type" in made:
        _set_type(where, made)
    for key in _MAPS:
        if key in made:
            made[key] = {name: _inner(where, one, depth) for name, one in _mapping(where, key, made[key]).items()}
    for key in _LISTS:
        if isinstance(made.get(key), list):
            made[key] = [_inner(where, one, depth) for one in made[key]]
    for key in _SCHEMAS:
        if isinstance(made.get(key), dict):
            made[key] = _inner(where, made[key], depth)
    return made


def _mapping(where: str, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRow("bad_tools", f"{key} in the schema of {where} is not an object")
    return {name: one for name, one in value.items() if one is not None}


def _inner(where: str, value: Any, depth: int) -> Any:
    if isinstance(value, bool):
        return value  # true and false are schemas
    if not isinstance(value, dict):
        raise BadRow("bad_tools", f"a part of the schema of {where} is {quoted(value)}, not an object")
    return _schema(where, value, depth + 1)


def _set_type(where: str, schema: dict[str, Any]) -> None:
    given = schema["type"]
    if isinstance(given, str) and given in _PLAIN:
        return
    if isinstance(given, list) and given:
        schema["type"] = [_one_type(where, one)[0] for one in given]
    elif given is None or (isinstance(given, str) and given.strip().lower() in _ANY):
        del schema["type"]
    else:
        schema["type"], item = _one_type(where, given)
        if item and "items" not in schema:
            schema["items"] = {"type": item}


def _one_type(where: str, given: Any) -> tuple[str, str]:
    """The type, and that of its items where it is written as List[str]."""
    match = _WRITTEN_TYPE.fullmatch(given.strip().lower()) if isinstance(given, str) and len(given) < 80 else None
    name = _TYPES.get(match[1]) if match else None
    if match is None or name is None:
        raise BadRow("bad_tools", f"the schema of {where} has the type {quoted(given)}, which is not known")
    return name, _TYPES.get(match[2] or "", "") if name == "array" else ""
