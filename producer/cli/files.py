"""The commands that read what a run has written: verify, rejects, recover."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.errors import DataError, TokenmillError, UnavailableError, UsageError
from common.options import HELP, config_option, json_option
from common.words import counted
from producer.cli.chosen import chosen

if TYPE_CHECKING:
    from common.ledger import Ledger
    from common.settings import Settings
    from producer.recover import Recovered
    from producer.rejected import RejectedRows
    from producer.repair import Repaired
    from producer.verify import Report


@click.command("verify", context_settings=HELP, short_help="Check the files of a run, and the ledger against them.")
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@click.option(
    "--repair",
    "mend",
    is_flag=True,
    help="Take the lines that are at fault out of the files first; needs Redis, and that no worker or control runs.",
)
@config_option
@json_option
def verify(datasets: Sequence[str], config: Path | None, mend: bool, as_json: bool) -> None:
    """Check every byte that a run has written. Changes nothing unless told to, and may run beside the run.

    Reads all segments and rejects of the DATASETs (by default all), prints what they hold, and names each fault by
    file, line and byte. Where Redis can be reached, the ledger's sums are compared with the files.

    Ends with 0 if all is well, with 3 if there are faults. Lines that are no record are skipped by every reader. If
    only the ledger is wrong, `tokenmill recover` builds it anew. A torn last line is no fault: it was never counted.

    With --repair each file that has such lines is written anew without them, torn ones included, and kept as it was as
    FILE.before-repair-N; every other line stays as it is. The ledger is then counted anew from the files, so that
    `tokenmill run` makes the samples of those lines again.

    The folder of an export in place of a DATASET: each of its files is checked against its manifest.json.
    """
    from common.settings import load_settings

    if datasets and all(Path(name, "manifest.json").is_file() for name in datasets):
        _verify_exports([Path(name) for name in datasets])
        return
    settings = load_settings(config)
    names = chosen(settings, datasets)
    repaired: list[Repaired] = []
    if mend:
        report, repaired = _repair(settings, names)
    else:
        from producer.verify import verify as verify_files

        with _ledger_if_reachable(settings) as ledger, _file_errors(settings.output):
            report = verify_files(settings.output, names, ledger)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report)
    for one in repaired:
        click.echo(_what_follows(one, f" -c {config}" if config else ""), err=True)
    if report.faults or report.differences:
        cure = "; `tokenmill recover` builds the ledger anew from the files" if report.differences else ""
        raise DataError(
            f"{counted(len(report.faults), 'fault')} in the files, "
            f"{counted(len(report.differences), 'difference')} to the ledger{cure}"
        )


def _verify_exports(folders: Sequence[Path]) -> None:
    from producer.export.manifest import differences, read_manifest

    found: list[str] = []
    for folder in folders:
        manifest = read_manifest(folder)
        assert manifest is not None
        wrong = [*differences(folder, manifest)]
        rows = sum(split.rows for split in manifest.splits.values())
        files = counted(len(manifest.files), "file")
        click.echo(f"{folder}: {files}, {counted(rows, 'row')}, {'as written' if not wrong else 'NOT as written'}")
        found += wrong
    for sentence in found:
        click.echo(sentence, err=True)
    if found:
        raise DataError(f"{counted(len(found), 'fault')}: files are not as their manifest says")


def _repair(settings: "Settings", names: Sequence[str]) -> "tuple[Report, list[Repaired]]":
    """Repair the files, then verify them; with the embedded Redis held, so that no run begins in between."""
    from common.ledger import Ledger
    from producer.embedded import borrowed
    from producer.repair import repair
    from producer.verify import verify

    with borrowed(settings) if settings.embedded else contextlib.nullcontext(), _file_errors(settings.output):
        ledger = Ledger.connect(settings.redis_url)
        try:
            repaired = repair(settings, ledger, names)
            report = verify(settings.output, names, ledger)
        finally:
            ledger.close()
    report.repairs = [file for one in repaired for file in one.files]
    return report, repaired


def _what_follows(done: "Repaired", config: str) -> str:
    if done.recounted:
        return (
            f"{done.name}: its ledger was counted anew from the files, as `tokenmill recover` does; "
            f"`tokenmill run{config}` makes the samples of those lines again"
        )
    return (
        f"{done.name}: it is not configured any more, so its ledger was left alone; to make the samples of those lines "
        f"again, add it to [[datasets]], then `tokenmill recover{config}` and `tokenmill run{config}`"
    )


def _print_report(report: "Report") -> None:
    for file in report.repairs:
        click.echo(
            f"{file.path}: {counted(len(file.lines), 'line')} ({file.bytes:,} bytes) taken out; as it was: {file.kept}"
        )
        for line in file.lines:
            click.echo(f"  line {line.line} (byte {line.byte}): {line.reason}")
    for books in report.datasets:
        click.echo(
            f"{books.name}: {counted(books.samples, 'sample')}, {books.total_tokens:,} tokens "
            f"({books.prompt_tokens:,} prompt + {books.completion_tokens:,} completion), "
            f"{books.truncated:,} truncated, {books.superseded:,} superseded, {books.rejects:,} rejected; "
            f"{counted(books.records, 'record')} in {counted(books.segments, 'segment')} of {books.bytes / 1e6:,.1f} MB"
        )
    for fault in report.faults:
        click.echo(f"{fault.path}:{fault.line} (byte {fault.byte}): {fault.reason}")
    for difference in report.differences:
        click.echo(
            f"{difference.dataset}: {difference.what} is {difference.files:,} in the files "
            f"and {difference.ledger:,} in the ledger"
        )
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    if not report.faults and not report.differences:
        records, tokens = (sum(getattr(one, what) for one in report.datasets) for what in ("samples", "total_tokens"))
        ledger = "the ledger agrees" if report.ledger_compared else "the ledger was not compared"
        click.echo(f"nothing wrong: {counted(records, 'record')}, {counted(tokens, 'token')}; {ledger}")


@click.command("rejects", context_settings=HELP, short_help="Which rows were rejected, and why.")
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@config_option
@json_option
def rejects(datasets: Sequence[str], config: Path | None, as_json: bool) -> None:
    """Sum up the rejected rows of the DATASETs (by default all) by reason, with the first three of each.

    An example shows the row's index in its source, its file and line there where these are found within seconds, its
    own id where it has one, and what was wrong with it where that says more than the reason. All of
    them are in <output>/<dataset>/rejects.jsonl. Needs no Redis, and may run beside the run.
    """
    import msgspec

    from common.settings import load_settings
    from producer.rejected import rejected_rows

    settings = load_settings(config)
    with _file_errors(settings.output):
        found = rejected_rows(settings, chosen(settings, datasets))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"datasets": found}), indent=2).decode())
        return
    for dataset in found:
        _print_rejects(dataset)


def _print_rejects(dataset: "RejectedRows") -> None:
    click.echo(f"{dataset.name}: {counted(dataset.rejected, 'row')} rejected")
    for one in dataset.reasons:
        click.echo(f"  {one.reason}: {one.rows:,}" + (f" ({one.meaning})" if one.meaning else ""))
        for row in one.examples:
            place = f", {dataset.places[row.index]}" if row.index in dataset.places else ""
            named = "" if row.id is None else f", id {row.id!r}"
            detail = "" if row.detail == one.meaning else f": {row.detail}"
            shown = "".join(one if one.isprintable() else " " for one in f"{place}{named}{detail}")  # it quotes the row
            click.echo(f"    row {row.index}{shown}")
    if dataset.unmade:
        click.echo(
            f"! {dataset.name}: {dataset.unmade:,} of the {counted(dataset.turns, 'turn')} of its conversations have "
            "no record: none follows on a truncated, damaged or rejected one (`tokenmill status` counts these), "
            "and some may be still to come"
        )
    if dataset.faults:
        click.echo(
            f"{dataset.name}: {counted(dataset.faults, 'line')} of its rejects.jsonl cannot be read as rejects",
            err=True,
        )


@click.command("recover", context_settings=HELP, short_help="Build the ledger anew from the files of a run.")
@config_option
@click.option(
    "--force", is_flag=True, help="Go on although workers were seen within the last minute; they must be dead."
)
def recover(config: Path | None, force: bool) -> None:
    """Build the ledger anew from the segments, after Redis was lost, emptied or found wrong.

    Stop the run first. For every configured dataset the ledger is dropped and counted again from
    <output>/<dataset>/*.jsonl; no record is touched, and only torn last lines, which never counted, are cut off. It
    may be repeated at will. Afterwards `tokenmill run` goes on where the files end: rows with a record are done.
    """
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.embedded import borrowed
    from producer.recover import recover as recover_ledger

    settings = load_settings(config)
    if not settings.datasets:
        raise UsageError("the configuration has no [[datasets]], so there is nothing to recover")
    with borrowed(settings) if settings.embedded else contextlib.nullcontext(), _file_errors(settings.output):
        ledger = Ledger.connect(settings.redis_url)
        try:
            recover_ledger(settings, ledger, force=force, on_recovered=_print_recovered)
        finally:
            ledger.close()
    again = f" -c {config}" if config else ""
    click.echo(
        f"The ledger is whole again; `tokenmill run{again}` goes on from here, and ends what has nothing left to make.",
        err=True,
    )


def _print_recovered(done: "Recovered") -> None:
    click.echo(
        f"{done.name}: {counted(done.records, 'record')}, {done.prompt_tokens + done.completion_tokens:,} tokens "
        f"({done.prompt_tokens:,} prompt + {done.completion_tokens:,} completion), {counted(done.rejects, 'reject')}, "
        f"{done.superseded:,} superseded, {done.torn_bytes:,} torn bytes cut"
    )
    if done.faults:
        click.echo(
            f"{done.name}: {counted(done.faults, 'line')} passed over that cannot be read as records; "
            f"`tokenmill verify {done.name}` names them",
            err=True,
        )
    if done.state == "capped":
        click.echo(f"{done.name}: is capped", err=True)
    elif done.state != "open":
        click.echo(f"{done.name}: is {done.state}, as before; `tokenmill resume {done.name}` opens it", err=True)


@contextlib.contextmanager
def _ledger_if_reachable(settings: "Settings") -> Iterator["Ledger | None"]:
    """The ledger, or None with a word on stderr: the files can be checked without it."""
    from common.ledger import Ledger
    from producer.embedded import reachable

    with contextlib.ExitStack() as stack:
        ledger = None
        try:
            stack.enter_context(reachable(settings))
            ledger = stack.enter_context(contextlib.closing(Ledger.connect(settings.redis_url, attempts=1)))
        except TokenmillError as error:
            click.echo(f"note: the ledger was not compared: {error}", err=True)
        yield ledger


@contextlib.contextmanager
def _file_errors(place: Path) -> Iterator[None]:
    """A full disk or a missing right as a sentence, in place of a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnavailableError(f"{error.filename or place}: {error.strerror or error}") from error
