"""Hooks: told what happens, in the process where it happens, and in nobody's way."""

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

import procrastinate
import psycopg
import pydantic
import pytest

from fanout_procrastinate import FanOut, ItemContext, fanout_child, hooks, settings
from tests.support import QUICK, counts, direct, finished, opened, sealed, serving, started
from tests.waiting import wait_until

Conn = psycopg.Connection[dict[str, Any]]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fanout-hooks"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_failed_items_are_told_once_final(app: procrastinate.App, kind: str) -> None:
    """In the worker, after the outcome is recorded; tries that go on are not told."""
    told: list[Mapping[str, Any]] = []
    loops: list[object] = []
    statuses: list[str] = []

    async def hook(**about: Any) -> None:
        loops.append(asyncio.get_running_loop())
        (item,) = [item async for item in run.items() if item.position == about["position"]]
        statuses.append(item.status)
        told.append(about)

    FanOut(app, on_item_failed=hook if kind == "async" else lambda **about: told.append(about))

    @fanout_child(app, backoff=QUICK, max_attempts=2)
    async def child(item: int) -> None:
        if item == 1:
            raise ConnectionError("no route")

    async with serving(app):
        run = await child.map_async(range(3), item_key=lambda item: f"k{item}")
        assert counts(await finished(run)) == {"succeeded": 2, "failed": 1, "total": 3}
        await asyncio.to_thread(wait_until, lambda: told)
    (about,) = told
    assert {**about, "error": None} == {
        "run_id": run.id,
        "position": 1,
        "key": "k1",
        "error": None,
    }
    assert about["error"]["type"] == "ConnectionError" and about["error"]["message"] == "no route"
    if kind == "async":
        assert loops == [asyncio.get_running_loop()] and statuses == ["failed"]
    assert not threads()


async def test_hooks_that_raise_or_hang_disturb_nobody(
    app: procrastinate.App, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_LAST_SECONDS", 0.2)

    async def hook(position: int, **about: Any) -> None:
        if position == 0:
            raise ZeroDivisionError
        await asyncio.Event().wait()

    FanOut(app, on_item_failed=hook)

    @fanout_child(app)
    async def child(item: int) -> None:
        raise ValueError

    async with serving(app):
        progress = await finished(await child.map_async(range(3)))
        assert counts(progress) == {"failed": 3, "total": 3}
    wait_until(lambda: not threads())
    found = [record for record in caplog.records if vars(record).get("action") == "hook_failed"]
    assert vars(found[0])["hook"] == "on_item_failed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["sync", "async", "async on a loop of its own"])
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("x")]
)
async def test_whatever_a_hook_raises_the_next_one_is_called(
    error: BaseException, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def hook(position: int, **about: Any) -> None:
        told.append(position)
        if position == 0:
            raise error

    async def hook_async(**about: Any) -> None:
        hook(**about)

    configured = settings.Settings(on_item_failed=hook if kind == "sync" else hook_async)
    called = hooks.Hooks(configured, asyncio.get_running_loop() if kind == "async" else None)
    for position in range(3):
        called.item_failed(1, position, None, {})
    await asyncio.to_thread(called.close)
    assert told == [0, 1, 2]
    failed = [record for record in caplog.records if vars(record).get("action") == "hook_failed"]
    assert [record.exc_info and record.exc_info[0] for record in failed] == [type(error)]


def test_too_many_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "_WAITING", 2)
    gate = threading.Event()
    told: list[int] = []

    def hook(position: int, **about: Any) -> None:
        assert gate.wait(10)
        told.append(position)

    called = hooks.Hooks(settings.Settings(on_item_failed=hook))
    called.item_failed(7, 0, None, {})
    wait_until(lambda: called._busy)
    for position in range(1, 5):
        called.item_failed(7, position, None, {})
    gate.set()
    called.close()
    assert told == [0, 1, 2] and caplog.text.count("Hook left out") == 2


def test_without_hooks_there_is_no_thread() -> None:
    called = hooks.Hooks(settings.Settings())
    called.item_failed(7, 0, None, {})
    called.stuck(7, True, "stuck")
    called.drain()
    called.close()
    assert not threads()


