"""`tokenmill simulate`: a simulated SGLang server in a process of its own."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from common.parent import end_with_parent
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

_DEFAULT = SimulatorConfig()

F = TypeVar("F", bound=Callable[..., Any])


def _setting(
    name: str, about: str, *, option: str | None = None, kind: type[int] | type[float] | None = None
) -> Callable[[F], F]:
    """An option for one field of the settings, with the field's default."""
    option = option or f"--{name.replace('_', '-')}"
    return click.option(option, name, type=kind, default=getattr(_DEFAULT, name), show_default=True, help=about)


@click.command()
@click.option("--port-file", type=click.Path(path_type=Path, dir_okay=False), help="Write the port here when ready.")
@_setting("host", "Address to listen on.")
@_setting("port", "Port to listen on; 0 picks a free one.")
@_setting("api_key", "Refuse calls that do not bring this key.")
@_setting("model_path", "Name of the model.")
@_setting("weight_version", "Version of its weights.")
@_setting("vocab_size", "Ids in its vocabulary.")
@_setting("context_length", "Tokens in its context.")
@_setting("max_total_tokens", "Tokens in its KV pool.")
@_setting("max_running_requests", "Requests that run at once.")
@_setting("max_queued_requests", "Requests that may wait; the next is refused. No bound unless set.", kind=int)
@_setting("seed", "Other seeds give other answers to the same prompts.")
@_setting("mean_tokens", "Mean length of an answer, lognormal.")
@_setting("cv", "Standard deviation of the length over its mean.")
@_setting("end_token_id", "Id that ends an answer.")
@_setting("think_end_token_id", "Id that ends the thinking; the model does not think unless set.", kind=int)
@_setting("first_id", "Smallest ordinary id.")
@_setting("last_id", "Largest ordinary id; the last of the vocabulary unless set.", kind=int)
@_setting("speed", "How many times faster than real time; 0 or inf: answers come at once.")
@_setting("step_base_seconds", "Time of a decode step.")
@_setting("step_request_seconds", "More of it for each running request.")
@_setting("step_token_seconds", "More of it for each KV token in use.")
@_setting("prefill_base_seconds", "Time of a prefill.")
@_setting("prefill_tokens_per_second", "Prompt tokens that a prefill reads in a second.")
@_setting("max_prefill_tokens", "Prompt tokens in one prefill.")
@_setting("tokens_per_second", "Constant speed of each request, in place of the times above.", kind=float)
@_setting("latency_mean_seconds", "Mean time of an answer whatever its length.", option="--latency-mean", kind=float)
@_setting("latency_cv", "Standard deviation of that time over its mean.")
def simulate(port_file: Path | None, **settings: Any) -> None:
    """Run a simulated SGLang server until it is interrupted.

    It answers like SGLang 0.5.23. What it says depends only on the prompt's ids and the seed.
    """
    end_with_parent()
    asyncio.run(_serve(SimulatorConfig(**settings), port_file))


async def _serve(config: SimulatorConfig, port_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Simulator(config) as server:
        if port_file is not None:
            _write_whole(port_file, f"{server.port}\n")
        click.echo(f"simulated SGLang on {server.url}", err=True)
        await stop.wait()


def _write_whole(path: Path, text: str) -> None:
    """Write so that nobody who waits for the file can read half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
