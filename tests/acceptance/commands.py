"""Running the real command line: in a process of its own, in a folder of its own, in an empty HOME."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PATIENCE_SECONDS
from tests.forked import run_forked

# -P, as the console script: what lies in the current folder is not ours.
TOKENMILL = (sys.executable, "-P", "-m", "producer.cli.main")
EXAMPLE_IDS = ("--vocab-size", "4096", "--last-id", "4087", "--end-token-id", "4090", "--think-end-token-id", "4093")


def environment(home: Path, **more: str) -> dict[str, str]:
    """An environment in which nothing of ours, and nobody's home, is known."""
    ours = {name for name in os.environ if name.startswith(("TOKENMILL_", "HF_", "TRANSFORMERS_"))}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"HOME": str(home), "COLUMNS": "80"} | more


def tokenmill(
    *arguments: str | Path, folder: Path, piped: str | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in `folder`; `piped` is its standard input, `more` is added to its environment."""
    given = list(map(str, arguments))
    return run_forked(given, folder, environment(folder, **more), piped, 2 * PATIENCE_SECONDS)
