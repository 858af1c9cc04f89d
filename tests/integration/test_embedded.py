"""The embedded Valkey keeps what was written, has one owner, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from common.errors import RedisUnavailable, UsageError
from common.ledger import Ledger
from common.sections import TokenizerSettings
from common.settings import MAX_SOCKET_PATH, Settings
from producer.embedded import EmbeddedRedis, answers, owned, reachable
from tests.conftest import REPO, wait_until

# A `run` that is killed: it starts the server, says its pid, and is never told to stop it.
OWNER = """
import sys, time
from pathlib import Path
from common.sections import TokenizerSettings
from common.settings import Settings
from producer.embedded import owned

settings = Settings(output=Path(sys.argv[1]), tokenizer=TokenizerSettings(path=Path("tok")))
with owned(settings) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""

# A command that starts the server for itself, and is at it for long: `status --follow`.
BORROWER = """
import sys, time
from pathlib import Path
from common.ledger import Ledger
from common.sections import TokenizerSettings
from common.settings import Settings
from producer.embedded import reachable

settings = Settings(output=Path(sys.argv[1]), tokenizer=TokenizerSettings(path=Path("tok")))
with reachable(settings):
    print(Ledger.connect(settings.redis_url).redis.info("server")["process_id"], flush=True)
    time.sleep(600)
"""


def settings_for(output: Path) -> Settings:
    return Settings(output=output, tokenizer=TokenizerSettings(path=Path("tok")))


@pytest.fixture
def settings() -> Iterator[Settings]:
    """A configuration whose output folder has a path short enough for a socket."""
    with TemporaryDirectory(prefix="tm-") as folder:
        yield settings_for(Path(folder) / "out")


@pytest.fixture
def kill_later() -> Iterator[Callable[[int], None]]:
    """Note processes that must not outlive the test, however it ends."""
    pids: list[int] = []
    yield pids.append
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs: one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:  # no /proc here
        return Path("/proc/self").exists() is False
    except ProcessLookupError:
        return False


def put(settings: Settings, value: str) -> None:
    ledger = Ledger.connect(settings.redis_url)
    ledger.set_model({"model_path": value})
    ledger.close()


def got(settings: Settings) -> str | None:
    ledger = Ledger.connect(settings.redis_url)
    model = ledger.model()
    ledger.close()
    return model["model_path"] if model else None


def kill(server: EmbeddedRedis) -> int:
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_an_owned_server_lives_as_long_as_its_owner(settings: Settings) -> None:
    with owned(settings) as server:
        pid = server.pid
        assert pid is not None
        assert answers(settings.redis_socket)
        put(settings, "/m")

    assert not alive(pid)
    assert server.pid is None
    assert not settings.redis_socket.exists()
    with owned(settings):
        assert got(settings) == "/m"


def test_a_server_is_stopped_when_its_run_fails(settings: Settings) -> None:
    pids = []

    def run() -> None:
        with owned(settings) as server:
            pids.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    (pid,) = pids
    assert pid is not None
    assert not alive(pid)


def test_a_killed_server_comes_back_with_what_was_written(settings: Settings) -> None:
    with owned(settings) as server:
        put(settings, "/written")
        assert not server.restart_if_dead()
        killed = kill(server)

        wait_until("the server was found dead and started again", server.restart_if_dead)
        assert server.pid != killed
        assert got(settings) == "/written"
        assert not server.restart_if_dead()


def test_a_ledger_goes_on_over_the_restart_of_its_server(settings: Settings) -> None:
    with owned(settings) as server:
        ledger = Ledger.connect(settings.redis_url)
        ledger.set_model({"n": 1})
        kill(server)
        wait_until("the server was found dead and started again", server.restart_if_dead)

        assert ledger.model() == {"n": 1}
        ledger.close()


def test_the_server_never_drops_keys_and_opens_no_port(settings: Settings) -> None:
    with owned(settings):
        client = redis.Redis(unix_socket_path=str(settings.redis_socket))
        options = client.config_get("maxmemory-policy", "appendonly", "appendfsync", "port", "dir")
        client.close()

    assert options == {
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "port": "0",
        "dir": str(settings.redis_dir),
    }


def test_a_second_run_on_the_same_output_is_refused(settings: Settings) -> None:
    with owned(settings) as server:
        with (
            pytest.raises(UsageError, match=r"another tokenmill runs on .*; wait for it, or choose another"),
            owned(settings),
        ):
            pytest.fail("two runs own one output folder")
        assert server.pid is not None
        assert answers(settings.redis_socket)


