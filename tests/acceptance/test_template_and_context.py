"""A misspelt argument of the template is told at the start, and prompts that leave little room are cut to fit."""

import json
from pathlib import Path

from common.rejects import read_rejects
from common.segments import records
from tests.acceptance.commands import tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO

CONTEXT, MAX_NEW_TOKENS = 400, 300
VOCAB_SIZE = ("--vocab-size", "4096", "--last-id", "4087", "--end-token-id", "4090")


def test_a_job_with_a_misspelt_argument_and_long_prompts(tmp_path: Path, simulate: Simulate) -> None:
    url = simulate(*VOCAB_SIZE, "--context-length", str(CONTEXT), "--speed", "0", "--mean-tokens", "250")
    prompts = [[7] * tokens for tokens in (5, 90, 100, 150, 380, 393, 394, 400, 500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in prompts))
    (tmp_path / "tokenmill.toml").write_text(
        f'output = "out"\n[server]\nurls = ["{url}"]\n[tokenizer]\npath = "{REPO / "examples" / "tokenizer"}"\n'
        "chat_template_kwargs = { enable_thinking = false }\n"
        '[gates]\naction = "none"\n'
        f'[sampling]\nmax_new_tokens = {MAX_NEW_TOKENS}\nfit = "cut"\n'
        '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'
    )

    done = tokenmill("run", folder=tmp_path)

    assert "warning: [tokenizer] chat_template_kwargs: enable_thinking = False changes no prompt; did you mean" in (
        done.stderr
    )
    rejects = read_rejects(tmp_path / "out", "A").rows
    assert {index: row.reason for index, row in rejects.items()} == dict.fromkeys((6, 7, 8), "too_long")
    found = {record.index: record for record in records(tmp_path / "out", "A")}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for index, record in found.items():
        room = CONTEXT - record.prompt_tokens - 2
        is_cut = room < MAX_NEW_TOKENS
        assert ("max_new_tokens_cut" in record.flags) is is_cut is (index > 1)
        assert "clipped" not in record.flags
        most = room if is_cut else MAX_NEW_TOKENS
        assert ("truncated" in record.flags) is (record.finish_reason == "length")
        assert record.completion_tokens <= most
    assert found[5].completion_tokens <= 5
