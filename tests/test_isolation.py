"""Isolated children: whatever becomes of a process, its item has an outcome, and only its item."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import signal
import socket
import sys
import textwrap
import threading
import time
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import procrastinate
import psutil
import pytest

from fanout_procrastinate import (
    Child,
    ChildProcessDied,
    ConfigurationError,
    Run,
    errors,
    execution,
    fanout_child,
    forking,
    isolation,
    limits,
    processes,
    settings,
)
from fanout_procrastinate import isolated as isolated_side
from tests import invariants
from tests.apps import isolated, journal
from tests.apps.isolated import Deed
from tests.conftest import Connection
from tests.support import opened, unconnected, working
from tests.waiting import wait_until_async

MEBIBYTE = 2**20
SOON = 1.0
"""Seconds within which a death must be known."""

Tried = processes.Message | execution.Raised


@dataclasses.dataclass
class Facts:
    """Answers for the item's context."""

    stops: bool = False
    mine: bool | Exception = True
    logged: list[Any] = dataclasses.field(default_factory=list)

    def should_stop(self) -> bool:
        return self.stops

    async def still_mine_async(self) -> bool:
        if isinstance(self.mine, Exception):
            raise self.mine
        return self.mine

    def log(self, message: str, **data: Any) -> None:
        self.logged.append((message, data))

    def progress(self, fraction: float) -> None:
        self.logged.append(("progress", {"fraction": fraction}))

    async def permit_asked(self, name: str, params: dict[str, Any]) -> Any:
        raise AssertionError("no item here has permits")

    def permit_lost(self, holder: str) -> bool:
        return True

    async def permits_over(self) -> None:
        """Nothing to give back."""


