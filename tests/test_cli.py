"""The command line: each command against a real database, as text and as JSON; its exit codes."""

import argparse
import asyncio
import dataclasses
import functools
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
import pytest

from fanout_procrastinate import (
    FanOut,
    Limit,
    Progress,
    Run,
    RunClosed,
    fanout_child,
    schema,
    subscriptions,
)
from fanout_procrastinate.cli import command, control, display, main, program, reading
from tests.apps import cli_app
from tests.databases import environment
from tests.support import begun, direct, opened, serving, work_off
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
APP = "tests.apps.cli_app.app"
COMMANDS = [
    ["schema", "--check"],
    ["schema", "--apply"],
    ["schema", "--read"],
    ["runs"],
    ["show", "1"],
    ["items", "1"],
    ["errors", "1"],
    ["watch", "1"],
    ["sweep"],
    ["prune", "--older-than", "30d"],
    ["audit", "1"],
    ["cancel", "2", "--reason", f"for {cli_app.HOSTILE}"],
    ["pause", "2"],
    ["resume", "2"],
    ["retry", "1"],
    ["update", "2", "--max-in-flight", "7"],
    ["limits"],
]

Conn = psycopg.Connection[dict[str, Any]]


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Cli = Callable[..., Result]


def reach(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(dsn).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PROCRASTINATE_APP", raising=False)
    monkeypatch.setenv("FANOUT_APP", APP)


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command in this process, on whatever database the environment names."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exc:
            code = int(exc.code or 0)
        return Result(int(code), *capsys.readouterr())

    return run


@pytest.fixture
def cli(dsn: str, monkeypatch: pytest.MonkeyPatch, run_main: Cli) -> Cli:
    """Runs one command in this process, on the test's database."""
    reach(dsn, monkeypatch)
    return run_main


@pytest.fixture
def bare_cli(bare_dsn: str, monkeypatch: pytest.MonkeyPatch, run_main: Cli) -> Cli:
    """Runs one command in this process, on a database without our tables."""
    reach(bare_dsn, monkeypatch)
    return run_main


@pytest.fixture
def tasks(app: procrastinate.App) -> tuple[Any, Any]:
    """The child and the manager of `cli_app`, on an app of the test's own."""
    return cli_app.declare(app)


@pytest.fixture
def given(app: procrastinate.App, tasks: tuple[Any, Any]) -> Callable[..., list[int]]:
    """Starts runs of the child over lists of items, works them off if told to; gives their ids."""

    async def start(*lists: list[int], work: bool) -> list[int]:
        async with opened(app):
            runs = [await tasks[0].map_async(items) for items in lists]
            if work:
                await work_off(app, *runs)
            return [run.id for run in runs]

    def run(*lists: list[int], work: bool = True) -> list[int]:
        return asyncio.run(start(*lists, work=work))

    return run


@pytest.fixture
def hostile_runs(app: procrastinate.App, tasks: tuple[Any, Any]) -> None:
    """Run 1, closed, full of text that would steer a terminal; run 2, open."""

    async def start() -> None:
        async with opened(app):
            named = tasks[1].configure(tags=[cli_app.HOSTILE], run_key=cli_app.HOSTILE)
            run = await named.defer_async(items=[0, -1, -2, -3])
            await work_off(app, run)
            await tasks[0].map_async([1, 2, 3])

    asyncio.run(start())


def in_app(app: procrastinate.App, function: Callable[[FanOut], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        async with opened(app):
            return await function(FanOut.of(app))

    return asyncio.run(call())


def stored(app: procrastinate.App, run_id: int) -> Progress:
    async def read(owner: FanOut) -> Progress:
        return await (await owner.get_run_async(run_id)).progress_async()

    found: Progress = in_app(app, read)
    return found


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Program:
    """`python -m fanout_procrastinate` as a process of its own."""

    def __init__(self, dsn: str, *arguments: str, **options: Any) -> None:
        env = os.environ | environment(dsn) | {"PYTHONUNBUFFERED": "1"} | options.pop("env", {})
        start = options.pop("start", ["-m", "fanout_procrastinate"])
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        self.process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            env=env,
            cwd=ROOT,
            text=True,
            # A shell starts what runs in the background with Ctrl-C ignored, and that is inherited.
            preexec_fn=_hear_ctrl_c,  # noqa: PLW1509 - it only sets a disposition
            **given,
        )

    def result(self, timeout: float = 30.0) -> Result:
        out, err = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, err)


# -- limits


def test_limits_are_listed_shown_and_changed(cli: Cli, app: procrastinate.App) -> None:
    """E01, E03: who has which, who waits and why; changed and paused by hand."""
    assert cli("limits").lines == [
        "no limits: one gets here with the first run, or permit, that uses it"
    ]
    limit = Limit("llm", concurrency=1)

    @fanout_child(app, name="limited", queue="cli", limits=[limit])
    async def limited(item: int) -> None:
        """Never called."""

    async def look(owner: FanOut) -> None:
        async with owner.permit(limit, label=cli_app.HOSTILE):
            run = await limited.map_async([1, 2])
            shown = await asyncio.to_thread(cli, "limits", "llm")
            assert shown.lines[0] == "limit llm: 1 in use, 1 allowed"
            assert display.visible(cli_app.HOSTILE) in shown.out
            assert "limit llm is full: 1 of 1" in shown.out
            listed = await asyncio.to_thread(cli, "limits")
            assert listed.lines[1].split() == ["llm", "shared", "1", "1", "0", "1"]
            (data,) = (await asyncio.to_thread(cli, "limits", "--json")).json
            assert (data["used"], data["wanting"][0]["run_id"]) == (1, run.id)
            show = await asyncio.to_thread(cli, "show", run.id)
            assert "limit llm is full: 1 of 1" in show.out
            data = (await asyncio.to_thread(cli, "show", run.id, "--json")).json
            assert data["waiting_for"] == "limit llm is full: 1 of 1"

    in_app(app, look)
    words = ["--concurrency=none", "--rate=60", "--per=60", "--pause=60", "--json"]
    changed = cli("limits", "llm", *words).json
    assert (changed["concurrency"], changed["rate"], changed["burst"]) == (None, 60, 6)
    assert changed["paused_until"] is not None
    assert cli("limits", "llm", "--resume", "--json").json["paused_until"] is None
    for wrong in (["--concurrency=-1"], ["--rate=0"], ["--pause=0"], ["--burst=x"], ["--per=no"]):
        assert cli("limits", "llm", *wrong).code == command.Exit.USAGE
    assert cli("limits", "--resume").code == command.Exit.USAGE
    assert "there is no limit 'lost'" in cli("limits", "lost").err


# -- the schema


def test_schema_is_checked_applied_and_found_up_to_date(bare_cli: Cli) -> None:
    names = [script.name for script in schema.scripts()]
    check = bare_cli("schema", "--check")
    assert (check.code, check.lines) == (1, [f"missing: {name}" for name in names])
    assert bare_cli("schema", "--check", "--json").json == {"missing": names}
    applied = bare_cli("schema", "--apply")
    assert (applied.code, applied.lines) == (0, [f"applied: {name}" for name in names])
    again = bare_cli("schema", "--apply")
    assert (again.code, again.out) == (0, "up to date\n")
    assert bare_cli("schema", "--apply", "--json").json == {"applied": []}
    assert bare_cli("schema", "--check").code == 0
    assert bare_cli("runs").out == "no runs\n"


def test_schema_is_printed_without_app_and_server(
    run_main: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FANOUT_APP")
    shown = run_main("schema", "--read")
    assert (shown.code, shown.out, shown.err) == (0, schema.read(), "")
    assert run_main("--json", "schema", "--read").json == {"sql": schema.read()}


def test_schema_wants_one_action(run_main: Cli) -> None:
    assert run_main("schema").code == 2
    assert run_main("schema", "--apply", "--check").code == 2


# -- reading


def test_runs_lists_the_newest_first_and_narrows(
    app: procrastinate.App, tasks: tuple[Any, Any], cli: Cli
) -> None:
    half, halves = tasks

    async def start() -> None:
        async with opened(app):
            first = await half.map_async([0, -3])
            await work_off(app, first)
            await half.map_async([1], tags=["night"])
            await halves.defer_async(items=[])

    asyncio.run(start())

    shown = cli("runs")
    assert shown.code == 0
    assert shown.lines[0].split() == [
        "RUN", "NAME", "STATUS", "DONE", "TOTAL", "FAILED", "CREATED", "TOOK"
    ]  # fmt: skip
    rows = [line.split()[:6] for line in shown.lines[1:]]
    assert rows == [
        ["3", "halves", "pending", "0", "?", "0"],
        ["2", "half", "processing", "0", "1", "0"],
        ["1", "half", "completed", "2", "2", "1"],
    ]

    def ids(*arguments: str) -> list[int]:
        return [run["run_id"] for run in cli("runs", "--json", *arguments).json]

    assert ids() == [3, 2, 1]
    assert ids("--limit=2") == [3, 2]
    assert ids("--name=half") == [2, 1]
    assert ids("--status=completed") == [1]
    assert ids("--tag=night") == [2]
    assert ids("--tag=day") == []
    assert "whole task name" in cli("runs", "--name=halve").lines[1]
    assert cli("runs", "--name=papers.halves").lines == ["no runs"]

    waiting = "waits for a worker on queue cli"
    assert any(line.split(maxsplit=1) == ["manager", waiting] for line in cli("show", 3).lines)
    assert waiting not in cli("show", 1).out + cli("show", 2).out


def test_show_tells_everything_about_a_run(
    app: procrastinate.App, hostile_runs: None, cli: Cli
) -> None:
    shown = cli("show", 1)
    assert shown.lines[0] == "run 1: completed, 4 items, 1 succeeded, 3 failed"
    named = {line.split()[0]: line for line in shown.lines[1:14]}
    assert "half in queue cli" in named["child"]
    assert "cli_app.told done" in named["callbacks"]
    assert "took" in named
    assert "duplicates" not in named, "what is not there has no line"
    assert "ValueError" in shown.out
    assert "below zero" in shown.out

    data = cli("show", 1, "--json").json
    assert data["run_key"] == cli_app.HOSTILE
    assert data["args"] == {"items": [0, -1, -2, -3]}
    assert data["callbacks"] == {"tests.apps.cli_app.told": "done"}
    assert {group["count"] for group in data["errors"]} == {1}
    assert len(data["errors"]) == 3
    assert data.items() >= stored(app, 1).as_dict().items()


def test_items_are_listed_in_order_and_narrowed(given: Any, cli: Cli) -> None:
    (run_id,) = given([10, -3, 12])
    shown = cli("items", run_id)
    assert shown.lines[0].split() == [
        "ITEM", "KEY", "PAYLOAD", "STATUS", "ATTEMPTS", "TOOK", "OUTCOME"
    ]  # fmt: skip
    assert [line.split()[:4] for line in shown.lines[1:]] == [
        ["0", "10", "succeeded", "1"],
        ["1", "-3", "failed", "1"],
        ["2", "12", "succeeded", "1"],
    ]
    assert shown.lines[1].endswith(" 5")
    assert shown.lines[2].endswith("ValueError: below zero")
    (failed,) = cli("items", run_id, "--status=failed", "--json").json
    assert (failed["position"], failed["error"]["message"]) == (1, "below zero")
    assert cli("items", run_id, "--status=cancelled").out == "no items\n"
    assert cli("items", run_id, "--status=cancelled", "--json").json == []


def test_items_as_text_are_limited_and_say_so(given: Any, cli: Cli) -> None:
    (run_id,) = given(list(range(60)), work=False)
    shown = cli("items", run_id)
    assert len(shown.lines) == 1 + 50 + 1
    assert "only the first 50" in shown.lines[-1]
    assert len(cli("items", run_id, "--limit=60").lines) == 1 + 60
    assert [item["position"] for item in cli("items", run_id, "--json").json] == list(range(60))
    assert len(cli("items", run_id, "--json", "--limit=7").json) == 7


def test_errors_are_grouped_the_most_frequent_first(given: Any, cli: Cli) -> None:
    bad, good = given([-3, -1, -4, 0], [0])
    shown = cli("errors", bad)
    assert [line.split()[:3] for line in shown.lines[1:]] == [
        ["2", "ValueError", "0"],
        ["1", "fanout_procrastinate.errors.PermanentError", "1"],
    ]
    assert [group["count"] for group in cli("errors", bad, "--json").json] == [2, 1]
    assert len(cli("errors", bad, "--json", "--limit", 1).json) == 1
    assert cli("errors", good).out == "no failed items\n"
    assert cli("errors", good, "--json").json == []


# -- watching


def test_watch_of_closed_runs_tells_how_they_ended(given: Any, cli: Cli) -> None:
    clean, failed, empty = given([0, 1], [0, -3], [])
    shown = cli("watch", clean, empty, clean)
    assert shown.code == 0
    assert shown.lines == [
        "run 1: completed, 2 items, 2 succeeded, 0 failed",
        "run 3: completed, 0 items, 0 succeeded, 0 failed",
    ]
    shown = cli("watch", failed, clean)
    assert shown.code == 8
    assert shown.lines[0] == "run 2: completed, 2 items, 1 succeeded, 1 failed"
    shown = cli("watch", "--json", failed, clean)
    assert shown.code == 8
    assert [run["run_id"] for run in shown.json] == [2, 1]


def test_watch_follows_runs_to_their_end(
    app: procrastinate.App, given: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_POLL_SECONDS", 0.01)
    first, second = given([0] * 30, [-3, 0], work=False)
    seen = threading.Event()
    monkeypatch.setattr(display.Screen, "line", _told(display.Screen.line, seen))

    async def work() -> None:
        await asyncio.to_thread(seen.wait, 20)
        async with serving(app):
            for run_id in (first, second):
                await (await FanOut.of(app).get_run_async(run_id)).wait_async(timeout=20)

    worker = threading.Thread(target=lambda: asyncio.run(work()))
    worker.start()
    shown = cli("watch", first, second)
    worker.join()
    assert shown.code == 8
    assert shown.lines[0] == f"run {first}: processing, 0 of 30 (0 %)"
    assert shown.lines[1] == f"run {second}: processing, 0 of 2 (0 %)"
    assert f"run {first}: completed, 30 items, 30 succeeded, 0 failed" in shown.lines
    assert f"run {second}: completed, 2 items, 1 succeeded, 1 failed" in shown.lines


def _told(line: Callable[..., None], seen: threading.Event) -> Callable[..., None]:
    @functools.wraps(line)
    def told(*arguments: Any) -> None:
        line(*arguments)
        seen.set()

    return told


def test_watch_says_what_a_run_waits_for(
    app: procrastinate.App, tasks: tuple[Any, Any], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    async def start() -> None:
        async with opened(app):
            await tasks[1].defer_async(items=[])
            await tasks[1].configure(schedule_in=3600).defer_async(items=[1])

    asyncio.run(start())
    monkeypatch.setattr(reading, "time", types.SimpleNamespace(sleep=interrupt))
    assert cli("watch", 1).lines[0] == "run 1: waits for a worker on queue cli"
    assert cli("watch", 2).lines[0].startswith("run 2: waits until ")


def test_watch_shows_the_lines_of_its_runs(
    given: Any, cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, other = given([0], [0], work=False)
    hub = FanOut.of(cli_app.app).hub
    line = {"position": 0, "key": "k\x1b[2J", "message": "page read", "data": {"page": 7}}
    failure = {"position": 0, "key": None, "type": "ValueError", "message": "no\ntext"}

    def meanwhile(seconds: float) -> None:
        wait_until(lambda: hub.listening)
        for run_id in (other, watched):
            for event in (
                {"event": "log", "lines": [line], "dropped": 3},
                {"event": "item_failed", "items": [failure], "more": 2},
            ):
                payload = json.dumps({"run": run_id} | event)
                conn.execute("SELECT pg_notify('fanout_v1', %s)", [payload])
        conn.execute("SELECT fanout_stop_v1(%s, 'cancelled', 'enough', false)", [watched])
        wait_until(lambda: told["more"])

    told = {"more": False}
    put = subscriptions.Subscription.put

    def noting(one: Any, event: Any) -> None:
        put(one, event)
        told["more"] = told["more"] or (event.run_id == watched and "more" in event.data)

    monkeypatch.setattr(subscriptions.Subscription, "put", noting)
    monkeypatch.setattr(reading, "time", types.SimpleNamespace(sleep=meanwhile))
    shown = cli("watch", watched)
    assert shown.code == 8
    assert shown.lines == [
        "run 1: processing, 0 of 1 (0 %)",
        "run 1: cancelled, 1 items, 0 succeeded, 0 failed, 1 cancelled: enough",
        'run 1: item 0 (k\ufffd[2J): page read {"page": 7}',
        "run 1: 3 more lines are left out",
        "run 1: item 0 failed: ValueError: no text",
        "run 1: 2 more items failed",
    ]
    assert not [one for one in threading.enumerate() if one.name.startswith("fanout")]


def test_watch_of_a_cancelled_run_is_no_success(given: Any, cli: Cli) -> None:
    (run_id,) = given([0], work=False)
    assert cli("cancel", run_id).code == 0
    assert cli("watch", run_id).code == 8


# -- control


def test_pause_and_resume(app: procrastinate.App, given: Any, cli: Cli) -> None:
    (run_id,) = given([0, 1], work=False)
    shown = cli("pause", run_id)
    assert (shown.code, shown.out) == (0, "run 1: processing, 0 of 2 (0 %), paused\n")
    assert stored(app, run_id).paused
    assert cli("pause", run_id, "--json").json["paused"]
    assert not cli("resume", run_id, "--json").json["paused"]
    assert not stored(app, run_id).paused


def test_cancel_says_why_and_is_idempotent(app: procrastinate.App, given: Any, cli: Cli) -> None:
    (run_id,) = given([0, 1], work=False)
    shown = cli("cancel", run_id, "--reason=wrong folder", "--abort")
    line = "run 1: cancelled, 2 items, 0 succeeded, 0 failed, 2 cancelled: wrong folder\n"
    assert (shown.code, shown.out) == (0, line)
    again = cli("cancel", run_id)
    assert (again.code, again.out) == (0, line)
    assert stored(app, run_id).status == "cancelled"


def test_retry_reopens_for_one_type_of_error_or_all(
    app: procrastinate.App, given: Any, cli: Cli
) -> None:
    (run_id,) = given([-3, -1, 0])
    none = cli("retry", run_id, "--error-type=NoSuchError")
    assert (none.code, stored(app, run_id).generation) == (1, 1)
    assert none.lines[0].startswith("no failed items of type NoSuchError")
    one = cli("retry", run_id, "--error-type=ValueError", "--json").json
    assert (one["retried"], one["status"], one["failed"]) == (1, "processing", 1)
    rest = cli("retry", run_id)
    assert rest.lines[0] == "items tried again: 1"
    assert stored(app, run_id).failed == 0
    again = cli("retry", run_id)
    assert (again.code, again.lines[0]) == (0, "no failed items")


def test_update_changes_an_open_run(
    app: procrastinate.App, given: Any, cli: Cli, conn: Conn
) -> None:
    (run_id,) = given([0, 1], work=False)

    def columns() -> list[Any]:
        row = conn.execute(
            "SELECT max_in_flight, tolerate_count, tolerate_share, child_priority FROM fanout_runs"
        ).fetchone()
        assert row is not None
        return list(row.values())

    shown = cli("update", run_id, "--max-in-flight=7", "--tolerate=10", "--priority=-3")
    assert shown.lines[0] == "max_in_flight: 7, tolerate: 10, priority: -3"
    assert columns() == [7, 10, None, -3]
    assert cli("update", run_id, "--tolerate=5%", "--json").json["max_in_flight"] == 7
    assert columns() == [7, None, pytest.approx(0.05), -3]
    assert cli("update", run_id, "--tolerate=0.5").lines[0] == "tolerate: 0.5"
    assert columns() == [7, None, 0.5, -3]
    assert cli("update", run_id, "--tolerate=none").lines[0] == "tolerate: none"
    assert columns() == [7, None, None, -3]


def test_update_sets_and_lifts_a_deadline(
    app: procrastinate.App, given: Any, cli: Cli, conn: Conn
) -> None:
    (run_id,) = given([0, 1], work=False)

    def seconds_left() -> Any:
        row = conn.execute(
            "SELECT extract(epoch FROM deadline - clock_timestamp())::float AS left"
            " FROM fanout_runs"
        ).fetchone()
        assert row is not None
        return row["left"]

    cli("update", run_id, "--deadline=2h")
    assert seconds_left() == pytest.approx(7200, abs=60)
    cli("update", run_id, "--deadline=2099-01-01T00:00+01:00")
    assert seconds_left() > 1e9
    assert cli("update", run_id, "--deadline=none").lines[0] == "deadline: none"
    assert seconds_left() is None


@pytest.mark.parametrize("text", ["", "soon", "5", "2026-12-24", "2026-12-24T18:00", "-3h"])
def test_a_deadline_must_be_a_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="with its zone"):
        control.deadline(text)


@pytest.mark.parametrize("text", ["", "many", "x%", "1,5"])
def test_a_tolerance_must_be_a_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="count such as 10"):
        control.tolerance(text)


# -- maintenance


def lose_jobs(conn: Conn) -> None:
    conn.execute("DELETE FROM procrastinate_jobs")
    conn.execute("UPDATE fanout_slots SET seen_at = seen_at - interval '1 hour'")


def test_sweep_of_a_healthy_system_finds_nothing(given: Any, cli: Cli) -> None:
    given([0, 1])
    shown = cli("sweep")
    assert (shown.code, shown.out) == (0, "nothing to repair\n")
    assert cli("sweep", "--json").json == {"runs": {}, "done": {}, "errors": {}}


def test_sweep_says_what_it_repaired(given: Any, cli: Cli, conn: Conn) -> None:
    (run_id,) = given([0, 1], work=False)
    lose_jobs(conn)
    shown = cli("sweep")
    assert shown.code == 0
    assert shown.lines[0].startswith(f"run {run_id}: ")
    assert len(shown.lines) > 1
    assert conn.execute("SELECT FROM procrastinate_jobs WHERE status = 'todo'").fetchall()


def test_sweep_that_cannot_repair_a_run_is_a_finding(given: Any, cli: Cli, conn: Conn) -> None:
    (run_id,) = given([0, 1], work=False)
    lose_jobs(conn)
    conn.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'not today'; END $$"
    )
    conn.execute("CREATE TRIGGER refuse BEFORE DELETE ON fanout_slots EXECUTE FUNCTION refuse()")
    shown = cli("sweep")
    assert shown.code == 1
    assert shown.lines[-1] == f"run {run_id} could not be repaired: not today"


def test_prune_removes_old_runs(given: Any, cli: Cli, conn: Conn) -> None:
    old, young = given([0, 1], [0])
    conn.execute(
        "UPDATE fanout_runs SET closed_at = closed_at - interval '31 d' WHERE id = %s", [old]
    )
    assert cli("prune", "--older-than=32d").lines == ["pruned: 0", "pruned_jobs: 0"]
    shown = cli("prune", "--older-than", "30d", "--json")
    assert (shown.code, shown.json) == (0, {"pruned": 3, "pruned_jobs": 0})
    assert [run["run_id"] for run in cli("runs", "--json").json] == [young]


def test_prune_of_too_short_a_time_is_2(cli: Cli) -> None:
    shown = cli("prune", "--older-than=0s")
    assert (shown.code, shown.out) == (2, "")
    assert "give seconds, a number from 1" in shown.err


# -- JSON, terminals, help


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[:1]))
def test_json_is_valid_wherever_it_is_asked_for(
    arguments: list[str], hostile_runs: None, cli: Cli
) -> None:
    after, before = cli(*arguments, "--json"), cli("--json", *arguments)
    for shown in (after, before):
        assert shown.code in (0, 8)
        assert shown.json is not None
        assert shown.out.isascii()
        assert all(letter.isprintable() or letter == "\n" for letter in shown.out)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[:1]))
