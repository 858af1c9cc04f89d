"""`tokenmill simulate`: a simulated SGLang server in a process of its own."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from common.errors import UnavailableError
from common.options import HELP
from common.parent import end_with_parent
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.faults import ALL_OF_REQUESTS, OF_THE_SERVER
from workers.sglang.simulator.presets import PRESETS
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.server import Simulator

_DEFAULT = SimulatorConfig()

F = TypeVar("F", bound=Callable[..., Any])


def _setting(
    name: str, about: str, *, option: str | None = None, kind: type[int] | type[float] | None = None
) -> Callable[[F], F]:
    """An option for one field of the settings, with the field's default."""
    option = option or f"--{name.replace('_', '-')}"
    return click.option(option, name, type=kind, default=getattr(_DEFAULT, name), show_default=True, help=about)


def _preset(context: click.Context, _: click.Parameter, name: str | None) -> None:
    """Let a preset stand for the options that were not given."""
    if name is not None:
        context.default_map = dict(PRESETS[name])


@click.command(context_settings=HELP)
@click.option(
    "--preset",
    type=click.Choice(tuple(PRESETS)),
    is_eager=True,
    expose_value=False,
    callback=_preset,
    help="Settings of a server by its name; options given beside it overrule them.",
)
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
@click.option(
    "--profile",
    type=click.Choice(tuple(PROFILES)),
    default=_DEFAULT.profile,
    show_default=True,
    help="The release of SGLang that it plays.",
)
@click.option("--skip-tokenizer-init", is_flag=True, help="Answer without text.")
@click.option(
    "--stream-output",
    "--incremental-streaming-output",
    "stream_output",
    is_flag=True,
    help="Events of streams carry their new ids alone, not all ids so far; 0.5.2 always does that.",
)
@_setting("stream_interval", "Ids in an event of a stream, save the first, which comes with the first id.")
@click.option(
    "--router",
    is_flag=True,
    help="Stand behind a router (sgl-model-gateway): no /abort_request, /health knows nothing, fields are dropped, and "
    "when the server dies the router goes on and answers 503.",
)
@click.option(
    "--says",
    multiple=True,
    metavar="KEY=VALUE",
    help="Say this in /server_info in place of its own, as in kv_cache_dtype=fp8_e5m2. Repeatable.",
)
@_setting("tokenizer", "A folder with a tokenizer.json, to read the texts of /tokenize; without it there is no such.")
@click.option("--allow-auto-truncate", is_flag=True, help="Cut prompts that are too long, without a word.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help=f"Have a fault from the start: {', '.join([*ALL_OF_REQUESTS, *OF_THE_SERVER])}; as in reset:share=0.1, "
    "nan:next=3,after=50, status:status=500 or poison:ids=5+6+7. GET /_sim/faults explains them, and POST sets them "
    "while it runs. Repeatable.",
)
@click.option(
    "--die-on-bad-id/--no-die-on-bad-id",
    default=True,
    show_default=True,
    help="Die of a prompt id outside the vocabulary, or only break that connection.",
)
@_setting("restart_seconds", "Come back so long after a death; without it, a death ends the command.", kind=float)
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
@_setting("chunked_prefill_size", "Prompt tokens in one chunk of a long prompt.")
@_setting("schedule_conservativeness", "Room kept for those that run; less of it, and more are retracted.")
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Share the KV of equal prefixes."
)
@_setting("tokens_per_second", "Constant speed of each request, in place of the times above.", kind=float)
@_setting("latency_mean_seconds", "Mean time of an answer whatever its length.", option="--latency-mean", kind=float)
@_setting("latency_cv", "Standard deviation of that time over its mean.")
def simulate(port_file: Path | None, **settings: Any) -> None:
    """Run a simulated SGLang server until it is interrupted.

    It answers like SGLang 0.5.23, or an older one, whole or as a stream of events. What it says depends only on the
    prompt's ids and the seed. A TERM lets it finish what it has, as the real one does; a second one, or an interrupt,
    ends it at once.
    """
    end_with_parent()
    death = asyncio.run(_serve(SimulatorConfig(**settings), port_file))
    if death:
        raise UnavailableError(f"the simulated server died: {death}; start it again, or give it --restart-seconds")


async def _serve(config: SimulatorConfig, port_file: Path | None) -> str:
    """Serve until told to end; why it died, or nothing."""
    drain, stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: stop.set() if drain.is_set() else drain.set())
    loop.add_signal_handler(signal.SIGINT, stop.set)
    async with Simulator(config) as server:
        if port_file is not None:
            _write_whole(port_file, f"{server.port}\n")
        click.echo(f"simulated SGLang on {server.url}{', behind a router' if config.router else ''}", err=True)

        async def drained() -> None:
            await drain.wait()
            await server.drain()

        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(drained()), asyncio.create_task(_dead(server))]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        died = ends[-1].done()
        for task in ends:
            task.cancel()
        return server.death if died else ""


async def _dead(server: Simulator) -> None:
    """Wait for a death that no restart follows; a router outlives its server."""
    await server.dead.wait()
    while server.restart_seconds is not None or server.config.router:
        await asyncio.sleep((server.restart_seconds or 1.0) + 0.1)
        await server.dead.wait()


def _write_whole(path: Path, text: str) -> None:
    """Write so that nobody who waits for the file can read half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
