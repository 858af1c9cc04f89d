"""Every real file that lies beside the project: its rows, those converted, and the rejects by reason."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.sections import DatasetSettings
from producer.datasets.containers import Cursor, read_rows
from producer.datasets.layouts.catalog import detect
from producer.datasets.rows import BadRow, Prompt, convert
from tests.conftest import REPO, SHARED

PROMPTS = SHARED / "data" / "prompts"
# file: rows, layout, rejects; all other rows are converted.
TABLE: list[tuple[str, int, str, dict[str, int]]] = [
    ("broken/blns.json", 515, "none", {"not_json": 515}),
    ("broken/made_malformed.jsonl", 25, "messages", {"not_json": 15}),
    ("broken/made_odd_shapes.jsonl", 44, "messages", {"bad_messages": 11, "no_user_turn": 2, "not_text": 2}),
    ("eagle_family/eagle_mt_bench_question.jsonl", 80, "turns", {}),
    ("eagle_family/modelopt_synthetic_conversations.jsonl", 200, "messages", {}),
    ("eagle_family/specbench_question.jsonl", 480, "turns", {}),
    ("eagle_family/torchspec_sample_conversations.jsonl", 200, "conversations", {}),
    ("eagle_family/torchspec_sample_kimi_k25_conversations.jsonl", 8, "conversations", {"not_text": 3}),
    ("glaive/dataflow_glaive_raw.jsonl", 5, "glaive", {}),
    ("glaive/llamafactory_glaive_toolcall_en.json", 150, "conversations", {}),
    ("gsm8k/gsm8k_test.jsonl", 250, "question", {}),
    ("humaneval/HumanEval.jsonl.gz", 164, "prompt", {}),
    ("magicoder/code_feedback_1row.jsonl", 1, "messages", {}),
    ("magicoder/magicoder_evol_instruct_1row.jsonl", 1, "magicoder", {}),
    ("magicoder/magicoder_oss_instruct_1row.jsonl", 1, "magicoder", {}),
    ("odd_shapes/llamafactory_v1_multimodal_demo.jsonl", 24, "messages", {"not_text": 24}),
    ("odd_shapes/openinstruct_tulu1_eval.jsonl", 60, "prompt", {}),
    ("odd_shapes/xtuner_openai_sft.jsonl", 128, "message_list", {}),
    ("openai_tools/bfcl_v4_live_multiple.json", 60, "bfcl", {}),
    ("openai_tools/functionary_test_case.json", 1, "messages", {"bad_tools": 1}),  # code_interpreter is no function
    ("openai_tools/llamafactory_reason_tool_use_50.jsonl", 50, "messages", {}),
    ("openai_tools/specforge_tool_use_conversation.jsonl", 1, "conversations", {}),
    ("openai_tools/taubench_gpt4o_airline.json", 16, "trajectory", {}),
    ("reasoning/curator_reasoning_dataset.parquet", 5, "question", {}),
    ("reasoning/xtuner_qwen35_tokenize_data.jsonl", 17, "messages", {"not_text": 5}),
    ("reshaped/mixture_of_thoughts_shape.jsonl", 50, "messages", {}),
    ("reshaped/open_perfectblend_shape.jsonl", 80, "conversations", {}),
    ("reshaped/openorca_shape.jsonl", 80, "openorca", {}),
    ("reshaped/openthoughts114k_shape.jsonl", 50, "conversations", {}),
    ("reshaped/openthoughts3_shape.jsonl", 50, "conversations", {}),
    ("reshaped/swesmith_trajectories_shape.jsonl", 3, "messages", {}),
    ("reshaped/ultrachat200k_shape.jsonl", 100, "messages", {}),
    ("reshaped/ultrachat_original_shape.jsonl", 100, "ultrachat", {}),
    ("sharegpt/axolotl_conversation.missingturns.json", 1, "conversations", {}),
    ("sharegpt/fastchat_dummy_conversation.json", 200, "conversations", {}),
    ("swe_agent/miniswe_github_issue.traj.json", 1, "message_list", {}),
    ("swe_agent/sweagent_0_function_calling_simple.traj", 1, "swe_agent", {}),
    ("swe_agent/sweagent_1_marshmallow-code__marshmallow-1867.traj", 1, "swe_agent", {}),
    ("swe_agent/swesmith_ft_xml_example.jsonl", 3, "messages", {}),
    ("ultrachat/ultra_eval.json", 200, "ultrachat", {}),
]

needs_files = pytest.mark.skipif(not PROMPTS.is_dir(), reason="real prompts lie beside the project, and are not there")


def values(file: str) -> list[Any]:
    return [row.value for row in read_rows(PROMPTS / file, Cursor())]


def converted(file: str, **more: Any) -> tuple[list[Prompt], Counter[str]]:
    source = DatasetSettings(name="A", path=Path(file), **more)
    prompts: list[Prompt] = []
    reasons: Counter[str] = Counter()
    for value in values(file):
        try:
            prompts.append(convert(value, source))
        except BadRow as bad:
            reasons[bad.reason] += 1
    return prompts, reasons


def line(file: str, rows: int, layout: str, rejects: dict[str, int]) -> str:
    """A line of the table in docs/datasets.md."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(rejects.items())) or "-"
    return f"| {file} | {layout} | {rows:,} | {rows - sum(rejects.values()):,} | {reasons} |"


