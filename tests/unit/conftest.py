"""A configuration file of one's own, and an environment in which nothing of ours is set."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TOKENMILL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration file, and answer its path."""

    def write(text: str) -> Path:
        path = tmp_path / "tokenmill.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
