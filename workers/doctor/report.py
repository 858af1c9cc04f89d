"""What `doctor` says: a list of checks, for people and for programs."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from workers.sglang.preflight import ServerFacts

State = Literal["ok", "warning", "wrong"]
_NAME_WIDTH, _STATE_WIDTH = 20, 9
_MOST_WIDTH = 100


class Said(NamedTuple):
    """What one check finds of one server, or of the configuration; `do` is empty where nothing is to be done."""

    state: State
    says: str
    do: str = ""

    @classmethod
    def of(cls, state: State, sentence: str) -> "Said":
        """A sentence in the form of all messages: what is wrong, then what to do behind the last semicolon."""
        says, _, do = sentence.rpartition("; ")
        return cls(state, says, do) if says else cls(state, do)


class Check(msgspec.Struct, frozen=True):
    """One check; its fields and its name are a contract with programs."""

    name: str
    state: State
    says: str
    do: str

    @property
    def sentence(self) -> str:
        """As one sentence, as commands print it."""
        return f"{self.says}; {self.do}" if self.do else self.says


class Report(msgspec.Struct, frozen=True):
    """All checks, and what the servers say of themselves; all can be used if no check is wrong."""

    checks: list[Check]
    servers: list[ServerFacts]

    def of(self, state: State) -> list[Check]:
        """The checks in this state."""
        return [check for check in self.checks if check.state == state]


def lines(report: Report, width: int = 80) -> Iterator[str]:
    """The report as a person reads it, in the order of the checks, no line longer than `width` characters."""
    width = max(50, min(width, _MOST_WIDTH))
    for check in report.checks:
        first = f"{check.state:<{_STATE_WIDTH}}{check.name:<{_NAME_WIDTH}} "
        yield from _wrapped(check.says, first, width)
        if check.do:
            yield from _wrapped(check.do, f"{'':<{len(first)}}-> ", width)
    yield ""
    yield summary(report)


def _wrapped(text: str, first: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def summary(report: Report) -> str:
    """One sentence on the whole."""
    wrong, warnings = len(report.of("wrong")), len(report.of("warning"))
    count = len(report.servers)
    servers = "the server" if count == 1 else f"the {count} servers"
    if wrong:
        names = ", ".join(dict.fromkeys(check.name for check in report.of("wrong")))
        return f"{wrong} wrong ({names}), {_many(warnings, 'warning')}: see to what is wrong before a job is started"
    return f"nothing is wrong, {_many(warnings, 'warning')}: {servers} can be used"


def _many(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def shared(name: str, told: Sequence[tuple[str, Said]], servers: int) -> Iterator[Check]:
    """The findings of one check on several servers, each said once; `told` are (url, finding).

    One of a server alone is said without its address where nothing is wrong with it.
    """
    urls: dict[Said, list[str]] = {}
    for url, said in told:
        urls.setdefault(said, []).append(url)
    for said, of in urls.items():
        alone = said.state == "ok" and len(of) == servers
        prefix = "" if alone else f"{', '.join(of)}: "
        yield Check(name, said.state, f"{prefix}{said.says}", said.do)