def test_no_text_steers_the_terminal(arguments: list[str], hostile_runs: None, cli: Cli) -> None:
    shown = cli(*arguments)
    assert shown.code in (0, 8)
    assert shown.out
    for letter in shown.out + shown.err:
        assert letter.isprintable() or letter == "\n", repr(letter)


def test_each_command_has_help_with_an_example(run_main: Cli) -> None:
    top = run_main("--help")
    assert top.code == 0
    for name in {words[0] for words in COMMANDS}:
        assert f"    {name} " in top.out
        shown = run_main(name, "--help")
        assert shown.code == 0
        assert f"example:\n  fanout --app=papers.app {name}" in shown.out
    for code in command.Exit:
        assert str(int(code)) in top.out


def test_each_example_of_the_help_can_be_parsed() -> None:
    for one in program.COMMANDS:
        words = one.example.replace('"', "").replace("wrong folder", "wrong").split()
        options = program.parser().parse_args(["--app=papers.app", *words])
        assert options.command is one
        assert options.app == "papers.app"


def test_version_is_told(run_main: Cli) -> None:
    assert run_main("--version").out.startswith("fanout 0.")


# -- exit codes


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["show"],
        ["show", "x"],
        ["show", "0"],
        ["show", "9" * 19],
        ["show", "1_0"],
        ["watch"],
        ["runs", "--limit=0"],
        ["runs", "--status=odd"],
        ["runs", "--name=\udcff"],
        ["items", "1", "--status=odd"],
        ["items", "1", "--stat=failed"],
        ["update", "1", "--tolerate=many"],
        ["update", "1", "--max-in-flight=x"],
        ["update", "1", "--deadline=99999999999d"],
        ["update", "1", f"--deadline={'9' * 400}d"],
        ["prune"],
        ["prune", "--older-than=soon"],
        ["prune", "--older-than=30"],
        ["prune", "--older-than=-1d"],
        ["prune", "--older-than=99999999999d"],
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_a_wrong_command_line_is_2(arguments: list[str], run_main: Cli) -> None:
    shown = run_main(*arguments, "--json")
    assert (shown.code, shown.out) == (2, "")
    assert "error: " in shown.err


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--max-in-flight=0", "whole number from 1"),
        ("--tolerate=1.5", "share from 0.0"),
        ("--tolerate=nan", "share from 0.0"),
        ("--priority=9999999999", "whole number"),
        ("--deadline=99999999d", "seconds from now"),
        ("--deadline=9999-12-31T23:59:59-14:00", "from 0001-01-02 to 9999-12-31 in UTC"),
    ],
)
def test_a_value_that_cannot_work_is_2(option: str, remedy: str, given: Any, cli: Cli) -> None:
    (run_id,) = given([0], work=False)
    shown = cli("update", run_id, option)
    assert (shown.code, shown.out) == (2, "")
    assert remedy in shown.err


