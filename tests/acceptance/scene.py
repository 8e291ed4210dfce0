"""One acceptance test's stage: its workers, its runs, its journal, its tables."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fanout_procrastinate import Run
from tests.apps import journal, scripted
from tests.conftest import Connection
from tests.waiting import wait_until
from tests.workers import Worker

Row = dict[str, Any]


class Scene:
    """Start workers and runs of the scripted app, and look at what became of them."""

    def __init__(
        self,
        connect: Callable[..., Connection],
        workers: Callable[..., Worker],
        log: journal.Journal,
    ) -> None:
        self.connect = connect
        self.conn = connect()
        self.log = log
        self._workers = workers

    # -- acting

    def worker(
        self,
        *,
        concurrency: int = 4,
        lease: float = scripted.LEASE_SECONDS,
        sweep: str = scripted.EACH_SECOND,
        chunk: int = scripted.CHUNK_SIZE,
        queues: str = scripted.QUEUE,
        app: str = "scripted",
        arguments: Iterable[str] = (),
        ready: bool = True,
    ) -> Worker:
        """Start one worker process."""
        worker = self._workers(
            f"tests.apps.{app}.app",
            queues=queues,
            concurrency=concurrency,
            arguments=arguments,
            env={
                journal.VARIABLE: str(self.log.path),
                scripted.LEASE_VARIABLE: str(lease),
                scripted.SWEEP_VARIABLE: sweep,
                scripted.CHUNK_VARIABLE: str(chunk),
            },
        )
        return worker.wait_ready() if ready else worker

    def worker_again(self, worker: Worker, **options: Any) -> Worker:
        """Start another in the place of one that died."""
        assert worker.wait() in (-9, scripted.KILLED), worker.output()
        return self.worker(**options)

    def steps(self, steps: Iterable[scripted.Step], callback: str = "", **options: Any) -> Run:
        """Start a run with these items."""
        given = [step.model_dump(exclude_defaults=True) for step in steps]
        return scripted.steps.configure(**options).defer(steps=given, callback=callback)

    def steps_in_threads(self, steps: Iterable[scripted.Step]) -> Run:
        """Start a run whose children are sync."""
        return scripted.steps_in_thread.defer(steps=[step.model_dump() for step in steps])

    # -- looking

    def query(self, sql: str, **values: Any) -> list[Row]:
        return self.conn.execute(sql, values).fetchall()

    def value(self, sql: str, **values: Any) -> Any:
        (row,) = self.query(sql, **values)
        (value,) = row.values()
        return value

    def states(self, run: Run) -> Counter[str]:
        """Count the items of a run by state, from their rows."""
        return Counter(str(item.status) for item in run.items())

    def items(self, run: Run) -> dict[str, Row]:
        """Return the item rows of a run by the names of their steps."""
        rows = self.query(
            "SELECT payload->>'name' AS name, * FROM fanout_items WHERE run_id = %(run)s",
            run=run.id,
        )
        return {row["name"]: row for row in rows}

    def jobs(self, task: str, run: Run | None = None) -> list[Row]:
        """Return the jobs of a task, by the last part of its name, of one run or of all."""
        return self.query(
            "SELECT * FROM procrastinate_jobs WHERE task_name LIKE %(task)s"
            " AND (%(run)s::bigint IS NULL OR (args->>'run_id')::bigint = %(run)s) ORDER BY id",
            task=f"%.{task}",
            run=run and run.id,
        )

    def wait_done(self, run: Run, count: int, timeout: float = 20.0) -> None:
        """Wait until so many items of a run are final."""
        wait_until(lambda: run.progress().done >= count, timeout, f"{count} items are done")

    def wait_started(self, run: Run, count: int, timeout: float = 20.0) -> None:
        """Wait until the children have begun so many items of a run."""
        wait_until(lambda: self.starts(run).total() >= count, timeout, f"{count} items are begun")

    def starts(self, run: Run) -> Counter[str]:
        """Count how often each item was begun, from the journal."""
        return Counter(line["item"] for line in self.log.read("start", run=run.id))

    # -- judging

    def assert_closed_once(self, run: Run, status: str = "completed", **counts: int) -> None:
        """Assert what a run closed as, from all tables: rows, counters, close, callbacks."""
        run.wait(timeout=1.0)
        expected = Counter(counts)
        progress = run.progress()
        assert (progress.status, progress.total) == (status, expected.total())
        assert self.states(run) == expected
        ledgers = self.query(
            "SELECT sum(succeeded) AS succeeded, sum(failed) AS failed,"
            " sum(cancelled) AS cancelled FROM fanout_ledgers WHERE run_id = %(run)s",
            run=run.id,
        )[0]
        assert {name: int(value or 0) for name, value in ledgers.items()} == {
            name: expected[name] for name in ("succeeded", "failed", "cancelled")
        }
        closes = self.query("SELECT * FROM fanout_closes WHERE run_id = %(run)s", run=run.id)
        assert [(close["generation"], close["status"]) for close in closes] == [(1, status)]
        assert not self.query("SELECT * FROM fanout_slots WHERE run_id = %(run)s", run=run.id)
