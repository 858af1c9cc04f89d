"""The values of an Arrow batch as Python has them; what Python has no value for costs no other row.

A time in nanoseconds, a date beyond the year 9999, a time zone that this machine does not know: Arrow raises for the
whole batch, mostly because of a column that is no part of a prompt. And a text of a Parquet file need not be UTF-8.

A struct has the same fields in every row: where rows call different tools, each has null for the arguments of all
others, and what a model would read is `{"city": "Rome", "path": null}`. So nulls within calls and schemas are left out.
"""

import re
from typing import Any, NamedTuple, Self

import pyarrow as pa

from producer.datasets.cursor import BadLine

# What pyarrow raises where it makes Python's values of its own; KeyError is a time zone, or a map with a key twice.
_UNREADABLE = (ValueError, OverflowError, KeyError, pa.ArrowException)
_MAPS = "strict"  # as dicts, where no key is there twice
_OF_TOOLS = frozenset({"tools", "functions", "function"})
_OF_CALLS = re.compile(r"\b(arguments|parameters|properties|input|input_schema|content): struct<")


class Form(NamedTuple):
    """What is to be known of the columns of a file: how maps are read, and the names of those that hold tools or calls.

    To say how takes 15 times as long, whether there is a map or not.
    """

    maps: str | None
    of_tools: tuple[str, ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> Self:
        """By the types of the columns."""
        types = {field.name: str(field.type) for field in schema}
        of_tools = (name for name, type_ in types.items() if name in _OF_TOOLS or _OF_CALLS.search(type_))
        return cls(_MAPS if any("map<" in one for one in types.values()) else None, tuple(of_tools))


def rows_of_batch(batch: pa.RecordBatch, form: Form) -> list[dict[str, Any] | BadLine]:
    """A dict by column for each row, maps as dicts; BadLine for one with a text that is not UTF-8."""
    try:
        rows: list[dict[str, Any] | BadLine] = batch.to_pylist(maps_as_pydicts=form.maps)
    except _UNREADABLE:
        columns = [_column(name, column, form) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
        rows = [_row(batch.schema.names, cells) for cells in zip(*columns, strict=True)]
    for row in rows if form.of_tools else ():
        if isinstance(row, dict):
            row.update((name, _without_nulls(row[name])) for name in form.of_tools)
    return rows


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _row(names: list[str], cells: tuple[Any, ...]) -> dict[str, Any] | BadLine:
    bad = next((cell for cell in cells if isinstance(cell, BadLine)), None)
    return dict(zip(names, cells, strict=True)) if bad is None else bad


def _column(name: str, column: pa.Array, form: Form) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts=form.maps)
    except _UNREADABLE:
        values = []
        for scalar in column:
            try:
                values.append(_value(scalar))
            except UnicodeDecodeError:
                values.append(BadLine("bad_text", f"a text in the column {name!r} is not UTF-8"))
    return values


def _value(scalar: Any) -> Any:
    """A cell: of a time that Python has not its number, of a map with a key twice pairs. Raises UnicodeDecodeError."""
    try:
        return scalar.as_py(maps_as_pydicts=_MAPS)
    except UnicodeDecodeError:
        raise
    except _UNREADABLE:
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(one) for name, one in scalar.items()}
        if isinstance(scalar, pa.ListScalar) and not isinstance(scalar, pa.MapScalar):
            return [_value(one) for one in scalar.values]
        held = scalar.as_py() if isinstance(scalar, pa.MapScalar) else getattr(scalar, "value", None)
        return _value(held) if isinstance(held, pa.Scalar) else held
