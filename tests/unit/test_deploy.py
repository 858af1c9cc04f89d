"""What docker-compose.yml, deploy/, the Makefile and the lock files promise, read from the files themselves."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.sections import WorkerSettings
from common.settings import load_settings

REPO = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((REPO / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ["control", "worker", "flower", "cli"]
REQUIRED = {
    "REDIS_PASSWORD": "r3dis",
    "TOKENMILL_FLOWER_BASIC_AUTH": "ann:fl0wer",
    "DATA_DIR": str(REPO / "examples"),
    "MODEL_DIR": str(REPO / "examples"),
}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def interpolated(text: str) -> str:
    """`text` as Compose gives it to a container where the REQUIRED variables are set and no others."""

    def value(match: re.Match[str]) -> str:
        return REQUIRED.get(match["name"]) or (match["rest"] if match["kind"] == "-" else "")

    return VARIABLE.sub(value, text)


def environment(service: str) -> dict[str, str]:
    """The environment of a service; what has no value of its own and is not set outside is absent."""
    given = SERVICES[service]["environment"]
    return {name: interpolated(value) for name, value in given.items() if value is not None}


def seconds(span: str) -> float:
    """Compose's duration, of which the file uses whole seconds alone."""
    assert span.endswith("s")
    return float(span[:-1])


def targets(service: str) -> dict[str, str]:
    """Where a service's mounts come from, by where they are seen."""
    found: dict[str, str] = {}
    for mount in SERVICES[service]["volumes"]:
        source, target = (
            (mount["source"], mount["target"]) if isinstance(mount, dict) else interpolated(mount).split(":")[:2]
        )
        found[target] = source
    return found