def test_an_update_of_nothing_is_2(cli: Cli) -> None:
    shown = cli("update", 1)
    assert shown.code == 2
    assert "--max-in-flight" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        [words[0], "99", *words[2:]]
        for words in COMMANDS
        if words[0] not in ("schema", "runs", "sweep", "prune", "limits")
    ],
    ids=lambda words: words[0],
)
def test_an_unknown_run_is_3(arguments: list[str], cli: Cli) -> None:
    shown = cli(*arguments, "--json")
    assert (shown.code, shown.out) == (3, "")
    assert shown.err == (
        "fanout: there is no run 99: it never existed, or retention has removed it\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [["cancel"], ["pause"], ["resume"], ["update", "--max-in-flight=2"]],
    ids=lambda words: words[0],
)
def test_a_closed_run_is_4(arguments: list[str], given: Any, cli: Cli) -> None:
    failed, clean = given([0, -3], [0])
    shown = cli(arguments[0], failed, *arguments[1:])
    assert (shown.code, shown.out) == (4, "")
    assert shown.err.startswith("fanout: run 1 is closed (completed)")
    assert shown.err.endswith("start a new run, or reopen this one: fanout retry 1\n")
    shown = cli(arguments[0], clean, *arguments[1:])
    assert (shown.code, shown.out) == (4, "")
    assert shown.err.endswith("cannot be changed; start a new run\n")


