"""Commands in processes of their own that need not import everything anew: forked from one that has.

An import of Celery and of transformers takes a second, and the suite runs some 300 commands. What is forked is a
process like any other, with its own folder, environment, standard streams and exit code; jobs (`run`, `worker`,
`control`) are started as a person starts them.
"""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from tempfile import TemporaryDirectory

_PRELOAD = (
    "producer.cli.main", "producer.run", "producer.enqueue", "producer.dry_run", "producer.status", "producer.verify",
    "producer.export.export", "producer.audit.audit", "producer.audit.reconstruct", "producer.plan.make",
    "workers.doctor.start", "transformers.models.auto.tokenization_auto",
)  # fmt: skip


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD])
    return context


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], piped: str | None, seconds: float
) -> CompletedProcess[str]:
    """`tokenmill *arguments` in `folder` to its end; `piped` is its standard input, by default empty."""
    with TemporaryDirectory(prefix="tm-") as name:
        streams = [Path(name) / stream for stream in ("in", "out", "err")]
        streams[0].write_text(piped or "", encoding="utf-8")
        process = _context().Process(target=_run, args=(list(arguments), folder, dict(environment), streams))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(list(arguments), seconds)
        code = process.exitcode
        process.close()
        out, err = (stream.read_text(encoding="utf-8") for stream in streams[1:])
    return CompletedProcess(list(arguments), code, out, err)


def _run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[Path]) -> None:
    from producer.cli.main import main

    for descriptor, stream in enumerate(streams):
        opened = os.open(stream, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - to the end
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tokenmill", *arguments]
    try:
        main(arguments)
    finally:
        atexit._run_exitfuncs()  # what is forked by multiprocessing leaves these out
