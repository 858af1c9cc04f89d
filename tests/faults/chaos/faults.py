"""What is thrown at the site: a plan made of a seed alone, and how each fault is done and taken back."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from urllib.request import Request, urlopen

import msgspec
import redis

from common.broker import GENERATE_QUEUE
from tests.faults.chaos.site import CONTROLS, SERVERS, VALKEY, WORKERS, Site, within

# Seconds from one fault to the next: 75 faults in three minutes.
_PAUSE_SECONDS = (1.5, 3.3)
# Where the plan begins: the parts have started by then, and samples are in flight.
_FIRST_SECONDS = 8.0
# What is asked of a process that may be dead or frozen is not waited for.
_ASK_SECONDS = 2.0
# How long all that was done may take to be taken back at the end.
_MEND_SECONDS = 30.0

_TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "worker": WORKERS,
        "control": CONTROLS,
        "keeper": tuple(f"{name}/keeper" for name in CONTROLS),
        "feeder": tuple(f"{name}/feeder" for name in CONTROLS),
        "server": SERVERS,
        "valkey": (VALKEY,),
    }
)
# How often each is thrown, beside the others.
_SIGNALS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "kill": {"worker": 6, "control": 2, "keeper": 3, "feeder": 2, "server": 4, "valkey": 3},
        "term": {"worker": 4, "control": 1, "keeper": 1, "feeder": 1, "server": 2, "valkey": 1},
        "freeze": {"worker": 5, "control": 1, "keeper": 3, "feeder": 2, "server": 3, "valkey": 3},
    }
)
# A worker's lease is 5 s, the keeper's and the feed's lock 10 s: some freezes outlast them.
_LONGEST_FREEZE: Mapping[str, float] = MappingProxyType(
    {"worker": 14, "control": 9, "keeper": 14, "feeder": 14, "server": 8, "valkey": 8}
)
_SIMULATED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "status": {"share": 0.3},
        "reset": {"share": 0.1},
        "cut": {"share": 0.1},
        "nan": {"share": 0.15},
    }
)
_OTHERS: Mapping[str, int] = MappingProxyType(
    {
        "drop connections": 3,
        "purge queue": 4,
        "refuse writes": 3,
        "enqueue all": 2,
        "enqueue one": 2,
        "flushall": 2,
        **{f"server says {name}": 1 for name in _SIMULATED},
    }
)
# Thrown only, or more often, when asked for.
ON_REQUEST: Mapping[str, int] = MappingProxyType({"binding": 12, "flushall": 8})
# The reasons of rejects that a fault explains: a sample that met it three times in a row is given up.
EXPLAINS: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "server says status": ("server_error", "queue_full"),
        "server says reset": ("connection_lost",),
        "server says cut": ("connection_lost", "not_json"),
        "server says nan": ("nan",),
    }
)


@dataclass(frozen=True)
class Fault:
    """One fault: when (seconds from the start), what, at whom, and for how long where it lasts."""

    at: float
    kind: str
    target: str
    seconds: float


def plan(seed: int, seconds: float, datasets: Collection[str], requested: Collection[str] = ()) -> list[Fault]:
    """The faults of one run: the same for the same arguments."""
    chance = random.Random(seed)
    weights = {
        **{f"{what} {role}": weight for what, roles in _SIGNALS.items() for role, weight in roles.items()},
        **_OTHERS,
        **{name: ON_REQUEST[name] for name in requested},
    }
    faults: list[Fault] = []
    at = _FIRST_SECONDS
    while at < seconds:
        (kind,) = chance.choices(list(weights), list(weights.values()))
        faults.append(_drawn(kind, at, chance, datasets))
        at += chance.uniform(*_PAUSE_SECONDS)
    return faults


def _drawn(kind: str, at: float, chance: random.Random, datasets: Collection[str]) -> Fault:
    what, _, role = kind.partition(" ")
    targets: Collection[str] = ("",)
    seconds = 0.0
    if what in _SIGNALS:
        targets = _TARGETS[role]
        seconds = chance.uniform(1, _LONGEST_FREEZE[role]) if what == "freeze" else 0.0
    elif what == "server":
        targets, seconds = SERVERS, chance.uniform(2, 5)
    elif kind == "refuse writes":
        seconds = chance.uniform(2, 5)
    elif kind == "enqueue one":
        targets = datasets
    return Fault(round(at, 2), kind, chance.choice(list(targets)), round(seconds, 1))


class Faults:
    """Throws faults at a site, and takes back those that last."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._mends: list[tuple[float, str, Callable[[], None]]] = []
        self.frozen: set[str] = set()
        self.thrown: Counter[str] = Counter()
        self.told: Counter[str] = Counter()  # target -> TERMs
        self.missed: Counter[str] = Counter()  # the target was down or not there, or did not answer

    def throw(self, fault: Fault) -> None:
        words = " ".join(filter(None, (fault.kind, fault.target, f"{fault.seconds} s" if fault.seconds else "")))
        try:
            done = self._do(fault)
        except (OSError, redis.RedisError) as error:
            self._site.say(f"chaos: {words}: not done, {error}")
            done = False
        else:
            self._site.say(f"chaos: {words}{'' if done else ': not done, it is not there'}")
        (self.thrown if done else self.missed)[fault.kind] += 1

    def _do(self, fault: Fault) -> bool:
        what, _, rest = fault.kind.partition(" ")
        if what in _SIGNALS:
            return self._signal(what, fault)
        if what == "enqueue":
            self._site.enqueue(*filter(None, (fault.target,)))
        elif what == "server":
            self._tell(fault.target, "POST", {rest.removeprefix("says "): _SIMULATED[rest.removeprefix("says ")]})
            self._mend(fault.seconds, fault.kind, lambda: self._tell(fault.target, "DELETE"))
        else:
            with self._site.connection(_ASK_SECONDS) as client:
                return self._ask_redis(client, fault)
        return True

    def _signal(self, what: str, fault: Fault) -> bool:
        pid = self._site.pid(fault.target)
        if pid is None or (what == "freeze" and fault.target in self.frozen):
            return False
        os.kill(pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "freeze": signal.SIGSTOP}[what])
        self.told[fault.target] += what == "term"
        if what == "freeze":
            self.frozen.add(fault.target)
            self._mend(fault.seconds, fault.target, lambda: self._thaw(fault.target, pid))
        return True

    def _thaw(self, target: str, pid: int) -> None:
        self.frozen.discard(target)
        if self._site.pid(target) == pid or pid in self._site.left():  # a child may have outlived its parent
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _ask_redis(self, client: redis.Redis, fault: Fault) -> bool:
        if fault.kind == "drop connections":
            client.client_kill_filter(_type="pubsub", skipme=True)
            client.client_kill_filter(_type="normal", skipme=True)
        elif fault.kind == "purge queue":
            self._site.say(f"chaos: {client.llen(GENERATE_QUEUE)} messages are purged")
            client.delete(GENERATE_QUEUE)
        elif fault.kind == "refuse writes":
            client.config_set("maxmemory", 1)
            self._mend(fault.seconds, fault.kind, self._accept_writes)
        elif fault.kind == "binding":
            keys = client.keys("_kombu.binding.*")
            return bool(keys) and client.delete(*keys) > 0
        elif fault.kind == "flushall":
            client.flushall()
        return True

    def _accept_writes(self) -> None:
        with self._site.connection(_ASK_SECONDS) as client:
            client.config_set("maxmemory", 0)

    def _tell(self, server: str, method: str, faults: Mapping[str, Mapping[str, object]] | None = None) -> None:
        """Set faults of a simulated server, or take all of them back."""
        body = None if faults is None else msgspec.json.encode(faults)
        urlopen(Request(f"{self._site.url(server)}/_sim/faults", body, method=method), timeout=_ASK_SECONDS).close()

    def _mend(self, seconds: float, what: str, step: Callable[[], None]) -> None:
        self._mends.append((time.monotonic() + seconds, what, step))

    def mend(self, *, all_of_them: bool = False) -> bool:
        """Take back what is due, or everything; answers whether nothing is left. What fails is tried again later."""
        now = time.monotonic()
        due = [one for one in self._mends if all_of_them or one[0] <= now]
        for one in due:
            self._mends.remove(one)
            _, what, step = one
            try:
                step()
            except (OSError, redis.RedisError):  # it is dead or frozen itself
                self._mend(1, what, step)
            else:
                self._site.say(f"chaos: {what}: over")
        return not self._mends

    def end(self) -> bool:
        """Take everything back; answers whether that was possible."""
        return within(_MEND_SECONDS, self._mended)

    def _mended(self) -> bool:
        self._site.look_after()
        return self.mend(all_of_them=True)
