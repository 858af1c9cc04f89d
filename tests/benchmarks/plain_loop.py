"""The yardstick: asyncio and aiohttp alone, as many calls in flight as there are slots; prints what it did as JSON.

It reads each answer whole and does nothing with it: no queue, no check, no file.
"""

import argparse
import asyncio
import itertools
import json
import resource
import time

import aiohttp

from tests.benchmarks.prompts import Prompts


async def loop(url: str, slots: int, seconds: float, warm_seconds: float, prompts: Prompts, sampling: str) -> int:
    """Answers that came within `seconds`, after `warm_seconds`."""
    answers = 0
    indices = itertools.count()
    start = time.monotonic() + warm_seconds
    end = start + seconds
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one_slot() -> None:
            nonlocal answers
            while time.monotonic() < end:
                index = next(indices)
                ids = prompts.input_ids(index)
                body = b'{"rid":"%032d","sampling_params":%b,"input_ids":%b}' % (index, sampling.encode(), ids)
                async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                answers += start <= time.monotonic() < end

        await asyncio.gather(*(one_slot() for _ in range(slots)))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-seconds", type=float, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--sampling", required=True, help="sampling_params as JSON")
    given = parser.parse_args()
    prompts = Prompts(given.prompt_tokens, given.vocab_size)
    before = time.process_time()
    answers = asyncio.run(
        loop(given.url + "/generate", given.slots, given.seconds, given.warm_seconds, prompts, given.sampling)
    )
    whole = given.seconds + given.warm_seconds
    cpu_share = (time.process_time() - before) / whole
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    rate = answers / given.seconds
    print(json.dumps({"rate": rate, "cpu_ms": 1000 * cpu_share / rate if rate else 0.0, "rss_mb": rss_mb}))


if __name__ == "__main__":
    main()
