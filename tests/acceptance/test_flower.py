"""Flower's real pages in a real browser: the worker and its tasks are there, and its buttons reach the worker."""

import os
import shutil
import socket
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By

from tests.conftest import PATIENCE_SECONDS, REPO, wait_until
from tests.faults.apart import Apart
from tests.faults.harness import TOKENMILL, Simulator

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not here")
PASSWORD = "operator:secret"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    quiet = ("disable-background-networking", "disable-component-update", "disable-sync", "no-first-run")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", *quiet):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path}/browser")
    options.add_argument("--window-size=1600,900")
    driver = Chrome(options=options, service=ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Apart]:
    server = Simulator(tmp_path).start()
    job = Apart(tmp_path, [server], rows=60)
    yield job
    job.end_all()
    server.kill()


@contextmanager
def flower(job: Apart, *options: str, password: str = "") -> Iterator[str]:
    """`tokenmill flower`, ended with TERM; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"TOKENMILL_FLOWER_BASIC_AUTH": password}
    log = job.output / "flower.log"
    with log.open("ab") as said:
        process = subprocess.Popen(
            [*TOKENMILL, "flower", "--port", str(port), *options, "-c", str(job.config)],
            cwd=REPO,
            env=environment,
            stdout=said,
            stderr=said,
        )

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until("Flower listens", listens, PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def rows(browser: Chrome, url: str) -> list[list[str]]:
    """The cells of the table on a page, loaded anew."""
    browser.get(url)

    def found() -> list[list[str]]:
        try:
            lines = browser.find_elements(By.CSS_SELECTOR, "table tbody tr")
            return [[cell.text for cell in line.find_elements(By.TAG_NAME, "td")] for line in lines]
        except StaleElementReferenceException:
            return []

    wait_until(f"{url} has a table", lambda: any(len(row) > 3 for row in found()), PATIENCE_SECONDS)
    return found()


def worker_of(job: Apart) -> dict[str, Any]:
    [worker] = job.seen()["workers"]
    return dict(worker)


def test_the_worker_and_its_tasks_are_there_and_still_after_a_restart(job: Apart, browser: Chrome) -> None:
    job.valkey.start()
    job.start_part("control")
    with flower(job) as url:
        job.start_part("worker", options=("--name", "mill-1"))
        wait_until("the worker is there", lambda: any("mill-1" in cell for row in rows(browser, url) for cell in row))
        job.enqueue()
        job.wait_for("all is done", lambda state: state.state == "exhausted")
        done = [row for row in rows(browser, f"{url}/tasks") if row[0] == "generate"]
        wait_until("a finished task is told", lambda: any("SUCCESS" in row for row in done))
        shown = " | ".join(next(row for row in done if "SUCCESS" in row))
        # Dataset and rows; tokens, how they ended and where; the worker.
        server = job.servers[0].url.removeprefix("http://")
        assert "A " in shown
        assert " tokens: " in shown
        assert "stop" in shown
        assert server in shown
        assert "mill-1" in shown
        if keep := os.environ.get("PICTURE"):
            browser.save_screenshot(keep)
    with flower(job) as url:  # what it had seen is there again
        assert any(shown.split(" | ")[1] in row for row in rows(browser, f"{url}/tasks"))


def test_grow_and_shrink_move_the_workers_limit_where_that_was_asked_for(job: Apart, browser: Chrome) -> None:
    job.valkey.start()
    job.start_part("control")
    job.enqueue()
    job.start_part("worker", options=("--name", "mill-2"))
    wait_until("the worker is there", lambda: job.seen()["workers"])
    assert worker_of(job)["concurrency"] == 32
    name = worker_of(job)["name"]
    with flower(job, "--operate", password=PASSWORD) as url:
        with pytest.raises(HTTPError, match="401"):
            urlopen(url, timeout=10)
        browser.execute_cdp_cmd("Network.enable", {})
        header = {"Authorization": f"Basic {b64encode(PASSWORD.encode()).decode()}"}
        browser.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": header})
        wait_until("Flower knows it", lambda: any(name in cell for row in rows(browser, url) for cell in row))
        browser.get(f"{url}/worker/{name}")
        for button, wanted in (("worker-pool-grow", 33), ("worker-pool-shrink", 32)):
            wait_until("there is a button", lambda b=button: browser.find_elements(By.ID, b))  # type: ignore[misc]
            browser.find_element(By.ID, button).click()
            wait_until("it has another limit", lambda w=wanted: worker_of(job)["concurrency"] == w)  # type: ignore[misc]
    with flower(job) as url:
        rows(browser, url)
        browser.get(f"{url}/worker/{name}")
        assert browser.find_elements(By.ID, "worker-pool-grow") == []