def test_a_run_that_was_replaced_cannot_be_retried_4(
    app: procrastinate.App, tasks: tuple[Any, Any], cli: Cli
) -> None:
    async def start() -> None:
        async with opened(app):
            first = await tasks[0].map_async([-3], run_key="k")
            await work_off(app, first)
            await tasks[0].map_async([0], run_key="k", if_closed="replace")

    asyncio.run(start())
    shown = cli("retry", 1)
    assert shown.code == 4
    assert "start a new run" in shown.err and "fanout retry" not in shown.err


@pytest.mark.parametrize(
    "arguments", [words for words in COMMANDS if words[0] != "schema"], ids=lambda words: words[0]
)
def test_a_missing_schema_is_5(arguments: list[str], bare_cli: Cli) -> None:
    shown = bare_cli(*arguments, "--json")
    assert (shown.code, shown.out) == (5, "")
    assert f"fanout --app={APP} schema --apply" in shown.err


def test_a_missing_schema_of_the_host_is_5(
    bare_cli: Cli, bare_dsn: str, app: procrastinate.App
) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    shown = bare_cli("schema", "--apply")
    assert (shown.code, shown.out) == (5, "")
    assert shown.err.endswith(f"run: python -m procrastinate --app={APP} schema --apply\n")


@pytest.mark.parametrize(
    "arguments", [words for words in COMMANDS if "--read" not in words], ids=" ".join
)
def test_no_server_is_6_at_once(
    arguments: list[str], run_main: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    shown = run_main(*arguments, "--json")
    assert (shown.code, shown.out) == (6, "")
    assert "Connection refused" in shown.err
    assert len(shown.err.splitlines()) == 1


def test_no_database_is_6(dsn: str, run_main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(dsn, monkeypatch)
    monkeypatch.setenv("PGDATABASE", "there_is_none")
    shown = run_main("runs")
    assert shown.code == 6
    assert '"there_is_none" does not exist' in shown.err


def test_a_pool_that_cannot_open_is_6(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise psycopg.OperationalError("no place left")

    monkeypatch.setattr(procrastinate.App, "open", refuse)
    shown = cli("runs")
    assert (shown.code, shown.err) == (6, "fanout: no place left\n")


@pytest.mark.parametrize(
    ("app_path", "said"),
    [
        ("nothing", "nothing is not a valid path"),
        ("no.such.app", "No module named 'no'"),
        ("tests.apps.cli_app.missing", "no attribute 'missing'"),
        ("tests.apps.cli_app.no_app", "not of type App"),
        ("tests.apps.cli_app.memory_app", "a run needs PostgreSQL"),
    ],
)
def test_an_app_that_cannot_be_used_is_7(app_path: str, said: str, run_main: Cli) -> None:
    shown = run_main("runs", f"--app={app_path}")
    assert (shown.code, shown.out) == (7, "")
    assert said in shown.err
    assert app_path in shown.err
    own_is_missing = app_path in ("nothing", "no.such.app")
    assert not own_is_missing or "start from the folder that holds the module" in shown.err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise ValueError('\\x1b[2J')", "ValueError: \ufffd[2J"),
        ("def", "SyntaxError"),
        ("import not_there.part", "its module imports not_there: install that"),
        ("from json import not_there", "its module cannot import that"),
        (
            "import procrastinate\n"
            "app = procrastinate.App(connector=procrastinate.PsycopgConnector(),"
            " import_paths=['not_there'])",
            "No module named 'not_there'",
        ),
    ],
)
def test_a_broken_app_module_is_7(
    body: str, said: str, run_main: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    shown = run_main("runs", f"--app={name}.app")
    assert (shown.code, shown.out) == (7, "")
    assert said in shown.err
    assert str(tmp_path) == sys.path[0]


def test_without_an_app_the_remedy_is_named(run_main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANOUT_APP")
    shown = run_main("runs")
    assert shown.code == 2
    assert "--app=papers.app" in shown.err
    assert "FANOUT_APP" in shown.err


def test_an_interrupt_is_130_and_quiet(
    given: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (run_id,) = given([0], work=False)
    monkeypatch.setattr(reading, "time", types.SimpleNamespace(sleep=interrupt))
    shown = cli("watch", run_id)
    assert (shown.code, shown.err) == (130, "")


def test_verbose_shows_where_and_logs(run_main: Cli, caplog: pytest.LogCaptureFixture) -> None:
    shown = run_main("--verbose", "runs", "--app=no.such.app")
    assert shown.code == 7
    assert "Traceback" in shown.err
    assert "load_from_path" in shown.err
    assert "Traceback" not in run_main("runs", "--app=no.such.app").err


# -- the app


@pytest.mark.parametrize("variable", ["FANOUT_APP", "PROCRASTINATE_APP"])
def test_the_environment_names_the_app(
    variable: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FANOUT_APP")
    monkeypatch.setenv(variable, APP)
    assert cli("runs").code == 0
    assert cli("runs", "--app=no.such.app").code == 7
    assert cli("--app=no.such.app", "runs").code == 7


def test_a_sync_connector_serves_as_well(given: Any, cli: Cli) -> None:
    (run_id,) = given([0, -3])
    for arguments in (["runs"], ["watch", run_id], ["schema", "--check"], ["sweep"]):
        shown = cli(*arguments, "--json", "--app=tests.apps.cli_app.sync_app")
        assert (shown.code, shown.err) == (8 if arguments[0] == "watch" else 0, "")


def test_the_app_is_closed_in_the_end(cli: Cli, dsn: str) -> None:
    assert cli("runs").code == 0
    assert cli("show", 99).code == 3
    connector = cli_app.app.connector.get_sync_connector()
    with pytest.raises(procrastinate.exceptions.AppNotOpen):
        _ = connector.pool  # type: ignore[attr-defined]


def test_a_run_closed_between_look_and_change_is_still_told(
    given: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close_first(self: Run, **changes: Any) -> Progress:
        raise RunClosed(self.id, "completed")

    (run_id,) = given([0], work=False)
    monkeypatch.setattr(Run, "update", close_first)
    assert cli("update", run_id, "--priority=1").code == 4


# -- a program of its own


def test_the_program_prints_json_and_nothing_else(hostile_runs: None, dsn: str) -> None:
    """The app's module prints while it is imported."""
    shown = Program(dsn, "show", "1", "--json").result()
    assert shown.code == 0
    assert shown.json["run_id"] == 1
    assert "talkative" in shown.err


def test_the_program_works_in_a_poor_locale(hostile_runs: None, dsn: str) -> None:
    shown = Program(dsn, "errors", "1", env={"PYTHONIOENCODING": "ascii"}).result()
    assert shown.code == 0
    assert "\\ufffd[2J" in shown.out


def test_a_reader_that_goes_away_is_141_and_quiet(given: Any, dsn: str) -> None:
    (run_id,) = given(list(range(5000)), work=False)
    started = Program(dsn, "items", str(run_id), "--json")
    assert started.process.stdout is not None
    started.process.stdout.read(10)
    started.process.stdout.close()
    assert started.process.wait(30) == 141
    assert started.process.stderr is not None
    with started.process.stderr as stderr:
        assert stderr.read() == "this module is talkative\n"


def redirected(arguments: str, given: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the program through a shell, which takes redirections among the arguments."""
    return subprocess.run(
        ["/bin/sh", "-c", f"{shlex.quote(sys.executable)} -m fanout_procrastinate {arguments}"],
        env=os.environ | given,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">/dev/full", "the output cannot be written: No space left on device"),
        (">&-", "there is no standard output to write to"),
    ],
)
@pytest.mark.parametrize("arguments", ["runs", "runs --json", "schema --read"])
def test_output_that_cannot_be_written_is_9(
    redirection: str, said: str, arguments: str, dsn: str
) -> None:
    done = redirected(f"{arguments} {redirection}", environment(dsn))
    assert done.returncode == 9
    assert done.stderr.removeprefix("this module is talkative\n") == f"fanout: {said}\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("arguments", "code"), [("show 999 --json", 3), ("schema --check", 0), ("no-such-command", 2)]
)
def test_what_cannot_be_told_changes_neither_the_exit_code_nor_the_output(
    redirection: str, arguments: str, code: int, dsn: str
) -> None:
    quiet = environment(dsn) | {"FANOUT_APP": "tests.apps.shown.app"}
    done = redirected(f"{arguments} {redirection}", quiet)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_a_stop_that_waits_for_the_items_at_work_is_shown(given: Any, cli: Cli, conn: Conn) -> None:
    (run_id,) = given([0, 1, 2], work=False)
    with direct(conn.info.dsn, size=1) as own:
        begun(own, run_id, conn)
    shown = cli("cancel", run_id, "--reason=wrong folder")
    assert shown.out == "run 1: processing, 2 of 3 (67 %), stopping: wrong folder\n"
    assert cli("show", run_id).lines[0] == shown.lines[0]


def test_ctrl_c_ends_a_watch_quietly(given: Any, dsn: str) -> None:
    (run_id,) = given([0], work=False)
    started = Program(dsn, "watch", str(run_id))
    assert started.process.stdout is not None
    assert started.process.stdout.readline() == "run 1: processing, 0 of 1 (0 %)\n"
    started.process.send_signal(signal.SIGINT)
    shown = started.result()
    assert (shown.code, shown.out, shown.err) == (130, "", "this module is talkative\n")


WITHOUT_RICH = """
import sys
sys.modules["rich"] = None
from fanout_procrastinate import cli
sys.exit(cli.main())
"""


@pytest.fixture
def terminal() -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs the program on a terminal of 80 columns, and gives its exit code and what it drew."""
    descriptors: list[int] = []

    def run(*arguments: Any, **options: Any) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        descriptors.append(ours)
        env = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        started = Program(*arguments, stdout=theirs, env=env, **options)
        os.close(theirs)
        drawn = b""
        while part := _read(ours):
            drawn += part
        assert started.process.stderr is not None
        started.process.stderr.close()
        return started.process.wait(30), drawn.decode()

    yield run
    for descriptor in descriptors:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""


def test_a_terminal_gets_bars_and_tables(given: Any, dsn: str, terminal: Any) -> None:
    (run_id,) = given([0, 1, -3])
    code, drawn = terminal(dsn, "watch", str(run_id))
    assert code == 8
    assert "━" in drawn
    assert "3 of 3 (100 %)" in drawn
    assert drawn.endswith("run 1: completed, 3 items, 2 succeeded, 1 failed\r\n")
    code, drawn = terminal(dsn, "items", str(run_id))
    assert code == 0
    assert "─" in drawn
    assert "succeeded" in drawn


def test_a_terminal_without_rich_gets_plain_text(given: Any, dsn: str, terminal: Any) -> None:
    (run_id,) = given([0, 1, -3])
    code, drawn = terminal(dsn, "watch", str(run_id), start=["-c", WITHOUT_RICH])
    assert (code, drawn) == (8, "run 1: completed, 3 items, 2 succeeded, 1 failed\r\n")
    code, drawn = terminal(dsn, "runs", start=["-c", WITHOUT_RICH])
    assert code == 0
    assert drawn.startswith("RUN  NAME")
    assert "\x1b" not in drawn


def test_the_program_is_called_fanout(given: Any, dsn: str) -> None:
    script = Path(sys.executable).with_name("fanout")
    shown = Program(dsn, "runs", "--json", start=[str(script)]).result()
    assert (shown.code, shown.json) == (0, [])
