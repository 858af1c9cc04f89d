"""The screen of top: what stands on it at two sizes, what its keys do to a real ledger, and that Redis may go away."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Label

from common.events import last_events
from common.ledger import Ledger
from common.settings import Settings, load_settings
from producer.embedded import EmbeddedRedis
from producer.monitor.figures import PLAIN, RICH
from producer.monitor.lines import LinesWidget
from producer.monitor.screens import CapScreen, SampleScreen
from producer.monitor.top import Top
from tests.conftest import REPO
from tests.lines import record_line, write_segment
from tests.watched import begin, move

SIZES = [(80, 24), (120, 40)]


@pytest.fixture
def settings(tmp_path: Path, valkey: str, ledger: Ledger) -> Settings:
    """A job with the datasets D0, D1, D2, two workers and two servers."""
    begin(ledger)
    path = tmp_path / "tokenmill.toml"
    path.write_text(f'output = "out"\nredis = "{valkey}"\n[tokenizer]\npath = "{REPO / "examples" / "tokenizer"}"\n')
    return load_settings(path)


@asynccontextmanager
async def shown(settings: Settings, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[None]]:
    """Top on a screen of that size, with the first figures on it."""
    top = Top(settings, Ledger.connect(settings.redis_url), RICH)
    async with top.run_test(size=size) as pilot:
        await until(pilot, "the first figures are there", lambda: "D0" in text(pilot))
        yield pilot


def rows(pilot: Pilot[None]) -> list[str]:
    """The rows of the screen, or of the sample that lies above it."""
    widget = pilot.app.screen.query_one(LinesWidget)
    return [widget.render_line(y).text for y in range(widget.size.height)]


def text(pilot: Pilot[None]) -> str:
    return "\n".join(rows(pilot))


async def until(pilot: Pilot[None], what: str, condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain until {what}:\n{text(pilot)}"
        await pilot.pause(0.02)


def run(work: Awaitable[None]) -> None:
    async def whole() -> None:
        await work

    asyncio.run(whole())


@pytest.mark.parametrize("size", SIZES)
def test_everything_stands_on_the_screen(settings: Settings, ledger: Ledger, size: tuple[int, int]) -> None:
    async def look() -> None:
        async with shown(settings, size) as pilot:
            found = rows(pilot)
            assert len(found) == size[1]
            assert {len(row) for row in found} == {size[0]}
            assert found[0].startswith("tokenmill ")
            assert " 3/3 open " in found[0]
            head, first, *_ = found[1:]
            wanted = {"dataset", "state", "of", "cap", "tok/s", "eta", "trunc", "no</th>", "rej", "fail"}
            assert wanted <= set(head.split())
            assert {"mean", "max"} <= set(head.split()) or size[0] < 100
            assert first.startswith(">D0 ")
            assert " open " in first
            assert "█" in first or "▏" in first or "·" in first
            whole = text(pilot)
            for part in ("mean ", "p95 ", "1 truncated", "1 rejected as too_long", "w0@host0", "w1@host1"):
                assert part in whole, part
            for part in ("gpu0:30000", "gpu1:30000", "70%", "registered", "up to 1,000,000 tokens"):
                assert part in whole, part
            assert found[-1].startswith("q quit")
            move(ledger, 1)
            spent = next(d for d in [ledger.snapshot("D0")]).spent_tokens
            await until(pilot, "the next figures are there", lambda: f"{spent:,}" in text(pilot))

    run(look())


def test_keys_pause_and_resume_the_selected_dataset(settings: Settings, ledger: Ledger) -> None:
    async def steer() -> None:
        async with shown(settings) as pilot:
            await pilot.press("down", "p")
            await until(pilot, "D1 is paused", lambda: ledger.snapshot("D1").state == "paused")
            await until(
                pilot, "it is seen", lambda: any(row.startswith(">D1 ") and "paused" in row for row in rows(pilot))
            )
            await until(pilot, "it is said", lambda: "D1: paused; 0 answers in flight" in text(pilot))
            assert ledger.snapshot("D0").state == "open"
            await pilot.press("r")
            await until(pilot, "D1 is open", lambda: ledger.snapshot("D1").state == "open")
            await pilot.press("r")
            await until(pilot, "it is said", lambda: "D1: it is open already" in text(pilot))
        events = [(event.what, event.dataset) for event in last_events(settings.output, 9)]
        assert events == [("paused", "D1"), ("resumed", "D1")]

    run(steer())


def test_a_cap_is_asked_for_and_what_it_does_is_said_before(settings: Settings, ledger: Ledger) -> None:
    spent = ledger.snapshot("D0").spent_tokens

    async def ask(pilot: Pilot[None], typed: str) -> str:
        await pilot.press("c")
        await until(pilot, "it asks", lambda: isinstance(pilot.app.screen, CapScreen))
        pilot.app.screen.query_one(Input).value = typed
        await pilot.pause()
        return str(pilot.app.screen.query_one("#what", Label).render())

    async def steer() -> None:
        async with shown(settings) as pilot:
            assert f"{2_000_000 - spent:,} more than are spent" in await ask(pilot, "2M")
            await pilot.press("enter")
            await until(pilot, "the cap is there", lambda: ledger.snapshot("D0").cap_tokens == 2_000_000)
            await until(pilot, "it is said", lambda: "D0: cap 1,000,000 tokens -> 2,000,000 tokens" in text(pilot))
            assert f"{spent:,} are spent: what is there stays" in await ask(pilot, "1000")
            await pilot.press("escape")
            assert "is no number of tokens" in await ask(pilot, "many")
            await pilot.press("enter")
            await until(pilot, "it is said", lambda: "not done: 'many' is no number of tokens" in text(pilot))
            await ask(pilot, "+500k")
            await pilot.press("enter")
            await until(pilot, "the cap is there", lambda: ledger.snapshot("D0").cap_tokens == 2_500_000)

    run(steer())


def test_a_cap_that_somebody_else_has_changed_meanwhile_is_not_overwritten(settings: Settings, ledger: Ledger) -> None:
    async def steer() -> None:
        async with shown(settings) as pilot:
            await pilot.press("c")
            await until(pilot, "it asks", lambda: isinstance(pilot.app.screen, CapScreen))
            state = ledger.snapshot("D0")
            ledger.redis.hset("tokenmill:d:D0:state", "cap_tokens", 3_000_000)
            assert state.cap_tokens == 1_000_000
            pilot.app.screen.query_one(Input).value = "2M"
            await pilot.press("enter")
            await until(
                pilot, "it is said", lambda: "not done: the cap of D0 is 3,000,000 tokens by now" in text(pilot)
            )
            assert ledger.snapshot("D0").cap_tokens == 3_000_000

    run(steer())


def test_a_worker_is_drained_after_a_question(settings: Settings, ledger: Ledger) -> None:
    async def steer() -> None:
        async with shown(settings) as pilot:
            await pilot.press("d")
            await until(pilot, "it says how", lambda: "select the worker, then press d again" in text(pilot))
            await pilot.press("down", "d")
            await until(pilot, "it asks", lambda: len(pilot.app.screen_stack) == 2)
            await pilot.press("n")
            await until(pilot, "it is left alone", lambda: len(pilot.app.screen_stack) == 1)
            assert last_events(settings.output, 9) == []
            await pilot.press("d")
            await until(pilot, "it asks", lambda: len(pilot.app.screen_stack) == 2)
            await pilot.press("y")
            await until(pilot, "it is said", lambda: "w1@host1" in rows(pilot)[-2])
        assert [event.what for event in last_events(settings.output, 9)] == ["worker_draining"]

    run(steer())


def test_a_sample_opens(settings: Settings, ledger: Ledger) -> None:
    write_segment(settings.output, "w1-0.jsonl", record_line(100, dataset="D0"), dataset="D0")

    async def look() -> None:
        async with shown(settings) as pilot:
            await pilot.press("enter")
            await until(pilot, "the sample is there", lambda: "--- made by the model: 2 tokens ---" in text(pilot))
            assert isinstance(pilot.app.screen, SampleScreen)
            assert "D0/100" not in text(pilot)  # its record says A/100
            await pilot.press("i")
            await until(pilot, "the ids are there", lambda: "--- output_ids ---" in text(pilot))
            await pilot.press("t")
            await until(
                pilot, "there is none", lambda: "D0 has no answer" in text(pilot) or "has the flag" in text(pilot)
            )
            await pilot.press("escape")
            await until(pilot, "the screen is back", lambda: ">D0 " in text(pilot))

    run(look())


def test_a_terminal_that_is_too_small_says_so_until_it_is_larger(settings: Settings) -> None:
    async def look() -> None:
        async with shown(settings, (80, 24)) as pilot:
            await pilot.resize_terminal(50, 12)
            await until(pilot, "it says so", lambda: "this terminal has 50 x 12 characters" in text(pilot))
            await pilot.resize_terminal(60, 16)
            await until(pilot, "all is there", lambda: ">D0 " in text(pilot))
            assert {len(row) for row in rows(pilot)} == {60}

    run(look())


def test_redis_may_go_away_and_come_back(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="tm-") as name:
        folder = Path(name)
        server = EmbeddedRedis(folder, folder / "s").start()
        begin(Ledger.connect(f"unix://{folder / 's'}"))
        path = tmp_path / "tokenmill.toml"
        path.write_text(f'redis = "unix://{folder / "s"}"\n[tokenizer]\npath = "nowhere"\n')

        async def look() -> None:
            async with shown(load_settings(path)) as pilot:
                server.stop()
                await until(pilot, "it says so", lambda: "! Redis does not answer (" in text(pilot))
                assert ">D0 " in text(pilot)
                await pilot.press("p")
                await until(pilot, "it is not done", lambda: "not done" in text(pilot))
                server.start()
                await until(pilot, "all is well", lambda: "Redis does not answer (" not in "".join(rows(pilot)[:-3]))
                assert ">D0 " in text(pilot)

        run(look())
        server.stop()


def test_a_redis_that_stands_still_is_noticed(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="tm-") as name:
        folder = Path(name)
        server = EmbeddedRedis(folder, folder / "s").start()
        begin(Ledger.connect(f"unix://{folder / 's'}"))
        path = tmp_path / "tokenmill.toml"
        path.write_text(f'redis = "unix://{folder / "s"}"\n[tokenizer]\npath = "nowhere"\n')
        assert server.pid is not None

        async def look(pid: int) -> None:
            async with shown(load_settings(path)) as pilot:
                os.kill(pid, signal.SIGSTOP)
                await until(pilot, "it says so", lambda: "! Redis does not answer; these figures are of" in text(pilot))
                await pilot.press("tab")
                await until(pilot, "keys are heeded", lambda: ">w0@host0" in text(pilot))
                os.kill(pid, signal.SIGCONT)
                await until(pilot, "all is well", lambda: "Redis does not answer" not in text(pilot))

        run(look(server.pid))
        server.stop()


def test_before_anything_was_enqueued_it_says_so(tmp_path: Path, valkey: str, ledger: Ledger) -> None:
    path = tmp_path / "tokenmill.toml"
    path.write_text(f'redis = "{valkey}"\n[tokenizer]\npath = "nowhere"\n')

    async def look() -> None:
        top = Top(load_settings(path), Ledger.connect(valkey), RICH)
        async with top.run_test(size=(80, 24)) as pilot:
            await until(pilot, "it says so", lambda: "nothing was enqueued yet" in text(pilot))
            for key in ("p", "c", "d", "enter", "down", "tab"):
                await pilot.press(key)
            await until(pilot, "it says why not", lambda: "there is no" in rows(pilot)[-2])

    run(look())


def test_with_ascii_alone_and_without_colour_nothing_is_lost(settings: Settings) -> None:
    async def look() -> None:
        top = Top(settings, Ledger.connect(settings.redis_url), PLAIN)
        async with top.run_test(size=(80, 24)) as pilot:
            await until(pilot, "the first figures are there", lambda: "D0" in text(pilot))
            assert text(pilot).isascii()

    run(look())
