"""`servers`: which model servers a running job uses."""

import sys
from pathlib import Path

import click

from common.options import HELP, config_option, json_option


@click.group(context_settings=HELP)
def servers() -> None:
    """The model servers of a job: add one while it runs, drain one, list them.

    Workers take a change within seconds. What is changed here stays until it is changed back, also when the job is
    stopped and started again; [server] urls of the configuration stay as they are.
    """


@servers.command("list", context_settings=HELP)
@json_option
@config_option
def list_servers(as_json: bool, config: Path | None) -> int:
    """Every server that the job uses, and how the workers find it.

    States: up; down (it cannot be reached, or has failed several times in a row; it is probed, and comes back by
    itself); half_open (it looks well again, and has one answer on trial); checking (new); unfit (another model or
    weights, a release that must not be used, or a refused API key); draining (no new answers are asked of it);
    unseen (no worker has looked at it yet); drained.
    """
    import msgspec

    from common.ledger import Ledger
    from common.settings import load_settings
    from producer import display
    from producer.embedded import reachable
    from producer.servers import known_servers

    settings = load_settings(config)
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        known = known_servers(settings, ledger)
        ledger.close()
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"servers": known}) + b"\n")
    else:
        display.StandardOutput().print(display.servers(known))
    return 0


@servers.command(context_settings=HELP)
@click.argument("url")
@config_option
def add(url: str, config: Path | None) -> int:
    """Let the job use the server at URL from now on, too.

    It is asked first what it is: another model, other weights or a release that must not be used is refused. Its API
    key comes from [server.api_key_files] or TOKENMILL_SERVER__API_KEYS, else it is the one of all servers; the workers
    must have been started with it. Adding a drained server takes it again.
    """
    from common.settings import load_settings
    from producer.cli.main import load
    from producer.servers import add_server, address

    settings = load_settings(config)
    facts, warnings = load("workers.sglang.preflight:preflight")([address(url)], settings.api_key_of)
    warnings += load("workers.doctor.start:look_before")(facts[0], settings)
    add_server(settings, facts[0], load("workers.sglang.preflight:refuse_other_model"))
    for warning in dict.fromkeys(warnings):
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"{facts[0].url}: added; workers take it within seconds", err=True)
    return 0


@servers.command(context_settings=HELP)
@click.argument("url")
@config_option
def drain(url: str, config: Path | None) -> int:
    """Ask the server at URL for nothing new; what it is at, it ends.

    `tokenmill servers list` says when nothing is in flight there any more. `tokenmill servers add URL` takes it again.
    """
    from common.settings import load_settings
    from producer.servers import drain_server

    drain_server(load_settings(config), url)
    click.echo(f"{url.rstrip('/')}: drained; what is in flight there ends by itself", err=True)
    return 0
