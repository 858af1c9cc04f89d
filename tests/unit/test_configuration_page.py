"""docs/configuration.md is what the sections say of their keys, and its example is a configuration."""

import re
import subprocess
import sys

from common.settings import load_settings
from tests.conftest import REPO
from tests.unit.conftest import Write

PAGE = REPO / "docs" / "configuration.md"


def test_the_page_in_docs_is_what_the_sections_say() -> None:
    check = subprocess.run(
        [sys.executable, "docs/make_configuration.py", "--check"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_its_example_loads(write: Write) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)

    settings = load_settings(write(example))

    chat, tools = settings.datasets
    assert (chat.cap_tokens, chat.columns.messages) == (10_000_000, "conversation")
    assert (tools.cap_tokens, tools.turns, tools.limit, tools.shuffle) == (2_500_000, "all", 50_000, 1)
    assert settings.sampling_of(tools).params() == {"max_new_tokens": 4096, "temperature": 0.6, "top_p": 0.95}
    assert (settings.gates_of(tools).share("repetition"), settings.gates_of(chat).share("repetition")) == (0.3, 0.1)


def test_defaults_that_an_operator_looks_for_stand_there() -> None:
    rows = {row.split("`")[1]: row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")}
    assert "| `0.01` |" in rows["allowed_failures"]
    assert "| `30.0` |" in rows["drain_seconds"]
    assert "| `268_435_456` |" in rows["segment_bytes"]
    assert "in the environment only" in rows["TOKENMILL_SERVER__API_KEY"]
    assert all(row.count(" | ") >= 1 and not row.rstrip("|").rstrip().endswith("|") for row in rows.values())