def programs() -> list[psutil.Process]:
    """Return the processes that fork others for this one."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # gone, or about to go
            if any("forking.main" in part for part in process.cmdline()):
                found.append(process)
    return found


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
async def pool() -> AsyncIterator[processes.Pool]:
    """A pool; nothing of it is left after the test."""
    mine = processes.Pool()
    yield mine
    found = []
    for program in programs():
        with contextlib.suppress(psutil.Error):
            found += [program, *program.children(recursive=True)]
    mine.close()
    assert not [one for one in found if is_there(one.pid)]


def request(child: Child[..., Any], deed: Deed | None = None, **changes: Any) -> dict[str, Any]:
    """Return what a worker asks a process to do."""
    assert child.address is not None
    return {
        "address": dataclasses.asdict(child.address),
        "payload": (deed or Deed(name="one", what="")).model_dump_json(),
        "attempt": 1,
        "context": {"run_id": 7, "position": 3, "key": "k", "run_args": {"folder": "f"}},
        "max_result_bytes": MEBIBYTE,
        "max_attempts": 2,
        "backoff": {"initial": 0.5, "factor": 1.0, "maximum": 0.5, "jitter": 0.0},
    } | changes


def attempt(
    pool: processes.Pool,
    child: Child[..., Any],
    deed: Deed | None = None,
    context: Facts | None = None,
    **changes: Any,
) -> isolation.Execution:
    return isolation.Execution(
        pool=pool, request=request(child, deed, **changes), context=context or Facts()
    )


async def tried(pool: processes.Pool, child: Child[..., Any], what: str = "", **facts: Any) -> Any:
    """Have one item worked on, and return its columns, or the exception."""
    timeout = facts.pop("timeout", child.options.timeout)
    deed = Deed(name="one", what=what, **facts)
    end = await attempt(pool, child, deed).run(timeout=timeout)
    return end.error if isinstance(end, execution.Raised) else end


async def result(pool: processes.Pool, child: Child[..., Any], what: str = "", **facts: Any) -> Any:
    columns = await tried(pool, child, what, **facts)
    assert columns["outcome"] == "succeeded", columns
    return json.loads(columns["result"])


EXCEPTIONS = {
    "permanent": ("failed", "fanout_procrastinate.errors.PermanentError", "raised"),
    "transient": ("released", "fanout_procrastinate.errors.TransientError", "raised"),
    "unlucky": ("failed", "tests.apps.isolated.Unlucky", "declared Unlucky"),
    "stubborn": ("released", "tests.apps.isolated.Stubborn", "status 503"),
    "value": ("failed", "ValueError", "type ValueError"),
    "connection": ("released", "ConnectionError", "type ConnectionError"),
    "exit": ("released", "SystemExit", "default"),
    "interrupt": ("released", "KeyboardInterrupt", "default"),
    "cancelled": ("released", "asyncio.exceptions.CancelledError", "default"),
}


class TestOutcomes:
    """What the function makes of its item comes back as text, classed and described over there."""

    async def test_results(self, pool: processes.Pool) -> None:
        assert await tried(pool, isolated.act) == {
            "outcome": "succeeded",
            "result": '"one"',
            "sanitised": False,
        }
        assert await result(pool, isolated.act_async) == "one"
        assert (await result(pool, isolated.echo, text="four"))["number"] == 4.0
        assert await result(pool, isolated.act, "pid") != os.getpid()

    @pytest.mark.parametrize("child", [isolated.act, isolated.act_async], ids=["sync", "async"])
    async def test_exceptions(self, pool: processes.Pool, child: Child[..., Any]) -> None:
        pid = await result(pool, child, "pid")
        for what, (outcome, kind, rule) in EXCEPTIONS.items():
            columns = await tried(pool, child, "raise", text=what)
            record = json.loads(columns["error"])
            assert (columns["outcome"], record["type"]) == (outcome, kind)
            assert record["rule"].startswith(rule)
            assert "_raise" in record["traceback"]
            if outcome == "released":
                assert columns["retry_in"] == 0.05  # asked for, or the backoff's
        assert await result(pool, child, "pid") == pid

    async def test_results_that_cannot_be_stored(self, pool: processes.Pool) -> None:
        for what, number, text in [("object", 0, "cannot become JSON"), ("big", 2e6, "2000002")]:
            columns = await tried(pool, isolated.act, what, number=number)
            assert columns["outcome"] == "failed"
            assert text in json.loads(columns["error"])["message"]

    async def test_an_item_that_no_longer_fits(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act, "pid")
        end = await attempt(pool, isolated.act, payload='{"name": 3}').run(timeout=5)
        assert not isinstance(end, execution.Raised)
        record = json.loads(end["error"])
        assert (end["outcome"], record["class"]) == ("failed", "permanent")
        assert record["message"].startswith("its stored item no longer fits Deed: name:")
        assert await result(pool, isolated.act, "pid") == pid

    async def test_the_last_attempt_fails(self, pool: processes.Pool) -> None:
        deed = Deed(name="one", what="raise", text="transient")
        end = await attempt(pool, isolated.act, deed, attempt=2).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        assert end["outcome"] == "failed"

    async def test_logs_go_to_stderr(
        self, pool: processes.Pool, capfd: pytest.CaptureFixture[str]
    ) -> None:
        await tried(pool, isolated.act, "warn", text="look here")
        assert "look here" in capfd.readouterr().err


class TestContext:
    async def test_what_it_tells(self, pool: processes.Pool) -> None:
        facts = Facts(stops=True, mine=False)
        end = await attempt(pool, isolated.look, context=facts).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        told = json.loads(end["result"])
        assert told.pop("pid") != os.getpid()
        assert told == {
            "run_id": 7,
            "position": 3,
            "key": "k",
            "attempt": 1,
            "run_args": {"folder": "f"},
            "should_stop": True,
            "still_mine": False,
        }
        assert facts.logged == [("looked", {"name": "one"})]

    async def test_how_far_it_is(self, pool: processes.Pool) -> None:
        facts = Facts()
        end = await attempt(pool, isolated.advance, context=facts).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        assert json.loads(end["result"]) == "progress(2): give a fraction from 0 to 1"
        assert facts.logged == [("progress", {"fraction": 0.5})]

    @pytest.mark.parametrize("error", [errors.DatabaseError("no answer"), KeyError("odd")])
    async def test_an_answer_that_cannot_be_had(
        self, pool: processes.Pool, error: Exception
    ) -> None:
        end = await attempt(pool, isolated.look, context=Facts(mine=error)).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        record = json.loads(end["error"])
        assert record["type"] == "fanout_procrastinate.errors.DatabaseError"
        assert (record["message"], record["class"]) == (str(error), "transient")


def _with_action(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [line for line in caplog.records if hasattr(line, "action")]


class TestDeaths:
    """However the process dies: known at once, told why, and the next item has another."""

    @pytest.mark.parametrize(
        ("what", "number", "code", "text"),
        [
            ("segfault", 0, -signal.SIGSEGV, "was ended by SIGSEGV"),
            ("exit", 9, 9, "ended by itself with exit code 9"),
            ("exit", 0, 0, "ended by itself with exit code 0"),
            ("leave a fork", 0, -signal.SIGKILL, "SIGKILL, perhaps by the system for want of"),
        ],
    )
    async def test_death(
        self,
        pool: processes.Pool,
        caplog: pytest.LogCaptureFixture,
        what: str,
        number: float,
        code: int,
        text: str,
    ) -> None:
        pid = await result(pool, isolated.act, "pid")
        begun = time.monotonic()
        error = await tried(pool, isolated.act, what, number=number)
        assert time.monotonic() - begun < SOON
        assert isinstance(error, ChildProcessDied)
        assert (error.exit_code, error.pid) == (code, pid)
        assert text in str(error)
        assert not is_there(pid)
        (line,) = _with_action(caplog)
        assert (line.action, line.pid, line.exit_code) == ("child_process_died", pid, code)  # type: ignore[attr-defined]
        assert await result(pool, isolated.act, "pid") != pid

    async def test_it_is_transient(self) -> None:
        work = isolated.act.work(isolated.fanout)
        assert work.failure(ChildProcessDied(-11), 1)["outcome"] == "released"
        assert work.failure(ChildProcessDied(-11), 2)["outcome"] == "failed"

    async def test_neighbours_are_not_disturbed(self, pool: processes.Pool) -> None:
        neighbours = [
            asyncio.create_task(result(pool, isolated.act_unhurried, "sleep", number=0.5))
            for _ in range(5)
        ]
        for what in ("segfault", "exit", "segfault"):
            assert isinstance(await tried(pool, isolated.act, what), ChildProcessDied)
        assert await asyncio.gather(*neighbours) == [None] * 5

    async def test_one_that_died_while_idle_costs_nobody_an_attempt(
        self, pool: processes.Pool
    ) -> None:
        for _ in range(3):
            pid = await result(pool, isolated.act, "pid")
            os.kill(pid, signal.SIGKILL)
            assert await result(pool, isolated.act, "pid") != pid
        pid = await result(pool, isolated.act, "pid")
        os.kill(pid, signal.SIGKILL)
        await wait_until_async(lambda: not is_there(pid))  # as above, but known in time
        assert await result(pool, isolated.act) == "one"

    async def test_damaged_messages_are_a_death(self, pool: processes.Pool) -> None:
        error = await tried(pool, isolated.act, "scribble")
        assert isinstance(error, ChildProcessDied)

    async def test_the_process_that_forks_is_replaced(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act, "pid")
        call = attempt(pool, isolated.act_unhurried, Deed(name="one", what="sleep", number=30))
        running = asyncio.create_task(call.run(timeout=60))
        await wait_until_async(lambda: call._begun)
        (program,) = programs()
        program.kill()
        end = await running
        assert isinstance(end, execution.Raised) and isinstance(end.error, ChildProcessDied)
        assert end.error.exit_code is None
        assert "could not be started" in str(end.error)
        await wait_until_async(lambda: not is_there(pid))
        assert await result(pool, isolated.act) == "one"
        assert [one.pid for one in programs()] != [program.pid]

    async def test_the_process_that_forks_dies_at_the_wrong_moment(
        self, pool: processes.Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await tried(pool, isolated.act, "exit")
        (program,) = programs()
        program.kill()
        program.wait()
        monkeypatch.setattr(processes._Forking, "is_over", lambda _: False)
        assert await result(pool, isolated.act) == "one"

    async def test_the_process_that_forks_learns_of_the_worker_s_death_by_a_signal(
        self, pool: processes.Pool
    ) -> None:
        """Where something else holds the worker's sockets."""
        pid = await result(pool, isolated.act, "pid")
        (program,) = programs()
        program.send_signal(signal.SIGUSR2)
        await wait_until_async(lambda: not is_there(pid) and not is_there(program.pid))

    def test_a_fork_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full() -> int:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(os, "fork", full)
        (ours, control), (talk, their_talk), (life, their_life) = (
            socket.socketpair() for _ in range(3)
        )
        with ours, talk, life, contextlib.closing(forking.Forking(control)) as program:
            with their_talk, their_life:
                socket.send_fds(ours, [b"f"], [their_talk.fileno(), their_life.fileno()])
            program._on_request()
            assert (talk.recv(1), life.recv(1)) == (b"", b"")

    async def test_no_room_for_another(
        self, pool: processes.Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> Any:
            raise OSError(24, "Too many open files")

        await tried(pool, isolated.act)
        monkeypatch.setattr(socket, "socketpair", full)
        assert await result(pool, isolated.act) == "one"  # an idle one is there
        waiting = asyncio.create_task(tried(pool, isolated.act, "sleep", number=0.3))
        await asyncio.sleep(0)
        error = await tried(pool, isolated.act)
        assert (type(error), error.errno) == (OSError, 24)
        assert (await waiting)["outcome"] == "succeeded"


class TestLimits:
    @pytest.mark.parametrize("what", ["spin", "hold the interpreter", "sleep"])
    async def test_time(self, pool: processes.Pool, what: str) -> None:
        pid = await result(pool, isolated.act, "pid")
        begun = time.monotonic()
        error = await tried(pool, isolated.act, what, number=60, timeout=0.3)
        assert 0.3 <= time.monotonic() - begun < 0.3 + SOON
        assert type(error) is TimeoutError
        assert str(error) == "its time limit of 0.3 s passed"
        assert not is_there(pid)

    async def test_what_it_has_started_goes_along(
        self, pool: processes.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(journal.VARIABLE, str(tmp_path / "journal"))
        error = await tried(pool, isolated.act, "start others", timeout=0.5)
        assert isinstance(error, TimeoutError)
        (line,) = journal.Journal(tmp_path / "journal").read("started")
        # Killed, it is there until whoever adopted it has noticed.
        await wait_until_async(lambda: not is_there(line["other"]))

    async def test_loading_does_not_count(
        self, pool: processes.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = written(tmp_path, monkeypatch, "slow_module", "import time; time.sleep(0.5)")
        assert await result(pool, child, timeout=0.4) == "one"

    async def test_loading_without_end(
        self, pool: processes.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = written(tmp_path, monkeypatch, "stuck_module", "import time; time.sleep(60)")
        monkeypatch.setattr(isolation, "READY_SECONDS", 1.0)
        error = await tried(pool, child)
        assert str(error) == "its module and item were not loaded within 1 s"

    async def test_memory(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act, "pid")
        columns = await tried(pool, isolated.act, "allocate")
        record = json.loads(columns["error"])
        assert (record["type"], record["class"]) == ("MemoryError", "transient")
        assert record["message"] == f"its memory limit of {512 * MEBIBYTE} bytes was reached"
        assert await result(pool, isolated.act, "pid") != pid  # its memory is in pieces

    async def test_memory_limits_are_each_child_s_own(self, pool: processes.Pool) -> None:
        assert await result(pool, isolated.act, "limit") == 512 * MEBIBYTE
        assert await result(pool, isolated.act_unhurried, "limit") == _own_limit()
        assert len(programs()[0].children()) == 1

    def test_a_limit_ends_with_its_block(self) -> None:
        with isolated_side.memory_limited(2**40):
            assert _own_limit() == 2**40
            with isolated_side.memory_limited(None):
                assert _own_limit() == 2**40
        assert _own_limit() == resource.RLIM_INFINITY


def _own_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str = ""
) -> Child[..., Any]:
    """Write a module with a child, and then `text`, which this process does not run."""
    code = """
        import procrastinate
        from fanout_procrastinate import fanout_child
        app = procrastinate.App(connector=procrastinate.PsycopgConnector())
        @fanout_child(app, isolate=True, name="written")
        def own(item: dict) -> str:
            return item["name"]
    """
    (folder / f"{name}.py").write_text(textwrap.dedent(code) + text)
    monkeypatch.syspath_prepend(folder)
    module = types.ModuleType(name)
    exec(textwrap.dedent(code), vars(module))  # noqa: S102
    found: Child[..., Any] = module.own
    return found


class TestGivingUp:
    async def test_give_up(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act_unhurried, "pid")
        call = attempt(pool, isolated.act_unhurried, Deed(name="one", what="sleep", number=60))
        running = asyncio.create_task(call.run(timeout=None))
        await wait_until_async(lambda: call._begun)
        call.give_up()
        with pytest.raises(execution.Stopped):
            await running
        assert not is_there(pid)
        assert not call.thread_stuck()
        await call.leftover()

    async def test_give_up_before_it_runs(self, pool: processes.Pool) -> None:
        call = attempt(pool, isolated.act)
        call.give_up()
        with pytest.raises(execution.Stopped):
            await call.run(timeout=5)

    async def test_cancellation(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act_unhurried, "pid")
        call = attempt(pool, isolated.act_unhurried, Deed(name="one", what="spin"))
        running = asyncio.create_task(call.run(timeout=None))
        await wait_until_async(lambda: call._begun)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not is_there(pid)


class TestProcesses:
    async def test_they_are_used_again(self, pool: processes.Pool) -> None:
        assert len({await result(pool, isolated.act, "pid") for _ in range(5)}) == 1
        calls = [result(pool, isolated.act_unhurried, "sleep", number=0.2) for _ in range(4)]
        await asyncio.gather(*calls)
        assert len(programs()[0].children()) == 4

    async def test_they_come_from_a_process_with_one_thread(self, pool: processes.Pool) -> None:
        await tried(pool, isolated.act)
        (program,) = programs()
        assert program.num_threads() == 1
        assert program.children()[0].num_threads() == 1

    @pytest.mark.skipif(sys.platform != "linux", reason="there is no such score")
    async def test_they_go_first_where_memory_is_short(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act, "pid")
        assert _oom_score(pid) == min(1000, _oom_score(os.getpid()) + 500)

    async def test_signals_for_the_worker_leave_them_alone(self, pool: processes.Pool) -> None:
        pid = await result(pool, isolated.act, "pid")
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
            programs()[0].send_signal(number)
            assert await result(pool, isolated.act, "pid") == pid

    async def test_close_ends_those_at_work_too(self, pool: processes.Pool) -> None:
        call = attempt(pool, isolated.act_unhurried, Deed(name="one", what="spin"))
        running = asyncio.create_task(call.run(timeout=None))
        await wait_until_async(lambda: call._begun)
        pool.close()
        assert not programs()
        assert isinstance(await running, execution.Raised)

    async def test_one_that_cannot_be_ended_in_time(
        self,
        pool: processes.Pool,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(processes, "_END_SECONDS", 0.1)
        await tried(pool, isolated.act)
        (program,) = programs()
        program.suspend()
        error = await tried(pool, isolated.act, "sleep", number=60, timeout=0.1)
        assert isinstance(error, TimeoutError)
        assert [line.action for line in caplog.records if hasattr(line, "action")] == [
            "child_process_stays"
        ]
        pool.close()
        assert not is_there(program.pid)

    def test_options_of_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "warnoptions", ["error"])
        monkeypatch.setattr(sys, "_xoptions", {"dev": True, "utf8": "1"})
        assert processes._interpreter_options()[-3:] == ["-Werror", "-Xdev", "-Xutf8=1"]


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


class TestFinding:
    """The child is found again by its module and its name."""

    async def test_under_a_name_that_is_not_the_function_s(self, pool: processes.Pool) -> None:
        assert await result(pool, isolated.renamed) == "one in _plain"

    async def test_inside_a_class(self, pool: processes.Pool) -> None:
        assert await result(pool, isolated.Inside.inner) == "one"

    async def test_not_at_all(self, pool: processes.Pool) -> None:
        address = dataclasses.asdict(isolated.act.address) | {"name": "another"}  # type: ignore[call-overload]
        end = await attempt(pool, isolated.act, address=address).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        record = json.loads(end["error"])
        assert (end["outcome"], record["class"]) == ("failed", "permanent")
        assert "keep what fanout_child returns under a name" in record["message"]

    async def test_a_module_that_cannot_be_loaded(
        self, pool: processes.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        child = written(tmp_path, monkeypatch, "broken_module", "import nowhere_to_be_found")
        columns = await tried(pool, child)
        record = json.loads(columns["error"])
        assert (record["type"], record["class"]) == ("ModuleNotFoundError", "transient")
        assert (columns["outcome"], columns["retry_in"]) == ("released", 0.5)

    @pytest.mark.parametrize(
        ("how", "name", "qualname"),
        [
            ("path", "written", "own"),
            ("module", "written", "own"),
            ("path", "__main__.unnamed", "unnamed"),
        ],
    )
    async def test_what_the_worker_was_started_as(
        self,
        pool: processes.Pool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
        name: str,
        qualname: str,
    ) -> None:
        unnamed = """
            @fanout_child(app, isolate=True)
            def unnamed(item: dict) -> str:
                return item["name"]
            if __name__ == '__main__':
                raise SystemExit
        """
        written(tmp_path, monkeypatch, "started", textwrap.dedent(unnamed))
        main = (how, "started" if how == "module" else str(tmp_path / "started.py"))
        address = isolation.Address(
            name=name, declared_in="__main__", module="__main__", qualname=qualname, main=main
        )
        changes = {"address": dataclasses.asdict(address)}
        end = await attempt(pool, isolated.act, **changes).run(timeout=5)
        assert not isinstance(end, execution.Raised)
        assert end["result"] == '"one"'

    async def test_django_is_set_up_first(
        self, pool: processes.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "django.py").write_text("import os\ndef setup(): os.environ['SET_UP'] = '1'")
        child = written(tmp_path, monkeypatch, "models", "import os; os.environ['SET_UP']")
        apps = types.SimpleNamespace(apps=types.SimpleNamespace(ready=True))
        monkeypatch.setitem(sys.modules, "django.apps", apps)  # type: ignore[arg-type]
        assert await result(pool, child) == "one"


class TestDeclaring:
    @pytest.mark.parametrize("name", ["lambda", "nested"])
    def test_what_no_other_process_can_find(self, name: str) -> None:
        def nested(item: str) -> None: ...

        function = nested if name == "nested" else lambda item: None
        with pytest.raises(ConfigurationError, match="top level of a module"):
            fanout_child(unconnected(), isolate=True, name=name)(function)

    def test_what_was_typed_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        with pytest.raises(ConfigurationError, match="typed into this one"):
            isolation.Address.of(isolated._plain, "x", {"__name__": "__main__"})

    def test_what_was_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = types.ModuleType("__main__")
        main.__file__ = "script.py"
        monkeypatch.setitem(sys.modules, "__main__", main)
        address = isolation.Address.of(isolated._plain, "x", {"__name__": "__main__"})
        assert address.main == ("path", os.path.abspath("script.py"))
        main.__spec__ = types.SimpleNamespace(name="papers.__main__")  # type: ignore[assignment]
        address = isolation.Address.of(isolated._plain, "x", {"__name__": "__main__"})
        assert address.main == ("module", "papers.__main__")

    def test_no_fork(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "fork")
        with pytest.raises(ConfigurationError, match="POSIX"):
            isolation.Address.of(isolated._plain, "x", {})

    def test_addresses(self) -> None:
        assert isolated.act.address == isolation.Address(
            name="tests.apps.isolated.act",
            declared_in="tests.apps.isolated",
            module="tests.apps.isolated",
            qualname="act",
        )
        inside = isolated.Inside.inner.address
        assert inside is not None
        assert (inside.declared_in, inside.qualname) == ("tests.apps.isolated", "Inside.inner")

    @pytest.mark.parametrize("limit", [0, -1, True, 1.5e9, "1G", settings.MIN_MEMORY_LIMIT - 1])
    def test_impossible_limits(self, limit: Any) -> None:
        with pytest.raises(ConfigurationError, match="give a whole number from 67108864"):
            settings.ChildOptions(isolate=True, memory_limit=limit)

    def test_a_limit_needs_a_process(self) -> None:
        with pytest.raises(ConfigurationError, match="needs isolate=True"):
            settings.ChildOptions(memory_limit=2**30)
        assert settings.ChildOptions(isolate=True, memory_limit=2**30).memory_limit == 2**30


class TestOtherSide:
    """The process's side, in this one."""

    @pytest.fixture
    def ends(self) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            yield isolated_side.Line(ours), theirs

    def test_items(self, ends: Any) -> None:
        line, worker = ends
        facts = {"log_level": logging.WARNING, "django": False}
        with asyncio.Runner() as runner:
            for child in (isolated.act, isolated.act_async, isolated.echo):
                isolated_side.Item(request=request(child) | facts, line=line, runner=runner).work()
                begun, end = _messages(worker)
                assert begun == {"begun": True}
                assert (end["end"]["outcome"], end["reusable"]) == ("succeeded", True)
        assert limits.in_use.get() is None, "nothing of an item is left behind"

    def test_a_child_with_a_namespace_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process may give it another one, or none: it goes by the name as declared."""
        module, blueprint = types.ModuleType("spaced"), procrastinate.Blueprint()
        child: Any = fanout_child(blueprint, name="long ago", isolate=True)(_messages)
        module.child = child  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "spaced", module)
        unconnected().add_tasks_from(blueprint, namespace="papers")
        address = dataclasses.asdict(child.address) | {"declared_in": "spaced"}
        assert (child.name, address["name"]) == ("papers:long ago", "long ago")
        assert isolated_side.find({"django": False, "address": address}) is child

    def test_progress_that_is_no_fraction(self, ends: Any) -> None:
        facts = {"run_id": 1, "position": 0, "key": None, "attempt": 1, "run_args": {}}
        context: Any = isolated_side.Context(ends[0], **facts)
        for fraction in ("0.5", None, 2):
            with pytest.raises(ValueError, match="give a fraction from 0 to 1"):
                context.progress(fraction)

    def test_nobody_answers_when_the_item_is_over(self, ends: Any) -> None:
        line, _ = ends
        facts = {"run_id": 1, "position": 0, "key": None, "attempt": 1, "run_args": {}}
        context = isolated_side.Context(line, **facts)
        with pytest.raises(RuntimeError, match="the item is over"):
            context.should_stop()
        line.begin()
        line.end({}, True)
        with pytest.raises(RuntimeError, match="the item is over"):
            context.still_mine()

    def test_nobody_answers_when_the_worker_is_gone(self, ends: Any) -> None:
        line, worker = ends
        line.begin()
        worker.close()
        with pytest.raises(errors.DatabaseError, match="the worker is gone"):
            line.ask("should_stop")
        assert line.receive() is None
        line.end({}, True)

    def test_it_ends_with_the_worker(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            ending = threading.Thread(target=isolated_side.main, args=[ours])
            ending.start()
        ending.join(5)
        assert not ending.is_alive()
        ours.close()


def _messages(worker: socket.socket) -> list[Any]:
    found = []
    data = worker.recv(MEBIBYTE)
    while data:
        (size,) = processes.HEADER.unpack(data[:4])
        found.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


@pytest.fixture
async def live(
    dsn: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[procrastinate.App]:
    """The app of isolated children on the test's database, opened."""
    monkeypatch.setenv(journal.VARIABLE, str(tmp_path / "journal"))
    short = dataclasses.replace(isolated.fanout.settings, lease=1.5)
    monkeypatch.setattr(isolated.fanout, "settings", short)
    connector = procrastinate.PsycopgConnector(conninfo=dsn)
    with isolated.app.replace_connector(connector) as app:
        async with opened(app):
            yield app
    assert not programs()
    invariants.check(conn, damaged=True)


@pytest.fixture
def log(tmp_path: Path) -> journal.Journal:
    return journal.Journal(tmp_path / "journal")


class TestWorker:
    """In a worker: runs, attempts, control."""

    async def test_a_run(self, live: procrastinate.App) -> None:
        async with working(live):
            run = await isolated.looks.defer_async(names=["a", "b"])
            progress = await run.wait_async(timeout=10)
        assert (progress.status, progress.succeeded) == ("completed", 2)
        told = [one async for one in run.results()]
        assert [(one["position"], one["key"], one["run_args"]["names"]) for one in told] == [
            (0, "a", ["a", "b"]),
            (1, "b", ["a", "b"]),
        ]
        assert {(one["should_stop"], one["still_mine"]) for one in told} == {(False, True)}
        assert os.getpid() not in {one["pid"] for one in told}

    async def test_a_death_is_an_attempt(self, live: procrastinate.App) -> None:
        deeds = [
            Deed(name="a", what="segfault", first_only=True),
            Deed(name="b", what="exit", first_only=True),
            Deed(name="c", what="spin"),
            Deed(name="d", what="segfault"),
        ]
        async with working(live):
            run = await isolated.act.map_async(deeds, item_key=lambda deed: deed.name)
            await run.wait_async(timeout=10)
        items = {item.key: item async for item in run.items()}
        assert {key: (str(item.status), item.attempts) for key, item in items.items()} == {
            "a": ("succeeded", 2),
            "b": ("succeeded", 2),
            "c": ("failed", 2),
            "d": ("failed", 2),
        }
        assert {item.crashes for item in items.values()} == {0}
        assert items["c"].error is not None and items["d"].error is not None
        assert items["c"].error["type"] == "TimeoutError"
        assert items["d"].error["type"] == "fanout_procrastinate.errors.ChildProcessDied"
        assert "SIGSEGV" in items["d"].error["message"]

    async def test_cancel_tells_and_abort_ends(
        self, live: procrastinate.App, log: journal.Journal
    ) -> None:
        async with working(live):
            told = await isolated.looks.defer_async(names=["a"], what="go")
            aborted = await isolated.act_unhurried.map_async([Deed(name="b", what="spin")])
            pid = await _pid_at_work(log, aborted)
            await wait_until_async(lambda: _is_at_work(told))
            await told.cancel_async()
            await aborted.cancel_async(abort=True)
            await wait_until_async(lambda: not is_there(pid), timeout=5)
            log.arrive("go")
            await told.wait_async(timeout=10)
            progress = await aborted.wait_async(timeout=10)
        assert progress.cancelled == 1
        (seen,) = [one async for one in told.results()]
        assert seen["should_stop"] is True

    async def test_a_shutdown_gives_items_back(
        self, live: procrastinate.App, log: journal.Journal
    ) -> None:
        run = await isolated.act_unhurried.map_async([Deed(name="a", what="spin", first_only=True)])
        async with working(live, shutdown_graceful_timeout=0.2):
            pid = await _pid_at_work(log, run)
        assert not is_there(pid)
        (item,) = [item async for item in run.items()]
        assert (str(item.status), item.attempts, item.crashes) == ("pending", 0, 0)
        await run.cancel_async()


async def _is_at_work(run: Run) -> bool:
    return (await run.progress_async()).processing > 0


async def _pid_at_work(log: journal.Journal, run: Run) -> int:
    lines = await wait_until_async(lambda: log.read("start", run=run.id), timeout=10)
    return int(lines[0]["pid"])
