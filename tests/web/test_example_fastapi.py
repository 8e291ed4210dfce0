"""The FastAPI example: upload, run, a page that follows it, the dashboard beside it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import procrastinate
import pytest
from selenium import webdriver

from examples.fastapi_app import tasks, web
from tests.support import working
from tests.web.conftest import Stage
from tests.web.streaming import Stream, no_watcher
from tests.web.test_pages import Reader
from tests.workers import Worker

FILES = [
    ("files", ("one.txt", b"one two three")),
    ("files", ("<b>two</b>.txt", "zwei Wörter".encode())),
    ("files", ("broken.txt", b"\xff\xfe")),
]


@pytest.fixture
async def client(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(web, "UPLOADS", tmp_path)
    connector = procrastinate.PsycopgConnector(conninfo=dsn)
    with tasks.app.replace_connector(connector):
        async with web.main.router.lifespan_context(web.main):
            transport = httpx.ASGITransport(web.main)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
                yield made
            await no_watcher()


def stored(folder: Path) -> int:
    return len(list(folder.rglob("*.txt")))


def folders(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def test_upload_run_results(client: httpx.AsyncClient, tmp_path: Path) -> None:
    assert "multipart/form-data" in (await client.get("/")).text
    response = await client.post("/uploads", files=FILES)
    assert (response.status_code, response.headers["location"]) == (303, "/runs/1")
    assert "EventSource" in (await client.get("/runs/1")).text
    async with Stream(web.main, "/fanout/api/runs/1/events") as stream:
        assert (await stream.until("snapshot")).data["total"] is None
        async with working(tasks.app):
            closed = await stream.until("closed", timeout=20.0)
    assert (closed.data["succeeded"], closed.data["failed"]) == (2, 1)
    found = (await client.get("/runs/1/results")).json()
    assert found == {
        "counted": [{"name": "one.txt", "words": 3}, {"name": "<b>two</b>.txt", "words": 2}],
        "failed": ["broken.txt"],
    }
    assert stored(tmp_path) == 3
    assert (await client.get("/runs/9/results")).status_code == 404


async def test_names_that_cannot_be_kept(client: httpx.AsyncClient, tmp_path: Path) -> None:
    """They are refused before anything is stored."""
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="files"; filename="%b.txt"\r\n\r\na\r\n'
    for name, status in ((b"a\0", 400), (b"\xff", 303), (b"\xed\xa0\x80", 303), (b"x" * 3000, 303)):
        before = folders(tmp_path)
        body = part % b"one" + part % name + b"--b--\r\n"
        response = await client.post("/uploads", content=body, headers=form)
        assert response.status_code == status, (name[:9], response.text)
        assert folders(tmp_path) == before + (status == 303)
    assert (await client.get(f"/runs/{2**70}/results")).status_code == 404


async def test_anybody_reads_nobody_controls(client: httpx.AsyncClient) -> None:
    await client.post("/uploads", files=FILES)
    assert (await client.get("/fanout/")).status_code == 200
    await client.get("/fanout/runs/1")
    csrf = {"x-fanout-csrf": client.cookies["fanout_csrf"]}
    response = await client.post("/fanout/api/runs/1/cancel", headers=csrf)
    assert (response.status_code, "may not cancel" in response.text) == (403, True)


@pytest.mark.acceptance
@pytest.mark.pg18_only
def test_page_follows_its_run(
    stage: Stage, browser: webdriver.Chrome, dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("some words")
    server = ["-m", "uvicorn", "examples.fastapi_app.web:main", "--port=0"]
    served = stage.dashboard(command=server, env={"UPLOADS": str(tmp_path / "uploads")})
    reader = Reader(browser, served)
    reader.open("/")
    browser.find_element("name", "files").send_keys(str(tmp_path / "words.txt"))
    browser.find_element("tag name", "button").click()
    reader.see("#state", "pending")
    with Worker(dsn, "examples.fastapi_app.tasks.app", queues="texts") as worker:
        worker.wait_ready()
        reader.see("#results", "2 words")
    reader.see("#state", "completed: 1 of 1 texts, 0 failed")