def outside_make() -> dict[str, str]:
    """This environment without what a make above the tests has put there."""
    return {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), continued lines joined, comments left out."""
    lines = (REPO / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, rest in words]


def test_the_services_are_the_documented_ones() -> None:
    assert set(SERVICES) == {"redis", *OURS}
    assert "version" not in COMPOSE  # obsolete: Compose warns of it
    assert SERVICES["cli"]["profiles"] == ["cli"]
    assert [name for name in SERVICES if "profiles" in SERVICES[name]] == ["cli"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    user, _, group = interpolated(service["user"]).partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert not service.get("privileged")
    assert service["restart"] == ("no" if name == "cli" else "unless-stopped")


def test_only_flower_is_published_and_on_loopback() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["flower"]
    assert [interpolated(port) for port in SERVICES["flower"]["ports"]] == ["127.0.0.1:5555:5555"]
    assert not any("network_mode" in service for service in SERVICES.values())


def test_a_worker_scales_and_may_drain() -> None:
    worker = SERVICES["worker"]
    assert not {"container_name", "ports", "hostname", "deploy"} & set(worker)
    config = tomllib.loads((REPO / "deploy" / "tokenmill.compose.toml").read_text())
    for drain_seconds in (WorkerSettings().drain_seconds, config["worker"]["drain_seconds"]):
        assert seconds(worker["stop_grace_period"]) >= drain_seconds + 10


@pytest.mark.parametrize("name", OURS)
def test_every_service_runs_its_command(name: str) -> None:
    command = SERVICES[name]["command"]
    assert command[0] == {"cli": "status"}.get(name, name)
    assert "entrypoint" not in SERVICES[name]
    # An unknown command or option is refused before --help is answered.
    tokenmill = [sys.executable, "-c", "from producer.cli.main import main; main()"]
    done = subprocess.run([*tokenmill, *command, "--help"], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_passwords_are_required_and_written_nowhere() -> None:
    required = r"\$\{REDIS_PASSWORD:\?[^}]+\}"
    assert re.fullmatch(required, SERVICES["redis"]["environment"]["REDIS_PASSWORD"])
    for name in OURS:
        assert re.fullmatch(rf"redis://:{required}@redis:6379/0", SERVICES[name]["environment"]["TOKENMILL_REDIS"])
    flower = SERVICES["flower"]["environment"]["TOKENMILL_FLOWER_BASIC_AUTH"]
    assert re.fullmatch(r"\$\{TOKENMILL_FLOWER_BASIC_AUTH:\?[^}]+\}", flower)
    for service in SERVICES.values():
        for key, value in service["environment"].items():
            if re.search("PASSWORD|AUTH|KEY|SECRET|TOKEN$", key):
                assert value is None or VARIABLE.fullmatch(value), key
        assert "${" not in str(service.get("command")), "a secret on a command line is in every process list"


def test_the_example_environment_names_every_required_variable() -> None:
    required = {match["name"] for match in VARIABLE.finditer(str(COMPOSE)) if match["kind"] == "?"}
    assert required == set(REQUIRED)
    lines = (REPO / ".env.example").read_text().splitlines()
    assert {line for line in lines if line and not line.startswith("#")} == {f"{name}=" for name in required}


def test_redis_keeps_what_it_was_given() -> None:
    lines = (REPO / "deploy" / "redis.conf").read_text().splitlines()
    settings = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert "requirepass" not in settings
    assert targets("redis") == {"/etc/redis.conf": "./deploy/redis.conf", settings["dir"]: "redis"}
    assert "redis" in COMPOSE["volumes"]


def test_redis_is_ready_before_anything_else_starts() -> None:
    assert SERVICES["redis"]["healthcheck"]["test"][0] == "CMD-SHELL"
    for name in OURS:
        assert SERVICES[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_control_workers_and_cli_share_the_answers() -> None:
    assert {targets(name)["/output"] for name in ("control", "worker", "cli", "flower")} == {"output"}
    assert "output" in COMPOSE["volumes"]
    assert set(targets("flower")) == {"/config/tokenmill.toml", "/output"}  # neither sources nor model


def test_a_server_on_the_host_can_be_reached() -> None:
    for name in OURS:
        assert SERVICES[name]["extra_hosts"] == ["host.docker.internal:host-gateway"]


@pytest.mark.parametrize("name", OURS)
def test_the_example_configuration_loads_in_every_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("TOKENMILL_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment(name).items():
        monkeypatch.setenv(variable, value)
    assert environment(name)["TOKENMILL_CONFIG"] == "/config/tokenmill.toml"
    assert targets(name)["/config/tokenmill.toml"] == "${CONFIG_FILE:-./deploy/tokenmill.compose.toml}"
    settings = load_settings(REPO / "deploy" / "tokenmill.compose.toml")
    assert settings.redis == "redis://:r3dis@redis:6379/0"
    assert settings.server.urls == ["http://host.docker.internal:30000"]
    assert settings.output == Path("/output")
    assert settings.tokenizer.path == Path("/model")
    assert [Path(dataset.path).parent for dataset in settings.datasets] == [Path("/data")]


def test_compose_accepts_the_file() -> None:
    if (docker := shutil.which("docker")) is None:
        pytest.skip("no docker here")
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("docker has no compose here")
    config = [docker, "compose", "--file", str(REPO / "docker-compose.yml"), "--profile", "cli", "config", "--quiet"]
    clean = {name: value for name, value in os.environ.items() if name not in REQUIRED}
    empty = subprocess.run(config, env=clean | dict.fromkeys(REQUIRED, ""), capture_output=True, text=True, check=False)
    assert empty.returncode != 0
    assert "set it in .env" in empty.stderr
    done = subprocess.run(config, env=clean | REQUIRED, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_runs_tokenmill_without_root() -> None:
    steps = instructions()
    last = steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert [rest for word, rest in last if word == "ENTRYPOINT"] == ['["tokenmill"]']
    assert last.index(("USER", "10001:10001")) > max(i for i, (word, _) in enumerate(last) if word in {"RUN", "COPY"})
    assert {word for word, _ in steps}.isdisjoint({"ADD", "ARG"})


def test_the_image_is_built_from_the_lock_alone() -> None:
    runs = [command for word, rest in instructions() if word == "RUN" for command in rest.split("&&")]
    installs = [command for command in runs if re.search(r"\bpip\b.*\b(install|wheel)\b", command)]
    assert any("install --require-hashes -r requirements.lock" in command for command in installs)
    assert all("--require-hashes" in command or "--no-deps" in command for command in installs)
    assert all("--no-build-isolation" in command for command in installs if " wheel " in command)


def test_the_build_context_holds_what_the_image_copies_and_nothing_else() -> None:
    copies = [rest for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for rest in copies for source in rest.split()[:-1]}
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == sources
    assert [source for source in sorted(sources) if not (REPO / source).exists()] == []


def test_the_wheel_holds_scripts_and_examples(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    scripts = {path.relative_to(REPO).as_posix() for path in (REPO / "common" / "ledger" / "scripts").glob("*.lua")}
    prompts = {f"producer/_examples/prompts/{path.name}" for path in (REPO / "examples" / "prompts").glob("*.jsonl")}
    assert scripts
    assert prompts
    assert scripts | prompts <= names
    assert {"common/py.typed", "workers/py.typed", "producer/py.typed"} <= names
    packages = {name.split("/")[0] for name in names if not name.startswith("tokenmill-")}
    assert packages == {"common", "workers", "producer"}


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_lock_files_pin_by_hash_and_hold_no_address(lock: str) -> None:
    text = (REPO / lock).read_text()
    assert "://" not in text
    pins = [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    assert pins
    assert [pin for pin in pins if not re.match(r"[A-Za-z0-9._-]+==\S+( ; .*)? \\$", pin)] == []
    assert text.count("--hash=sha256:") >= len(pins)


def test_the_development_lock_holds_the_build_backend() -> None:
    text = (REPO / "requirements-dev.lock").read_text()
    assert "\nhatchling==" in text


@pytest.mark.parametrize("target", ["demo", "test", "check", "venv", "lock", "clean", "help"])
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target], cwd=REPO, env=outside_make(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        ("exit 1", "is missing or older than Python 3.11; install one (apt install python3 python3-venv)"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "cannot make a virtual environment; install its venv module"),
    ],
)
def test_make_says_what_to_install(python: str, sentence: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock"):
        shutil.copy(REPO / name, tmp_path)
    stub = tmp_path / "python3"
    stub.write_text(f"#!/bin/sh\n{python}\n")
    stub.chmod(0o755)
    make = ["make", "demo", f"PYTHON={stub}"]
    done = subprocess.run(make, cwd=tmp_path, env=outside_make(), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_make_runs_and_ends_with_the_tests() -> None:
    script = REPO / ".ci" / "run"
    lines = script.read_text().splitlines()
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in lines
    assert [line for line in lines if re.match(r"(step|exec) make", line)] == [
        "step make venv",
        "step make check",
        "step make chaos SEED=4 MINUTES=3",
        "step make trainers-check TRAINERS=specforge",
        "exec make test",
    ]
    assert lines[-1] == "exec make test"
