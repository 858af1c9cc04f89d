"""Cells of Parquet and Arrow files that Python has no value for cost their own row at most."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.sections import DatasetSettings
from producer.datasets.containers import BadLine, Cursor, read_rows
from producer.datasets.rows import convert

PROMPTS = ["a", "b", "c"]
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"x\xffz")]
)


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def arrow(path: Path, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
        stream.write_table(table)
    return path.with_suffix(".arrow")


@pytest.mark.parametrize("write", [parquet, arrow])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1_700_000_000_123_456_789, 0, None], pa.timestamp("ns")),
        pa.array([2**62, 0, None], pa.timestamp("us")),
        pa.array([1, 0, None], pa.timestamp("us", tz="Nowhere/Else")),
        pa.array([1, 0, None], pa.time64("ns")),
        pa.array([1, 0, None], pa.duration("ns")),
        pa.array([2**31 - 1, 0, None], pa.date32()),
    ],
    ids=lambda column: str(column.type),
)
def test_a_time_that_python_has_not_is_its_number(tmp_path: Path, write: Any, column: pa.Array) -> None:
    rows = list(read_rows(write(tmp_path / "rows", {"prompt": PROMPTS, "at": column}), Cursor()))
    assert [row.value["prompt"] for row in rows if isinstance(row.value, dict)] == PROMPTS
    storage = pa.int32() if column.type == pa.date32() else pa.int64()
    values = [row.value["at"] for row in rows if isinstance(row.value, dict)]
    assert values[0] == column.cast(storage)[0].as_py()
    assert values[2] is None


def test_a_time_within_a_turn_costs_no_conversation(tmp_path: Path) -> None:
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("ns", tz="UTC")})
    column = pa.array([[{"role": "user", "content": one, "at": 1}] for one in PROMPTS], pa.list_(turn))
    rows = list(read_rows(parquet(tmp_path / "rows", {"conversation": column}), Cursor()))
    asked = [convert(row.value, DatasetSettings(name="A", path="a")).messages for row in rows]
    assert asked == [[{"role": "user", "content": one}] for one in PROMPTS]


@pytest.mark.parametrize("write", [parquet, arrow])
def test_a_text_that_is_not_utf8_costs_its_own_row_alone(tmp_path: Path, write: Any) -> None:
    rows = list(read_rows(write(tmp_path / "rows", {"prompt": NOT_UTF8}), Cursor()))
    bad = BadLine("bad_text", "a text in the column 'prompt' is not UTF-8")
    assert [row.value for row in rows] == [{"prompt": "x"}, bad, {"prompt": "z"}]
    assert [row.after for row in rows] == [Cursor(1, 0, 1), Cursor(2, 0, 2), Cursor(3, 0, 3)]


def test_turns_that_are_maps_are_read(tmp_path: Path) -> None:
    column = pa.array(
        [[[("role", "user"), ("content", one)]] for one in PROMPTS], pa.list_(pa.map_(pa.string(), pa.string()))
    )
    twice = pa.array([[("k", "v"), ("k", "w")]] * 3, pa.map_(pa.string(), pa.string()))
    path = parquet(tmp_path / "rows", {"messages": column, "twice": twice})
    rows = [row.value for row in read_rows(path, Cursor())]
    assert rows == [
        {"messages": [{"role": "user", "content": one}], "twice": [("k", "v"), ("k", "w")]} for one in PROMPTS
    ]


@pytest.mark.parametrize("write", [parquet, arrow])
def test_what_arrow_fills_in_for_other_tools_is_left_out(tmp_path: Path, write: Any) -> None:
    functions = [
        {"name": "f", "arguments": {"city": "Rome"}, "properties": {"city": {"type": "string", "default": "Rome"}}},
        {
            "name": "g",
            "arguments": {"path": "a", "city": ""},
            "properties": {"city": {"type": "string", "enum": ["a"]}},
        },
    ]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": call}]},
                {"role": "tool", "content": "r", "tool_call_id": "c"},
            ],
            "tools": [{"name": call["name"], "parameters": {"type": "object", "properties": one["properties"]}}],
        }
        for one in functions
        for call in [{"name": one["name"], "arguments": one["arguments"]}]
    ]
    table = pa.Table.from_pylist(rows)
    path = write(tmp_path / "rows", dict(zip(table.column_names, table.columns, strict=True)))
    prompts = [convert(row.value, DatasetSettings(name="A", path="a")) for row in read_rows(path, Cursor())]
    calls = [prompt.messages[1]["tool_calls"][0]["function"] for prompt in prompts]
    assert [call["arguments"] for call in calls] == [{"city": "Rome"}, {"path": "a", "city": ""}]
    tools = [(prompt.tools or [{}])[0]["function"]["parameters"]["properties"] for prompt in prompts]
    assert tools == [one["properties"] for one in functions]
