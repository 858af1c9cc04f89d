"""An export pushed to a hub, with the hub's own client; the hub is a small one that takes commits."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.conftest import REPO
from tests.lines import record_line, write_config, write_segment


class Hub(ThreadingHTTPServer):
    """Knows the repositories that were made, and the files of each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.made: list[dict[str, Any]] = []
        self.commits: list[dict[str, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _answer(self, value: Any, status: int = 200, code: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        self._answer({"error": "Repository not found"}, 404, "RepoNotFound")

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        if self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self._answer({"url": f"{hub.url}/datasets/me/mine"})
        elif self.path == "/api/datasets/me/mine/preupload/main":
            asked = json.loads(body)["files"]
            how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._answer({"files": [{"path": one["path"], **how} for one in asked]})
        elif self.path == "/api/datasets/me/mine/commit/main":
            lines = [json.loads(line) for line in body.split(b"\n") if line]
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.commits.append({one["path"]: base64.b64decode(one["content"]) for one in files})
            url = f"{hub.url}/datasets/me/mine/commit/{'0' * 40}"
            self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""})
        else:
            self._answer({"error": self.path}, 404)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def push(folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    write_segment(folder / "out", "a-0.jsonl", record_line(0), record_line(1))
    write_config(folder)
    told = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HOME": str(folder / "home"), "PYTHONPATH": str(REPO)}
    command = ["-m", "producer.cli.main", "export", "-o", "train", "--push", "hf://datasets/me/mine"]
    environment = {**os.environ, **told}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=90
    )


def test_a_hub_gets_all_files_in_one_commit_of_a_private_data_set(tmp_path: Path, hub: Hub) -> None:
    done = push(tmp_path, hub.url)
    assert done.returncode == 0, done.stderr
    assert [(one["organization"], one["name"], one["visibility"], one["type"]) for one in hub.made] == [
        ("me", "mine", "private", "dataset")
    ]
    train = tmp_path / "train"
    paths = ["ids/train.jsonl", "manifest.json", "token_counts.json"]
    assert hub.commits == [{path: (train / path).read_bytes() for path in paths}]
    assert done.stderr.splitlines()[-1] == "pushed to hf://datasets/me/mine"


def test_a_hub_that_is_away_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    done = push(tmp_path, f"http://127.0.0.1:{port}")
    assert done.returncode == 4, done.stderr
    assert "hf://datasets/me/mine cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "train").exists()
