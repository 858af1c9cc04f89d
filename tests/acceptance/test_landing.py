"""Three datasets of 300,000 tokens over the real queue, on a simulated server that decodes 60 times as fast.

The rule itself passes such a cap by 0.2 % on average, and by 0.9 % at worst of 45 (tests/benchmarks/budget.py).
"""

import json
import random
from pathlib import Path

import pytest

from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO

pytestmark = pytest.mark.timeout(900)
CAP = 300_000
LONGEST = 4096
ROWS = 3000
# Prompt lengths of each dataset, and what counts of it.
DATASETS = {"short": ((20, 60), "completion"), "long": ((500, 1500), "completion"), "all": ((50, 300), "total")}
# Numbers that go with the pace of the server, which answers in some tenths of a second.
PACE = "[worker]\nload_seconds = 0.2\n"


def configure(folder: Path, server: str) -> None:
    lengths = random.Random(5)
    config = (
        f'output = "out"\nredis = "embedded"\n[server]\nurls = ["{server}"]\n'
        '[gates]\naction = "none"\n'
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = {LONGEST}\n{PACE}'
    )
    for name, (between, count) in DATASETS.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(ROWS):
                ids = [lengths.randrange(3, 4000) for _ in range(lengths.randint(*between))]
                file.write(json.dumps({"input_ids": ids}) + "\n")
        config += f'[[datasets]]\nname = "{name}"\npath = "{name}.jsonl"\ncap_tokens = {CAP}\ncount = "{count}"\n'
    (folder / "tokenmill.toml").write_text(config)


def test_each_dataset_lands_within_one_longest_answer_of_its_cap(simulate: Simulate, tmp_path: Path) -> None:
    configure(tmp_path, simulate("--speed", "60", "--mean-tokens", "600", "--cv", "1", *EXAMPLE_IDS))
    done = tokenmill("run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(tokenmill("verify", "--json", folder=tmp_path).stdout)
    assert report["faults"] == []
    datasets = {dataset["name"]: dataset for dataset in report["datasets"]}
    assert datasets.keys() == DATASETS.keys()
    for name, (between, count) in DATASETS.items():
        longest = LONGEST + (between[1] if count == "total" else 0)
        found = datasets[name]
        spent = found["completion_tokens"] + (found["prompt_tokens"] if count == "total" else 0)
        assert abs(spent - CAP) <= longest, found
