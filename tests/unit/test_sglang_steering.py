"""Reading the servers' load: one that hangs does not keep the others waiting."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from workers.governor import Governor
from workers.sglang.server import Health, Pauses, Server
from workers.sglang.servers import Servers
from workers.sglang.steering import Steering

LOADS = b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]}'


class OneHangs:
    """The network: `http://hung` takes requests and never answers."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.often = asyncio.Event()

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, most_bytes: int
    ) -> tuple[int, bytes]:
        del method, headers, body, most_bytes
        self.asked[url.split("/")[2]] += 1
        if url.startswith("http://hung"):
            await asyncio.Event().wait()
        if self.asked["well"] >= 5:
            self.often.set()
        return 200, LOADS

    async def aclose(self) -> None:
        """Nothing is open."""


async def _well(_: Server) -> Health:
    return Health.WELL


def test_a_server_that_hangs_does_not_keep_the_others_from_being_steered() -> None:
    async def steer() -> Counter[str]:
        network = OneHangs()
        servers = Servers(
            ["http://hung", "http://well"],
            headers_of=lambda _: {},
            probe=_well,
            inspect=None,
            pauses=Pauses(),
            governor=lambda: Governor(capacity_tokens=None, max_new_tokens=100, phase=0.0),
        )
        steering = Steering(servers, network, 0.01)
        steering.begin()
        try:
            await asyncio.wait_for(network.often.wait(), 4)
        finally:
            steering.stop()
            servers.stop()
        return network.asked

    assert asyncio.run(steer())["hung"] == 1
