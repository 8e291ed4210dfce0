"""The pages in a real browser: live to the end, control, a log that streams, nothing executed."""

import base64
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from procrastinate.schema import SchemaManager
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from fanout_procrastinate import schema
from tests.apps.shown import HOSTILE, Page
from tests.servers import Server
from tests.waiting import wait_until
from tests.web.conftest import Stage, staged
from tests.web.served import TOKEN, Served
from tests.workers import ROOT, Worker

pytestmark = [pytest.mark.acceptance, pytest.mark.pg18_only]

SCREENSHOTS = ROOT / "build/screenshots"


class Reader:
    """Somebody with a browser."""

    def __init__(self, driver: webdriver.Chrome, served: Served) -> None:
        self.driver = driver
        self.served = served

    def open(self, path: str) -> None:
        self.driver.get(f"{self.served.url}{path}")
        # Gone if the page is ever loaded again.
        self.driver.execute_script("window.sameVisit = true")

    def same_visit(self) -> bool:
        return bool(self.driver.execute_script("return window.sameVisit === true"))

    def text(self, selector: str) -> str:
        """The text of the first such element; empty while it is being replaced."""
        found: str | None = self.driver.execute_script(
            "return document.querySelector(arguments[0])?.innerText", selector
        )
        return found or ""

    def value(self, selector: str) -> Any:
        return self.driver.execute_script(
            "return document.querySelector(arguments[0])?.value", selector
        )

    def see(self, selector: str, text: str, timeout: float = 20.0) -> None:
        wait_until(lambda: text in self.text(selector), timeout, f"{selector} shows {text!r}")

    def look_often(self) -> None:
        """Let the page ask for its fragments as often as on a busy run."""
        self.driver.execute_script(
            "setInterval(() => htmx.trigger(document.body, 'fanout:refresh'), 500)"
        )

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        """Click on what is there; fragments may be replaced meanwhile."""

        def clicked() -> bool:
            return bool(
                self.driver.execute_script(
                    "const one = document.querySelector(arguments[0]);"
                    "one?.click(); return one !== null",
                    selector,
                )
            )

        wait_until(clicked, message=f"{selector} can be clicked on")

    def press(self, *keys: str) -> str:
        """Press keys, and tell what has the focus then: by its id, or its text."""
        ActionChains(self.driver).send_keys(*keys).perform()
        found: str = self.driver.execute_script(
            "return document.activeElement.id || document.activeElement.innerText"
        )
        return found

    def log_in(self) -> None:
        self.open("/login")
        self.driver.find_element(By.NAME, "token").send_keys(TOKEN)
        self.driver.find_element(By.CSS_SELECTOR, "main form button").click()
        wait_until(lambda: self.text(".top button") == "Log out")

    def do(self, action: str) -> None:
        """Press a button, and answer its question with yes."""
        self.click(f"#ask-{action}")
        dialog = f"#dialog-{action}"
        wait_until(lambda: self.count(f"{dialog}[open]"))
        self.driver.find_element(
            By.CSS_SELECTOR, f"{dialog} .buttons button:not([data-closes])"
        ).click()


@pytest.fixture
def reader(stage: Stage, browser: webdriver.Chrome) -> Reader:
    return Reader(browser, stage.dashboard())


def test_run_is_watched_to_its_end(stage: Stage, reader: Reader) -> None:
    """G08: the page follows a run of 300 items to its last state without being loaded again."""
    run = stage.run([Page(name=f"page {n:03}", sleep=0.05) for n in range(300)])
    reader.open("/")
    reader.see("#runs", "pending")
    reader.open(f"/runs/{run.id}")
    reader.see("#connection", "live")
    seen = set()

    def finished() -> bool:
        seen.add(reader.text(".percent"))
        return reader.text(".percent") == "100%" and reader.text("h1 ~ .chips") == "completed"

    stage.worker(concurrency=8)
    wait_until(finished, 30.0)
    reader.see("#connection", "closed")
    assert reader.text(".counts .succeeded") == "300 succeeded"
    reader.see("#items tbody tr:first-child", "succeeded")
    assert len(seen) > 3, seen
    assert reader.same_visit()
    assert reader.count(".chart rect") > 3
    reader.click("a[rel=next]")
    reader.see("#items tbody tr:first-child", "page 050")


