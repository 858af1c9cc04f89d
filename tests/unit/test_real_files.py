"""The real files that lie beside the project: each is told apart as what it is, and read on from any row."""

import json
from pathlib import Path

import pytest

from producer.datasets.containers import Cursor, read_rows
from producer.datasets.kinds import kind_of
from tests.conftest import SHARED

PROMPTS = SHARED / "data" / "prompts"
pytestmark = pytest.mark.skipif(not PROMPTS.is_dir(), reason="real prompts lie beside the project, and are not there")

# Everything else is JSON lines, those of bfcl_v4_live_multiple.json too.
KINDS = {
    "broken/blns.json": ("array", 515),
    "broken/made_malformed.labels.json": ("array", 27),
    "glaive/llamafactory_glaive_toolcall_en.json": ("array", 150),
    "humaneval/HumanEval.jsonl.gz": ("jsonl.gz", 164),
    "openai_tools/functionary_test_case.json": ("documents", 1),
    "openai_tools/taubench_gpt4o_airline.json": ("array", 16),
    "reasoning/curator_reasoning_dataset.parquet": ("parquet", 5),
    "sharegpt/axolotl_conversation.missingturns.json": ("documents", 1),
    "sharegpt/fastchat_dummy_conversation.json": ("array", 200),
    "swe_agent/miniswe_github_issue.traj.json": ("documents", 1),
    "swe_agent/sweagent_0_function_calling_simple.traj": ("documents", 1),
    "swe_agent/sweagent_1_marshmallow-code__marshmallow-1867.traj": ("documents", 1),
    "ultrachat/ultra_eval.json": ("array", 200),
}
FILES = sorted(str(path.relative_to(PROMPTS)) for path in PROMPTS.glob("*/*")) if PROMPTS.is_dir() else []


def whole(path: Path) -> int:
    """The rows of a JSON file, as the library that reads it whole has them."""
    text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError:
        return sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
    return 1 if isinstance(found, dict) or (found and "role" in found[0]) else len(found)


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_is_read_as_what_it_is(name: str) -> None:
    path = PROMPTS / name
    rows = list(read_rows(path, Cursor()))
    if name in KINDS:
        assert (str(kind_of(str(path))), len(rows)) == KINDS[name]
    else:
        assert str(kind_of(str(path))) == "jsonl"
    if path.suffix not in {".gz", ".parquet"} and not name.endswith("made_malformed.jsonl"):
        assert len(rows) == whole(path)
        assert all(isinstance(row.value, bytes) and json.loads(row.value) is not Ellipsis for row in rows)
    for row in rows[:: max(1, len(rows) // 20)]:
        assert list(read_rows(path, row.after)) == rows[row.index + 1 :]
