"""The command line, `tokenmill`. Each command is loaded when it is used, so that --help is instant."""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from common.options import HELP

# What a shell shows of a command that SIGPIPE has ended.
NOBODY_READS = 141
# Workers' commands are named, not imported: producer and workers do not know each other's code.
_COMMANDS = {
    "demo": ("producer.cli.run:demo", "The whole path on this machine, with a simulated server and example prompts."),
    "run": ("producer.cli.run:run", "The whole job on one machine; run it again to resume."),
    "enqueue": ("producer.cli.operate:enqueue", "Register datasets and start feeding them."),
    "status": ("producer.cli.operate:status", "What every dataset, worker and server is doing."),
    "top": ("producer.cli.top:top", "The same on a live screen, with keys to steer the job."),
    "show": ("producer.cli.show:show", "One sample, decoded: thinking, answer and tool calls told apart."),
    "pause": ("producer.cli.steer:pause", "Start nothing new of a dataset, until it is resumed."),
    "resume": ("producer.cli.steer:resume", "Open datasets again that are paused, halted or failed."),
    "cap": ("producer.cli.steer:cap", "Raise, lower or drop the cap of a dataset."),
    "weight": ("producer.cli.steer:weight", "Change a dataset's share of the slots."),
    "cancel": ("producer.cli.steer:cancel", "End a dataset for good."),
    "workers": ("producer.cli.workers:workers", "The workers of a job: list, add, drain, stop, scale."),
    "servers": ("producer.cli.servers:servers", "The model servers of a job: list, add, drain."),
    "worker": ("workers.cli:worker", "One generate worker."),
    "control": ("producer.cli.control:control", "The control process: the keeper's clock, the keeper, the feeds."),
    "flower": ("producer.cli.control:flower", "Flower, the web page on tasks and workers."),
    "doctor": ("workers.cli:doctor", "What the servers really are, and what is wrong with them."),
    "plan": ("producer.cli.plan:plan", "Samples, tokens and hours, before they are spent."),
    "verify": ("producer.cli.files:verify", "Check every segment, and the ledger against them."),
    "rejects": ("producer.cli.files:rejects", "Which rows were rejected, and why."),
    "recover": ("producer.cli.files:recover", "Build the ledger anew from the segments."),
    "export": ("producer.cli.export:export", "Training files with loss masks."),
    "report": ("producer.cli.report:report", "One HTML page on what was asked and what came."),
    "audit": ("producer.cli.audit:audit", "What is wrong with data made by anyone, and why."),
    "reconstruct": (
        "producer.cli.reconstruct:reconstruct",
        "Ids from answers that were saved as text; doubtful ones are refused.",
    ),
    "simulate": ("workers.sglang.simulator.cli:simulate", "A simulated SGLang server."),
}
# Started by other commands; not for people.
_HIDDEN = {"keeper": "workers.cli:keeper", "feeder": "producer.cli.control:feeder"}


class _Commands(click.Group):
    """Loads a command's module when the command is named."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; where who reads its output has gone (`| head`), it ends without a word, as others do."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still held back goes nowhere, or the interpreter would complain of it at its end.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NOBODY_READS
        return code

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        target = _COMMANDS[cmd_name][0] if cmd_name in _COMMANDS else _HIDDEN.get(cmd_name)
        if target is None:
            return None
        command = load(target)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def load(target: str) -> Any:
    """What `module:name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@click.group(cls=_Commands, context_settings=HELP)
@click.version_option(package_name="tokenmill")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Token-exact training data from a served language model.

    Start with `tokenmill demo`. For a real job write tokenmill.toml (see README.md), then `tokenmill run`.
    """
    if debug:
        os.environ["TOKENMILL_DEBUG"] = "1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a mistake prints one sentence and leaves with its code: 2 usage, 3 data, 4 missing, 130 Ctrl-C."""
    try:
        code = cli.main(arguments, prog_name="tokenmill", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"tokenmill: {_one_sentence(error)}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the outermost door: every error leaves with a sentence or a traceback
        sys.exit(_explain(error))
    sys.exit(code if isinstance(code, int) else 0)


def _one_sentence(error: click.ClickException) -> str:
    """A wrong command line as click explains it, with where to look, in place of click's three paragraphs."""
    if isinstance(error, click.exceptions.NoSuchCommand):
        error = click.exceptions.NoSuchCommand(error.command_name, possibilities=_COMMANDS, ctx=error.ctx)
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "tokenmill"
    return f"{error.format_message().rstrip('.')} (see `{where} --help`)"


def _explain(error: Exception) -> int:
    """Say what is wrong in a sentence; a fault of ours keeps its traceback."""
    import redis

    from common.errors import TokenmillError

    if isinstance(error, TokenmillError):
        sentence, code = str(error), error.exit_code
    elif isinstance(error, redis.RedisError):
        sentence, code = f"Redis does not answer ({error}); see that it runs, then repeat the command", 4
    elif isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        sentence, code = f"{place}{error.strerror}; correct that, then repeat the command", 4
    else:
        raise error
    if os.environ.get("TOKENMILL_DEBUG"):
        raise error
    click.echo(f"tokenmill: {sentence}", err=True)
    return code


if __name__ == "__main__":
    main()
