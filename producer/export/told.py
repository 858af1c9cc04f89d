"""What an export tells people: what became of the records, and what they may not have meant."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from common.segments import segment_paths
from common.words import counted
from producer.export.choose import Wanted
from producer.export.export import Exported, Shape, Sums

_OF_JOINING = ("turn_before_left_out", "not_joinable")


def sentences(done: Exported, wanted: Wanted, shape: Shape) -> Iterator[str]:
    """Left out datasets, the counts of each dataset and split, then warnings."""
    if wanted.others:
        told = ", ".join(f"{name} ({_why(reason)})" for name, reason in wanted.others.items())
        yield f"left out, {len(wanted.others)} of {counted(len(done.datasets), 'dataset')}: {told}"
    for name, tally in done.datasets.items():
        others = [f"{reason} {n:,}" for reason, n in tally.items() if n and reason not in {"records", "faults"}]
        yield f"{name}: {counted(tally['records'], 'record')}; {', '.join(others) or 'none taken'}"
        if tally["faults"]:
            faults = counted(tally["faults"], "line")
            yield f"{name}: {faults} left out, being no records; `tokenmill verify {name}` names each"
    dropped = sum(tally["reasoning_dropped"] for tally in done.datasets.values())
    for split, sums in done.splits.items():
        yield f"{split}: {_sums(sums, is_text=shape.check is not None)}"
    if dropped:
        yield (
            f"the reasoning of {counted(dropped, 'row')} is counted here, and the chat template leaves it out: a "
            "trainer that renders the messages does not learn it"
        )
    yield from _warnings(done, wanted, shape)


def unknown(output: Path, known: Collection[str]) -> Iterator[str]:
    """What stands in the output and is not exported unless it is named: datasets that left the configuration."""
    others = [one.name for one in sorted(output.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    others = [name for name in others if name not in known and segment_paths(output, name)]
    if others:
        yield (
            f"warning: {output} has records of {', '.join(others)}, not in the configuration and so left out; name the "
            "datasets to export to have them, too"
        )


def _why(reason: str) -> str:
    return "not in --mix" if reason == "not_in_mix" else reason.removeprefix("state_").replace("_", " ")


def _sums(sums: Sums, *, is_text: bool) -> str:
    learnt = "written by the model" if is_text else "to learn"
    told = f"{counted(sums.rows, 'row')}, {counted(sums.tokens, 'token')}, {sums.trained_tokens:,} {learnt}"
    told += f", longest row {counted(sums.longest, 'token')}"
    return told + (", all as recorded" if is_text else "")


def _warnings(done: Exported, wanted: Wanted, shape: Shape) -> Iterator[str]:
    if wanted.held_out > 0 and (wanted.caps or wanted.mix):
        given = " and ".join(option for option, is_given in (("--cap", wanted.caps), ("--mix", wanted.mix)) if is_given)
        yield f"{given} {'is' if ' ' not in given else 'are'} for train alone: what is held out for eval is there whole"
    for split, sums in done.splits.items():
        if not sums.rows:
            yield f"warning: {split} has 0 rows{_why_none(split, done.datasets)}"
    if shape.join_turns and not any(tally["joined"] for tally in done.datasets.values()):
        why = [f"{reason} {n:,}" for reason in _OF_JOINING if (n := sum(one[reason] for one in done.datasets.values()))]
        yield f"warning: --join-turns has joined nothing: {', '.join(why) or 'no record is a later turn of another'}"


def _why_none(split: str, tallies: Mapping[str, Mapping[str, int]]) -> str:
    other = "eval" if split == "train" else "train"
    if sum(tally.get(f"{other}_rows", 0) for tally in tallies.values()):
        return (
            f": the split goes by a hash of the prompt, and none of those that fell to {split} is left; choose another "
            "share with --eval, or more records"
        )
    return ""