def test_the_table_is_in_the_documentation() -> None:
    documented = (REPO / "docs" / "datasets.md").read_text(encoding="utf-8")
    section = documented.partition("### Real files")[2].partition("\n#")[0]
    lines = [one for one in section.splitlines() if one.startswith("| ")]
    assert lines[2:] == [line(*row) for row in TABLE]


@needs_files
def test_every_real_file_is_in_the_table() -> None:
    there = {str(path.relative_to(PROMPTS)) for path in PROMPTS.glob("*/*") if not path.name.endswith(".labels.json")}
    assert there == {file for file, *_ in TABLE}


@needs_files
@pytest.mark.parametrize(("file", "rows", "layout", "rejects"), TABLE, ids=[file for file, *_ in TABLE])
def test_a_real_file_is_converted(file: str, rows: int, layout: str, rejects: dict[str, int]) -> None:
    prompts, reasons = converted(file)
    assert dict(reasons) == rejects
    assert len(prompts) == rows - sum(rejects.values())
    assert detect(values(file)).name == layout
    for prompt in prompts:
        for turn in prompt.messages:
            assert turn["role"] in {"system", "user", "assistant", "tool"}
            assert isinstance(turn["content"], str)
            assert not turn["content"].lstrip().startswith("<think>")
            assert turn.get("reasoning_content", "r")
            assert "tool_call_id" in turn or turn["role"] != "tool"
        named = {call["id"] for turn in prompt.messages for call in turn.get("tool_calls", ())}
        results = {turn["tool_call_id"] for turn in prompt.messages if turn["role"] == "tool"}
        # Two of the odd shapes have a result that no call is there for.
        assert results <= named or file.startswith("broken/")


@needs_files
@pytest.mark.parametrize(("file", "rows"), [(file, rows) for file, rows, *_ in TABLE], ids=[file for file, *_ in TABLE])
def test_the_first_turn_of_a_real_file_is_a_prompt(file: str, rows: int) -> None:
    prompts, reasons = converted(file, turns="first")
    assert (len(prompts) + reasons.total()) == rows
    for prompt in prompts:
        roles = [turn["role"] for turn in prompt.messages]
        assert roles[-1] == "user"
        assert "assistant" not in roles[roles.index("user") :]


@needs_files
def test_text_remains_of_files_with_images() -> None:
    prompts, reasons = converted("odd_shapes/llamafactory_v1_multimodal_demo.jsonl", drop_media=True)
    assert (len(prompts), reasons) == (24, Counter())
    assert all(turn["content"].strip() for prompt in prompts for turn in prompt.messages)


@needs_files
def test_what_tools_and_reasoning_became() -> None:
    """Sums over real files, so that a change of what is kept is seen."""
    sums: dict[str, tuple[int, int, int, int]] = {}
    for file in ("glaive/dataflow_glaive_raw.jsonl", "glaive/llamafactory_glaive_toolcall_en.json"):
        sums[file] = _sums(converted(file)[0])
    for name in ("bfcl_v4_live_multiple.json", "llamafactory_reason_tool_use_50.jsonl", "taubench_gpt4o_airline.json"):
        sums[name] = _sums(converted(f"openai_tools/{name}")[0])
    assert sums == {
        "glaive/dataflow_glaive_raw.jsonl": (6, 5, 5, 0),
        "glaive/llamafactory_glaive_toolcall_en.json": (110, 108, 108, 0),
        "bfcl_v4_live_multiple.json": (234, 0, 0, 0),
        "llamafactory_reason_tool_use_50.jsonl": (121, 48, 42, 62),
        "taubench_gpt4o_airline.json": (0, 104, 104, 0),
    }


def _sums(prompts: list[Prompt]) -> tuple[int, int, int, int]:
    """Tools, calls, results, turns with reasoning."""
    turns = [turn for prompt in prompts for turn in prompt.messages]
    return (
        sum(len(prompt.tools or ()) for prompt in prompts),
        sum(len(turn.get("tool_calls", ())) for turn in turns),
        sum(turn["role"] == "tool" for turn in turns),
        sum("reasoning_content" in turn for turn in turns),
    )