def test_two_outputs_have_a_server_each(settings: Settings) -> None:
    other = settings_for(settings.output.with_name("other"))
    with owned(settings), owned(other):
        put(settings, "/a")
        put(other, "/b")

        assert (got(settings), got(other)) == ("/a", "/b")


def test_the_owner_is_killed_and_the_next_run_ends_its_server(
    settings: Settings, kill_later: Callable[[int], None]
) -> None:
    command = [sys.executable, "-c", OWNER, str(settings.output)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        orphan = int(owner.stdout.readline())
        kill_later(owner.pid)
        kill_later(orphan)
        put(settings, "/kept")
        owner.kill()
    assert alive(orphan)

    with owned(settings) as server:
        assert server.pid != orphan
        assert not alive(orphan)
        assert got(settings) == "/kept"


def test_an_orphan_that_does_not_end_is_not_joined_by_a_second_server(settings: Settings) -> None:
    with owned(settings):
        # A server that refuses SHUTDOWN, and whose owner holds no lock any more.
        client = redis.Redis(unix_socket_path=str(settings.redis_socket))
        client.acl_setuser("default", enabled=True, commands=["-shutdown"])
        (settings.redis_dir / "lock").unlink()

        with pytest.raises(RedisUnavailable, match=r"does not end .*; end it by hand"), owned(settings):
            pytest.fail("two servers write one append-only file")
        client.acl_setuser("default", enabled=True, commands=["+shutdown"])
        client.close()


def test_a_command_uses_the_server_that_runs(settings: Settings) -> None:
    with owned(settings) as server:
        put(settings, "/m")
        with reachable(settings):
            assert got(settings) == "/m"
        assert answers(settings.redis_socket)
        assert server.pid is not None


def test_a_command_starts_a_server_where_none_runs_and_ends_it(settings: Settings) -> None:
    with owned(settings):
        put(settings, "/m")

    with reachable(settings):
        assert got(settings) == "/m"
    assert not answers(settings.redis_socket)


def test_a_command_says_so_where_nothing_was_run(settings: Settings) -> None:
    with (
        pytest.raises(RedisUnavailable, match=r"nothing was run yet in .*; start with `tokenmill run`"),
        reachable(settings),
    ):
        pytest.fail("there is nothing to reach")
    assert not settings.output.exists()


def test_a_command_says_so_where_the_data_of_redis_is_gone(settings: Settings) -> None:
    """It said that nothing was run yet, with hundreds of records there."""
    segment = settings.output / "A" / "w1-1.jsonl"
    for made in (settings.output / "run.json", segment):
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("")
        gone = r"is gone from .*, but what was made is .*`tokenmill recover`"
        with pytest.raises(RedisUnavailable, match=gone), reachable(settings):
            pytest.fail("there is nothing to reach")
        made.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_of_a_command_ends_with_it_however_it_ends(
    settings: Settings, kill_later: Callable[[int], None], number: signal.Signals
) -> None:
    with owned(settings):
        put(settings, "/m")
    command = [sys.executable, "-c", BORROWER, str(settings.output)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as borrower:
        assert borrower.stdout is not None
        server = int(borrower.stdout.readline())
        kill_later(borrower.pid)
        kill_later(server)
        assert alive(server)
        borrower.send_signal(number)
    wait_until("its server has ended", lambda: not alive(server))
    with reachable(settings):
        assert got(settings) == "/m"


def test_a_redis_of_their_own_is_not_looked_at(settings: Settings) -> None:
    theirs = settings.model_copy(update={"redis": "redis://elsewhere:1"})

    with reachable(theirs):
        assert not settings.output.exists()


def test_an_output_folder_with_a_long_path_has_a_server_too(settings: Settings) -> None:
    long = settings_for(settings.output / ("x" * 100) / ("y" * 100))

    with owned(long):
        assert len(os.fsencode(long.redis_socket)) <= MAX_SOCKET_PATH
        put(long, "/m")
        assert got(long) == "/m"
    assert not long.redis_socket.exists()


def test_a_server_that_cannot_start_names_its_log(settings: Settings) -> None:
    settings.redis_dir.mkdir(parents=True)
    (settings.redis_dir / "appendonlydir").write_text("not a folder")

    with (
        pytest.raises(RedisUnavailable, match=r"the embedded Redis did not start; .*valkey\.log says why"),
        owned(settings),
    ):
        pytest.fail("it has no place for its data")
    assert not answers(settings.redis_socket)
    assert (settings.redis_dir / "valkey.log").read_text()
