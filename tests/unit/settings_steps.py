"""The least configuration, and what is wrong with a configuration."""

from pathlib import Path

import pytest

from common.errors import ConfigError, UsageError
from common.settings import load_settings

TOKENIZER = '[tokenizer]\npath = "tok"\n'


def faults(path: Path) -> list[str]:
    """What is wrong with the configuration, a line a fault."""
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, UsageError)
    return str(caught.value).splitlines()
