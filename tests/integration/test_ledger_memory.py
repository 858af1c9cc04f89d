"""What a large dataset takes of Redis: its window, and some bytes a row."""

import random
from pathlib import Path
from typing import cast

from common.ledger import Ledger
from common.payload import Packer
from common.sections import DatasetSettings
from workers.pacing import Pace

ROWS = 1_000_000
PROMPT_IDS = 4_000
SLOTS = 2_000  # a window by these would hold 4,000 prompts
IN_FLIGHT = 500
CHUNK = 128


def used_bytes(ledger: Ledger) -> int:
    return int(cast("dict[str, int]", ledger.redis.info("memory"))["used_memory"])


def test_a_million_prompts_of_4000_ids_hold_less_than_64_mb(ledger: Ledger) -> None:
    before = used_bytes(ledger)
    ledger.register(DatasetSettings(name="A", path=Path("a.jsonl")))
    packer, ids = Packer(), random.Random(0)
    ledger.feed("A", before="", after="0", ended=False, rejected=[], samples=[])
    cursor, at = "0", ROWS - 10_000  # the last rows: what is kept for each row is there for all of them
    while True:
        state = ledger.snapshot("A")
        window = Pace.of(state).window(SLOTS, state, None)
        ledger.admit("A", room=10**6, window=window, tokens_per_second=0)
        if state.queued >= window:
            break
        prompts = (
            [ids.randrange(163_840) for _ in range(PROMPT_IDS)] for _ in range(min(CHUNK, window - state.queued))
        )
        samples = [(at + n, packer.pack(prompt, {"id": f"row {at + n}"})) for n, prompt in enumerate(prompts)]
        at += len(samples)
        assert ledger.feed("A", before=cursor, after=str(at), ended=False, rejected=[], samples=samples)
        cursor = str(at)
    assert ledger.snapshot("A").queued < 2 * SLOTS  # the bytes bound it, and not the slots
    claimed, _ = ledger.claim("A", "w1", 60, ledger.unsent("A", IN_FLIGHT))
    assert len(claimed) == IN_FLIGHT
    assert max(one.index for one in claimed) > ROWS - 10_000
    assert ledger.redis.strlen("tokenmill:d:A:attempts") > 5_900_000
    assert used_bytes(ledger) - before < 64_000_000


def test_a_window_follows_the_slots_and_the_rate_and_a_given_one_holds(ledger: Ledger) -> None:
    ledger.register(DatasetSettings(name="A", path=Path("a.jsonl")))
    state = ledger.snapshot("A")
    pace = Pace.of(state)
    assert [pace.window(slots, state, None) for slots in (0, 50, 4000)] == [64, 100, 5_000]
    pace.answers_per_second = 100.0
    assert [pace.window(50, state, given) for given in (None, 7, 50_000)] == [500, 7, 50_000]
