"""The servers of a job: which there are, and changes to them while it runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import UsageError
from common.events import make_event, tell
from common.ledger import Ledger
from common.run_file import read_run_file, write_run_file
from common.sections import server_url
from common.servers import urls_in_use
from common.settings import Settings
from producer.embedded import reachable
from producer.enqueue import refuse_dropped_parameters
from producer.status import snapshot


def known_servers(settings: Settings, ledger: Ledger) -> list[dict[str, Any]]:
    """Every configured, added and drained server, as status shows it; `unseen` where no worker has looked yet."""
    changes = ledger.server_changes()
    used = urls_in_use(settings.server.urls, changes)
    seen = {server["url"]: server for server in snapshot(ledger)["servers"]}
    found = []
    for url in dict.fromkeys((*settings.server.urls, *changes)):
        state = "unseen" if url in used else "drained"
        server = seen.get(url) or {"url": url, "state": state, "in_flight": 0, "answers": 0, "since": None}
        if url not in used and not server["in_flight"]:
            server["state"] = "drained"
        found.append({"version": None, "reason": None, **server, "configured": url in settings.server.urls})
    return found


def add_server(
    settings: Settings, facts: Any, refuse_other_model: Callable[[Any, Mapping[str, Any], str], None]
) -> None:
    """Let the running job use the server with these facts, and note them.

    Facts and check are those of workers.sglang.preflight, which the command line loads for this side.
    Raises UsageError if nothing has run yet, and ServerRefused if it serves something else than the job's servers.
    """
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        model = ledger.model()
        if model is None:
            raise UsageError("nothing was enqueued yet; add the server to [server] urls in the configuration instead")
        refuse_other_model(facts, model, "this job is made by")
        found = msgspec.to_builtins(facts)
        before = read_run_file(settings.output)
        for made in (model, *(before or {}).get("datasets", {}).values()):
            refuse_dropped_parameters(found, made["sampling_params"])
        model["servers"] = _with(model["servers"], found)
        ledger.set_model(model)
        if before is not None:
            before.pop("earlier", None)
            write_run_file(settings.output, before | {"servers": model["servers"]})
        ledger.change_server(facts.url, "added")
        tell(settings.output, ledger, make_event("server_added", f"{facts.url} is used from now on"))
        ledger.close()


def address(text: str) -> str:
    """A server's address as it is kept; raises UsageError, with what is wrong, if it cannot be one."""
    try:
        return server_url(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def drain_server(settings: Settings, url: str) -> None:
    """Let the running job ask nothing more of the server at `url`; raises UsageError if it does not use it."""
    url = address(url)
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        used = urls_in_use(settings.server.urls, ledger.server_changes())
        if url not in used:
            raise UsageError(f"{url} is no server of this job; it uses {', '.join(used) or 'none'}")
        ledger.change_server(url, "drained")
        tell(settings.output, ledger, make_event("server_drained", f"{url} is asked for nothing new"))
        ledger.close()


def _with(servers: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(server for server in servers if server["url"] != new["url"]), new]