def test_sweep_tells_of_a_run_closed_as_stuck(app: procrastinate.App, conn: Conn, dsn: str) -> None:
    """And of no other that it stops."""
    told: list[Mapping[str, Any]] = []

    async def hook(**about: Any) -> None:
        told.append(about)

    fanout = FanOut(app, on_stuck=hook)
    with direct(dsn) as own:
        stuck, late = sealed(own, "1", stuck_after=5.0), sealed(own, "1")
    conn.execute("UPDATE fanout_runs SET deadline = clock_timestamp() WHERE id = %s", [late])
    conn.execute("DELETE FROM procrastinate_jobs")
    conn.execute("UPDATE fanout_slots SET seen_at = seen_at - interval '1 h'")
    conn.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE 'the host takes no jobs'; END $$""")
    conn.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON procrastinate_jobs"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    fanout.sweep()
    conn.execute("UPDATE fanout_runs SET idle_seen_at = idle_seen_at - interval '10 s'")
    fanout.sweep()
    (about,) = told
    assert (about["run_id"], about["closed"]) == (stuck, True)
    assert about["reason"].startswith("stuck: no progress for 5 s")


def test_sweep_tells_of_runs_that_wait_for_a_worker(
    app: procrastinate.App, conn: Conn, dsn: str
) -> None:
    """They are told, not closed; who is served, paused, young or scheduled is not told."""
    told: list[Mapping[str, Any]] = []
    fanout = FanOut(app, on_stuck=lambda **about: told.append(about))
    with direct(dsn) as own:
        waiting, young, paused, moved = (sealed(own, "1", "2") for _ in range(4))
        listed = started(own, manager_task="lister", manager_queue="listings")
        scheduled = started(own, manager_task="lister", scheduled_at="2100-01-01T00:00:00+00:00")
    conn.execute("UPDATE fanout_runs SET paused = true WHERE id = %s", [paused])
    for table, columns in {
        "fanout_runs": ("created_at", "sealed_at", "started_at"),
        "fanout_slots": ("seen_at",),
        "fanout_ledgers": ("updated_at",),
    }.items():
        key = "id" if table == "fanout_runs" else "run_id"
        for column in columns:
            conn.execute(
                f"UPDATE {table} SET {column} = {column} - interval '3 h' WHERE {key} <> %s"
                f" AND NOT ({key} = %s AND '{table}' = 'fanout_ledgers')".encode(),
                [young, moved],
            )
    fanout.sweep()
    assert sorted((about["run_id"], about["closed"], about["reason"]) for about in told) == [
        (waiting, False, "waits for a worker on queue papers"),
        (listed, False, "waits for a worker on queue listings"),
    ]
    assert scheduled not in {about["run_id"] for about in told}


async def test_sweep_of_a_worker_tells_too(app: procrastinate.App, conn: Conn) -> None:
    """The keeper's, whose async hooks run on the worker's loop."""
    told: list[int] = []
    loops: list[object] = []

    async def hook(run_id: int, **about: Any) -> None:
        told.append(run_id)
        loops.append(asyncio.get_running_loop())

    FanOut(app, on_stuck=hook)
    async with opened(app), FanOut.of(app).runtime().job() as shared:
        assert shared.keeper.sweeper.on_stuck is not None
        for _ in range(3):
            shared.keeper.sweeper.on_stuck(7, False, "waits")
        await asyncio.to_thread(wait_until, lambda: told)
    # Not at each sweep.
    assert told == [7] and loops == [asyncio.get_running_loop()]


def test_a_run_that_waits_is_told_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, bool]] = []

    def hook(run_id: int, closed: bool, reason: str) -> None:
        told.append((run_id, closed))

    called = hooks.Hooks(settings.Settings(on_stuck=hook))
    called.stuck(7, False, "waits")
    called.stuck(7, False, "waits")
    called.stuck(8, False, "waits")
    called.stuck(7, True, "stuck")
    monkeypatch.setattr(hooks, "_AGAIN_SECONDS", 0.0)
    called.stuck(7, False, "waits")
    called.close()
    assert told == [(7, False), (8, False), (7, True), (7, False)]


def test_redaction_never_shows_what_it_failed_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    assert hooks.redacted(settings.Settings(), {"secret": 1}) == {"secret": 1}

    def redact(value: Any) -> Any:
        return {**value, "secret": None}

    assert hooks.redacted(settings.Settings(redact=redact), {"secret": 1}) == {"secret": None}
    assert hooks.redacted(settings.Settings(redact=redact), [1]) == hooks.HIDDEN
    assert [vars(record)["hook"] for record in caplog.records] == ["redact"]


class _Document(pydantic.BaseModel):
    name: str = "a"
    iban: str = "geheim"


@dataclasses.dataclass
class _Record:
    iban: str = "geheim"


def _masked(value: Any) -> Any:
    """Mask in place, as one that knows JSON does it."""
    if isinstance(value, dict):
        for name, member in value.items():
            value[name] = "***" if name == "iban" else _masked(member)
    if isinstance(value, list):
        value[:] = [_masked(member) for member in value]
    return value


@pytest.mark.parametrize(
    "given",
    [
        _Document(),
        _Record(),
        ({"iban": "geheim"},),
        {"iban": "geheim"},
        [[{"deep": _Document()}]],
    ],
    ids=["model", "dataclass", "tuple", "dict", "nested"],
)
def test_redaction_sees_plain_json_and_changes_a_copy(given: Any) -> None:
    before = repr(given)
    shown = hooks.redacted(settings.Settings(redact=_masked), {"doc": given})
    assert "geheim" not in json.dumps(shown) and "***" in json.dumps(shown)
    assert repr(given) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1: {2}}, object()])
def test_whatever_redaction_returns_can_be_shown(value: Any) -> None:
    shown = hooks.redacted(settings.Settings(redact=lambda _: value), {"secret": 1})
    json.dumps(shown, allow_nan=False).encode()
    assert "secret" not in json.dumps(shown)


def test_redaction_that_ends_the_program_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def redact(value: Any) -> Any:
        raise SystemExit(3)

    assert hooks.redacted(settings.Settings(redact=redact), [1]) == hooks.HIDDEN
    assert "Redaction failed" in caplog.text


async def test_log_lines_of_a_child_are_redacted(app: procrastinate.App) -> None:
    """Also of one that logs its own item, which stays as it is."""
    FanOut(app, redact=_masked)

    @fanout_child(app, pass_context=True)
    async def child(context: ItemContext, item: dict[str, str]) -> dict[str, str]:
        context.log("begins", payload=item, doc=_Document())
        return item

    async with serving(app):
        run = await child.map_async([{"iban": "geheim"}])
        lines = [event.as_dict() async for event in run.events(kinds={"log"})]
        assert [line["data"]["data"] for line in lines] == [
            {"payload": {"iban": "***"}, "doc": {"name": "a", "iban": "***"}}
        ]
        (item,) = [one async for one in run.items()]
        assert item.result == {"iban": "geheim"}