def test_control_from_the_page(stage: Stage, reader: Reader) -> None:
    """F09: pause, resume, limit, cancel and retry, each after a question."""
    run = stage.run(
        [Page(name="bad", fails="torn")]
        + [Page(name=f"page {n}", waits_for="gate") for n in range(20)],
        max_in_flight=2,
    )
    stage.worker()
    reader.open(f"/runs/{run.id}")
    assert reader.count(".actions button") == 0  # nobody has entered the token
    reader.log_in()
    reader.open(f"/runs/{run.id}")
    reader.see(".counts .failed", "1 failed")

    reader.click("#ask-pause")
    reader.click("#dialog-pause [data-closes]")  # rather not
    assert not run.progress().paused
    reader.do("pause")
    reader.see(".notice", "paused")
    assert run.progress().paused
    reader.do("resume")
    reader.see(".notice", "goes on")
    assert not run.progress().paused

    reader.click("#ask-update")
    field = reader.driver.find_element(By.NAME, "max_in_flight")
    field.clear()
    field.send_keys("3")
    reader.driver.find_element(By.CSS_SELECTOR, "#dialog-update button.primary").click()
    reader.see("[aria-labelledby=slots-title]", "of 3 at work")

    reader.click("#ask-cancel")
    reader.driver.find_element(By.NAME, "reason").send_keys("wrong <b>folder</b>")
    reader.driver.find_element(By.CSS_SELECTOR, "#dialog-cancel button.danger").click()
    reader.see(".notice", "cancelled")
    stage.log.arrive("gate")
    reader.see("h1 ~ .chips", "cancelled")
    reader.see(".reason", "wrong <b>folder</b>")

    reader.do("retry")  # opens it again
    reader.see(".notice", "tried again")
    wait_until(lambda: run.progress().generation == 2)
    reader.see("h1 ~ .chips", "generation 2")


def test_log_streams_and_nothing_is_executed(stage: Stage, reader: Reader) -> None:
    """G12: names, errors and log lines are text, whatever they hold."""
    run = stage.run(
        [
            Page(name=HOSTILE, says=HOSTILE, waits_for="gate", fails=HOSTILE),
            Page(name="kind", says="reading\n the page", waits_for="gate"),
            Page(name="last", tells=0.25, waits_for="end"),
        ],
        tags=[HOSTILE],
    )
    reader.open(f"/runs/{run.id}")
    reader.see("#connection", "live")
    stage.worker()
    reader.see("#log", "reading the page")
    reader.see("#log", HOSTILE)
    reader.see("[aria-labelledby=slots-title]", HOSTILE[:40])
    bar = ".fraction[data-position='2']:not([hidden])"
    wait_until(lambda: reader.value(bar) == 0.25)
    stage.log.arrive("gate")
    reader.see("#log .bad", f"PermanentError: {HOSTILE}")
    reader.see("[aria-labelledby=errors-title]", HOSTILE)
    reader.see("#items", HOSTILE[:60])
    assert reader.same_visit()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    _screenshot(reader.driver, SCREENSHOTS / "log-light-1280.png")

    Select(
        reader.driver.find_element(By.CSS_SELECTOR, "#items-filter select")
    ).select_by_visible_text("failed")
    wait_until(lambda: reader.count("#items tbody tr") == 1)
    search = reader.driver.find_element(By.NAME, "search")
    search.send_keys("no such thing")
    reader.see("#items", "No items like that")
    assert reader.same_visit()
    stage.log.arrive("end")
    reader.open(f"/runs/{run.id}/items/0")
    reader.see("h1", HOSTILE[:60])
    reader.see("[aria-labelledby=error-title]", HOSTILE)
    assert "PermanentError" in reader.text("[aria-label=Traceback]")
    reader.open("/")
    reader.see("#runs", "shown.read_pages")
    assert "stolen" not in reader.driver.title


def test_database_that_goes_away_shows_and_comes_back(
    own_server: Callable[..., Server],
    workers: Callable[..., Worker],
    browser: webdriver.Chrome,
    tmp_path: Path,
) -> None:
    """Nobody takes old figures for live ones."""
    server = own_server()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(SchemaManager.get_schema())
        schema.apply(connection)
    with staged(server.dsn, workers, tmp_path) as stage:
        run = stage.run([Page(name="a")])
        reader = Reader(browser, stage.dashboard())
        for path in ("/", f"/runs/{run.id}"):
            reader.open(path)
            reader.see("#connection", "live")
            reader.look_often()
            server.stop("fast")
            reader.see("#connection", "no answer")
            server.start()
            reader.see("#connection", "live", timeout=60.0)
            assert reader.same_visit()
        browser.get("about:blank")
        complaints = [line["message"] for line in browser.get_log("browser")]
        assert all("503" in line or "htmx" in line for line in complaints), complaints


