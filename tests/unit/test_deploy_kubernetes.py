"""What deploy/kubernetes and deploy/systemd promise, read from the files and compared with the code."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from common.parent import DISMISSED
from common.sections import WorkerSettings
from common.settings import load_settings
from producer.cli.main import cli
from producer.metrics import Snapshots
from tests.conftest import REPO

KUBERNETES = REPO / "deploy" / "kubernetes"
SYSTEMD = REPO / "deploy" / "systemd"
OURS = ("control", "worker")
PROGRAM = "/opt/tokenmill/bin/tokenmill"


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """Every object that the kustomization names, by kind and name."""
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    read = [one for name in kustomization["resources"] for one in yaml.safe_load_all((KUBERNETES / name).read_text())]
    found = {(one["kind"], one["metadata"]["name"]): one for one in read}
    assert len(found) == len(read)
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects()["StatefulSet" if name == "redis" else "Deployment", name]["spec"]["template"][
        "spec"
    ]
    return spec


def container(name: str) -> dict[str, Any]:
    (one,) = pod(name)["containers"]
    return dict(one)


def metric_names() -> set[str]:
    """The names that /metrics has of a job with nothing in it."""
    seen = {"datasets": [], "workers": [], "servers": [], "totals": {"failed_attempts": {}}, "troubles": []}
    return {metric.name for metric in Snapshots(lambda: seen, Path()).collect()}


def test_every_file_of_the_folder_is_named_by_the_kustomization() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    named = {
        *kustomization["resources"],
        *(file for one in kustomization["configMapGenerator"] for file in one["files"]),
    }
    assert {path.name for path in KUBERNETES.iterdir()} == {"kustomization.yaml", *named}
    assert set(objects()) == {
        *(("PersistentVolumeClaim", name) for name in ("output", "data", "model")),
        *(("Service", name) for name in ("redis", "control")),
        ("ConfigMap", "redis"),
        ("StatefulSet", "redis"),
        *(("Deployment", name) for name in OURS),
        ("ScaledObject", "worker"),
    }


def test_kustomize_builds_it() -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len(built) == len(objects()) + 1  # and the configuration
    assert {one["metadata"]["namespace"] for one in built} == {"tokenmill"}


@pytest.mark.parametrize("name", OURS)
def test_every_pod_runs_its_command_with_the_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = container(name)
    assert one["image"] == "tokenmill"
    assert "command" not in one  # the image's entry point is tokenmill (test_deploy.py)
    assert CliRunner().invoke(cli, [*one["args"], "--help"]).exit_code == 0
    given = {variable["name"]: variable for variable in one["env"]}
    assert given["REDIS_PASSWORD"]["valueFrom"] == {"secretKeyRef": {"name": "tokenmill", "key": "redis-password"}}
    assert list(given).index("REDIS_PASSWORD") < list(given).index("TOKENMILL_REDIS")  # $(...) names an earlier one
    for variable in given.values():
        if variable["name"].startswith("TOKENMILL_"):
            monkeypatch.setenv(variable["name"], variable["value"].replace("$(REDIS_PASSWORD)", "r3dis"))
    mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
    folder, _, file = given["TOKENMILL_CONFIG"]["value"].rpartition("/")
    assert mounts[folder]["name"] == "config"
    settings = load_settings(KUBERNETES / file)
    assert settings.redis == "redis://:r3dis@redis:6379/0"
    wanted = {str(settings.output), str(settings.tokenizer.path), str(Path(settings.datasets[0].path).parent), "/tmp"}
    assert wanted | {folder} == set(mounts)
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {str(settings.output), "/tmp"}


@pytest.mark.parametrize("name", ["redis", *OURS])
def test_every_pod_is_confined_and_has_its_volumes(name: str) -> None:
    spec, one = pod(name), container(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in one["resources"]["limits"]
    claims = {name for kind, name in objects() if kind == "PersistentVolumeClaim"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    templates = objects()["StatefulSet", "redis"]["spec"]["volumeClaimTemplates"] if name == "redis" else []
    assert {mount["name"] for mount in one["volumeMounts"]} == {*volumes, *(t["metadata"]["name"] for t in templates)}
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_a_worker_may_drain_before_it_is_killed() -> None:
    settings = load_settings(KUBERNETES / "tokenmill.toml")
    assert pod("worker")["terminationGracePeriodSeconds"] >= settings.worker.drain_seconds + 30


def test_keda_scales_the_workers_by_a_metric_that_there_is() -> None:
    spec = objects()["ScaledObject", "worker"]["spec"]
    assert ("Deployment", spec["scaleTargetRef"]["name"]) in objects()
    assert "replicas" not in objects()["Deployment", "worker"]["spec"]  # each apply would undo what KEDA has set
    (trigger,) = spec["triggers"]
    metadata = trigger["metadata"]
    assert trigger["type"] == "metrics-api"
    assert all(isinstance(value, str) for value in metadata.values())
    assert metadata["format"] == "prometheus"
    assert metadata["valueLocation"] in metric_names()
    service, namespace, port = re.fullmatch(r"http://([a-z]+)\.([a-z]+)\.svc:(\d+)/metrics", metadata["url"]).groups()  # type: ignore[union-attr]
    assert namespace == yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["namespace"]
    served = objects()["Service", service]["spec"]
    assert [one["port"] for one in served["ports"]] == [int(port)]
    assert served["selector"] == objects()["Deployment", "control"]["spec"]["template"]["metadata"]["labels"]
    (listens,) = (one["value"] for one in container("control")["env"] if one["name"] == "TOKENMILL_CONTROL__METRICS")
    assert listens == f"0.0.0.0:{port}"
    assert container("control")["ports"] == [{"name": "metrics", "containerPort": int(port)}]


def test_redis_is_as_in_the_compose_file() -> None:
    def settings(text: str) -> dict[str, str]:
        return dict(line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))

    ours = objects()["ConfigMap", "redis"]["data"]["redis.conf"]
    assert settings(ours) == settings((REPO / "deploy" / "redis.conf").read_text())
    compose = yaml.safe_load((REPO / "docker-compose.yml").read_text())["services"]["redis"]
    assert container("redis")["image"] == compose["image"]
    assert container("redis")["command"][2] == compose["command"][2].replace("$$", "$").replace(
        "/etc/redis.conf", "/etc/redis/redis.conf"
    )


def unit(name: str) -> configparser.ConfigParser:
    # Whole-line comments alone, and keys that may stand twice are not used.
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.mark.parametrize("name", ["tokenmill-control.service", "tokenmill-worker@.service"])
def test_systemd_takes_the_units(name: str, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze here")
    path = tmp_path / name.replace("@.", "@w1.")
    path.write_text((SYSTEMD / name).read_text().replace(PROGRAM, sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["tokenmill-control.service", "tokenmill-worker@.service"])
def test_every_unit_runs_its_command_as_nobody_special(name: str) -> None:
    service = unit(name)["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program == PROGRAM
    assert CliRunner().invoke(cli, [*arguments, "--help"]).exit_code == 0
    assert service["User"] == "tokenmill"
    assert service["Restart"] == "always"
    assert service["KillMode"] == "mixed"


def test_a_worker_that_a_person_has_ended_is_not_started_again_and_may_drain() -> None:
    service = unit("tokenmill-worker@.service")["Service"]
    assert service["RestartPreventExitStatus"] == service["SuccessExitStatus"] == str(DISMISSED)
    assert int(service["TimeoutStopSec"]) >= WorkerSettings().drain_seconds + 20
