"""What the tests of the dashboard share: the app that is shown, its workers, and a browser."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from fanout_procrastinate import FanOut, Run
from tests.apps import journal, shown
from tests.web.served import Served
from tests.workers import Worker

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


class Stage:
    """The app `tests.apps.shown` on the test's database: start runs, workers and dashboards."""

    def __init__(self, dsn: str, workers: Callable[..., Worker], folder: Path) -> None:
        self.dsn = dsn
        self.log = journal.Journal(folder / "journal")
        self._workers = workers
        self._served: list[Served] = []

    def worker(self, concurrency: int = 4) -> Worker:
        return self._workers(
            "tests.apps.shown.app",
            queues=shown.QUEUE,
            concurrency=concurrency,
            env={journal.VARIABLE: str(self.log.path)},
        ).wait_ready()

    def run(self, pages: Iterable[shown.Page], **options: Any) -> Run:
        given = [page.model_dump(exclude_defaults=True) for page in pages]
        return shown.read_pages.configure(**options).defer(pages=given)

    def dashboard(self, *arguments: str, **options: Any) -> Served:
        self._served.append(Served(self.dsn, arguments, **options))
        return self._served[-1].wait_ready()

    def close(self) -> None:
        for one in self._served:
            print(f"--- dashboard {one.pid}\n{one.output()}")
            one.close()


@contextlib.contextmanager
def staged(dsn: str, workers: Callable[..., Worker], folder: Path) -> Iterator[Stage]:
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with shown.app.replace_connector(connector), shown.app.open():
        made = Stage(dsn, workers, folder)
        yield made
        made.close()
        FanOut.of(shown.app).close()


@pytest.fixture
def stage(dsn: str, workers: Callable[..., Worker], tmp_path: Path) -> Iterator[Stage]:
    with staged(dsn, workers, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",  # it is not made for root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_window_size(1280, 900)
    yield driver
    driver.quit()


@pytest.fixture
def browser(_driver: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """A real browser without a screen; what it complained about fails the test."""
    yield _driver
    # Who leaves a page while it asks for something ends that request; htmx calls it an error.
    complaints = [
        line
        for line in _driver.get_log("browser")
        if line["level"] == "SEVERE" and "htmx:sendAbort" not in line["message"]
    ]
    _driver.get("about:blank")
    _driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    _driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    _driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert not complaints
