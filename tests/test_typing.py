"""The public API to type checkers: decorated functions keep their signatures.

A line of the sample that must not pass carries `type: ignore`: a checker says where it is not
needed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import ROOT

SAMPLE = """
import datetime
from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import procrastinate
import psycopg
import pydantic

from fanout_procrastinate import (
    Backoff, Child, FanOut, Item, ItemContext, Manager, Progress, Run, fanout_child, fanout_manager
)

app = procrastinate.App(connector=procrastinate.PsycopgConnector())
blueprint = procrastinate.Blueprint()
FanOut(app, lease=10.0)


class Paper(pydantic.BaseModel):
    id: str


@fanout_child(app, queue="papers", permanent=(ValueError,), backoff=Backoff(initial=1))
def extract(paper: Paper) -> int:
    return len(paper.id)


@fanout_child(blueprint, pass_context=True)
async def fetch(context: ItemContext, url: str) -> bytes:
    assert_type(context.attempt, int)
    return b""


@fanout_manager(app, child=extract, item_key=lambda paper: paper.id, tolerate=0.1)
def folder(path: str, depth: int = 1) -> Iterator[Paper]:
    yield Paper(id=path)


@fanout_manager(app, child=fetch)
async def feed(url: str) -> AsyncIterator[str]:
    yield url


@folder.on_complete
def report(run: Run) -> str:
    return f"{run.id}"


@feed.on_failure(queue="reports", max_attempts=2)
async def alarm(run: Run) -> None: ...


kept: Child[[Paper], int] = extract
other: Child[[Paper], str] = extract  # type: ignore[assignment]
listing: Manager[[str, int], Iterator[Paper]] = folder
assert_type(extract(Paper(id="a")), int)
assert_type(folder("x", depth=2), Iterator[Paper])
assert_type(report(Run.__new__(Run)), str)
extract(3)  # type: ignore[arg-type]
folder(3)  # type: ignore[arg-type]
report(3)  # type: ignore[arg-type]


@feed.on_success  # type: ignore[type-var]
def wrong(run: int) -> None: ...


def sync(connection: psycopg.Connection) -> None:
    run = folder.defer(path="x")
    assert_type(run, Run)
    assert_type(run.progress(), Progress)
    assert_type(run.wait(timeout=3).percent, float)
    assert_type(run.retry_failed(), int)
    assert_type([item.position for item in run.items("failed")], list[int])
    keyed = folder.configure(run_key="k", if_closed="replace", deadline=datetime.timedelta(hours=1))
    assert_type(keyed.defer(path="x", depth=3), Run)
    assert_type(folder.configure(connection=connection, tags=["a"]).defer(path="x"), Run)
    assert_type(extract.map([Paper(id="a")], item_key=lambda p: p.id, max_in_flight=3), Run)
    folder.defer(path=3)  # type: ignore[arg-type]
    folder.defer(depth=3)  # type: ignore[call-arg]
    keyed.defer(depth="x", path="y")  # type: ignore[arg-type]
    folder.configure(runkey="k")  # type: ignore[call-arg]
    folder.configure(if_closed="reopen")  # type: ignore[arg-type]
    extract.map([], schedule_in=3)  # type: ignore[call-arg]
    folder.on_complete(colour=1)  # type: ignore[call-overload]


async def asynchronous(owner: FanOut) -> None:
    assert_type(await fetch(ItemContext.__new__(ItemContext), "x"), bytes)
    run = await feed.defer_async(url="x")
    assert_type(run, Run)
    assert_type(await run.progress_async(), Progress)
    assert_type([item async for item in run.items()], list[Item])
    assert_type(await run.closed_progress_async(), Progress | None)
    assert_type(await owner.get_run_async(3), Run)
    assert_type(await owner.runs_async(status="failed"), list[Progress])
    assert_type(await extract.map_async([Paper(id="a")], tags=("a",)), Run)
    assert_type(await feed.configure(schedule_in={"minutes": 3}).defer_async(url="x"), Run)
    await feed.defer_async(link="x")  # type: ignore[call-arg]
    await feed.configure(priority="high").defer_async(url="x")  # type: ignore[arg-type]


fanout_manager(app, child=report)  # type: ignore[arg-type]
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    return path


@pytest.mark.slow
def test_mypy_strict(sample: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--pretty", str(sample)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("pyright") or shutil.which("basedpyright")), reason="pyright is not installed"
)
def test_pyright(sample: Path) -> None:
    checker = shutil.which("pyright") or shutil.which("basedpyright")
    assert checker is not None
    # Its own codes: there any `type: ignore` hides the line, and one too many is an error.
    (sample.parent / "pyrightconfig.json").write_text(
        '{"reportUnnecessaryTypeIgnoreComment": "error", "typeCheckingMode": "standard"}'
    )
    checked = subprocess.run(
        [
            checker,
            "--level",
            "error",
            "--pythonpath",
            sys.executable,
            "--project",
            str(sample.parent),
        ],
        cwd=sample.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