def test_works_by_keyboard(stage: Stage, reader: Reader) -> None:
    """A reader without a mouse reaches content, buttons and questions; focus is given back."""
    run = stage.run([Page(name="page", waits_for="gate")])
    reader.log_in()
    reader.open(f"/runs/{run.id}")
    assert reader.press(Keys.TAB) == "Skip to the content"
    reader.press(Keys.ENTER)
    reached = []
    while len(reached) < 12 and reached[-1:] != ["ask-cancel"]:
        reached.append(reader.press(Keys.TAB))
    assert reached[-3:] == ["ask-pause", "ask-update", "ask-cancel"]
    reader.press(Keys.ENTER)
    wait_until(lambda: reader.count("#dialog-cancel[open]"))
    # Replaced while the question stands: the focus goes to its successor.
    run.update(max_in_flight=7)
    reader.driver.execute_script("htmx.trigger(document.body, 'fanout:refresh')")
    reader.see("[aria-labelledby=slots-title]", "of 7 at work")
    reader.press(Keys.ESCAPE)
    wait_until(lambda: reader.press() == "ask-cancel")
    assert not reader.count("#dialog-cancel[open]")
    for landmark in ("main", "header", "nav[aria-label]", "[role=status][aria-live=polite]"):
        assert reader.count(landmark), landmark
    unnamed = reader.driver.execute_script(
        "return [...document.querySelectorAll('input:not([type=hidden]), select, button, section')]"
        ".filter(one => !one.closest('label') && !one.innerText.trim()"
        " && !one.ariaLabel && !one.getAttribute('aria-labelledby')).map(one => one.outerHTML)"
    )
    assert unnamed == []


def test_long_names_push_no_figures_off_a_small_screen(stage: Stage, reader: Reader) -> None:
    stage.run([Page(name="a")])
    reader.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 380, "height": 900, "deviceScaleFactor": 1, "mobile": True},
    )
    reader.open("/")
    for name in ("a" * 60, "papers." + "long_" * 12):
        wide, there = reader.driver.execute_script(
            "document.querySelector('.runs .name').textContent = arguments[0];"
            "const table = document.querySelector('.scroll');"
            "return [table.scrollWidth, table.clientWidth]",
            name,
        )
        assert wide <= there, name


def test_fits_its_window(stage: Stage, reader: Reader) -> None:
    """No page is wider than its window, in both themes; screenshots are left to look at."""
    short = [
        Page(name=f"papers/{n:04}-a-rather-long-name.pdf", fails="" if n % 9 else "cut short")
        for n in range(60)
    ]
    slow = [Page(name=f"papers/slow-{n}.pdf", says="reading", waits_for="gate") for n in range(40)]
    run = stage.run([*short, *slow], max_in_flight=4, tags=["nightly"])
    stage.worker()
    wait_until(lambda: run.progress().done == 60)
    reader.log_in()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme, width in itertools.product(("light", "dark"), (1280, 380)):
        _look(reader, run.id, theme, width)
    stage.log.arrive("gate")


def _look(reader: Reader, run_id: int, theme: str, width: int) -> None:
    reader.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": theme}]},
    )
    reader.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    for name, path in {
        "runs": "/",
        "run": f"/runs/{run_id}",
        "item": f"/runs/{run_id}/items/0",
        "login": "/login",
    }.items():
        reader.open(path)
        if name == "run":
            reader.see("#connection", "live")
        widest = reader.driver.execute_script("return document.documentElement.scrollWidth")
        assert widest <= width, (name, widest)
        _screenshot(reader.driver, SCREENSHOTS / f"{name}-{theme}-{width}.png")
    reader.open(f"/runs/{run_id}")
    reader.click("#ask-cancel")
    _screenshot(reader.driver, SCREENSHOTS / f"question-{theme}-{width}.png", whole=False)
    ground = reader.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(16, 21, 28)") == (theme == "dark")


def _screenshot(driver: webdriver.Chrome, path: Path, *, whole: bool = True) -> None:
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
    path.write_bytes(base64.b64decode(found["data"]))
