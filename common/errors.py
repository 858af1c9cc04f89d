"""Every error that tokenmill shows a person.

    TokenmillError            exit 1   a fault of ours
    ├── UsageError            exit 2   a command or option that cannot be carried out
    │   └── ConfigError       exit 2   the configuration file or an environment variable is wrong
    ├── UnavailableError      exit 4   something needed is missing or refused
    │   ├── RedisUnavailable
    │   ├── ServerUnavailable
    │   │   └── ServerRefused
    │   └── TokenizerUnavailable
    └── DataError             exit 3   files on disk are not what they must be

A message is one sentence that says what is wrong, where, and what to do. The command line prints it on
standard error without a traceback and leaves with the class's exit code.
"""


class TokenmillError(Exception):
    """Base of all errors meant for a person; `exit_code` is what the process leaves with."""

    exit_code = 1


class UsageError(TokenmillError):
    """A command or option that cannot be carried out as given."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration file, or an environment variable, is wrong."""


class UnavailableError(TokenmillError):
    """Something needed is missing or refuses: Redis, a server, a tokenizer."""

    exit_code = 4


class RedisUnavailable(UnavailableError):
    """Redis cannot be reached, or refuses what we need of it."""


class ServerUnavailable(UnavailableError):
    """A model server cannot be reached, or does not answer as it must."""


class ServerRefused(ServerUnavailable):
    """A model server is there and must not be used: its release, its model, its key; waiting does not cure that."""


class TokenizerUnavailable(UnavailableError):
    """The tokenizer folder does not load."""


class DataError(TokenmillError):
    """Files on disk are not what they must be."""

    exit_code = 3
