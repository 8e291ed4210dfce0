"""How each fault is done. What a fault hits is chosen among what is there, by the fault's dice."""

import datetime
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import procrastinate.exceptions
import psycopg

from fanout_procrastinate import errors
from tests.chaos import app as chaos_app
from tests.chaos.crew import Berth, Crew
from tests.chaos.plan import Fault
from tests.chaos.stage import Stage, patiently
from tests.chaos.workload import Workload

_OURS = "queueing_lock LIKE 'fanout_child:%%'"


class Faults:
    """Do faults, and count those that hit something."""

    def __init__(self, stage: Stage, crew: Crew, workload: Workload, lease: float) -> None:
        self._stage = stage
        self._crew = crew
        self._workload = workload
        self._lease = lease
        self._managers_cancelled: set[int] = set()
        self.done: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.log: list[str] = []
        self.errors: list[str] = []

    def do(self, fault: Fault, began: float) -> None:
        """Do one fault; it lasts until this returns."""
        act: Callable[[Fault], object] = getattr(self, f"_{fault.kind.replace(' ', '_')}")
        at = time.monotonic() - began
        try:
            hit = act(fault)
        except Exception as exc:  # noqa: BLE001 - it is part of the verdict
            hit = None
            self.errors.append(f"{fault}: {exc!r}")
        self.log.append(
            f"{fault.number:4d} {at:7.2f} s to {time.monotonic() - began:7.2f} s"
            f"  {fault.kind}: {hit if hit else 'hit nothing'}"
        )
        (self.done if hit else self.missed)[fault.kind] += 1

    # -- workers

    def _berth(self, fault: Fault) -> Berth:
        return fault.dice.choice(self._crew.berths)

    def _kill(self, fault: Fault) -> object:
        return self._crew.kill(self._berth(fault))

    def _term(self, fault: Fault) -> object:
        return self._crew.term(self._berth(fault))

    def _zombie(self, fault: Fault) -> object:
        return self._crew.freeze(self._berth(fault), self._lease * (fault.leases + 1.5))

    # -- the server

    def _terminate(self, share: float, fault: Fault) -> object:
        dice = fault.dice
        rows = self._stage.query(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name <> current_setting('application_name') ORDER BY backend_start"
        )
        chosen = [row["pid"] for row in rows if dice.random() < share]
        self._stage.query(
            "SELECT pg_terminate_backend(pid) FROM unnest(%(pids)s::int[]) pid", pids=chosen
        )
        return chosen

    def _terminate_some(self, fault: Fault) -> object:
        return self._terminate(0.2, fault)

    def _terminate_all(self, fault: Fault) -> object:
        return self._terminate(1.0, fault)

    def _restart_fast(self, fault: Fault) -> object:
        return self._stage.restart("fast", self._lease * fault.leases)

    def _restart_immediate(self, fault: Fault) -> object:
        return self._stage.restart("immediate", self._lease * fault.leases)

    def _restart_kill(self, fault: Fault) -> object:
        return self._stage.restart("kill", self._lease * fault.leases)

    def _settings(self, fault: Fault, **settings: str) -> object:
        return self._stage.set_for_all(settings, self._lease * fault.leases)

    def _read_only(self, fault: Fault) -> object:
        return self._settings(fault, default_transaction_read_only="on")

    def _timeouts(self, fault: Fault) -> object:
        return self._settings(fault, statement_timeout="15ms", lock_timeout="5ms")

    def _serializable(self, fault: Fault) -> object:
        return self._settings(fault, default_transaction_isolation="serializable")

    def _hold_locks(self, fault: Fault) -> object:
        """Lock rows of a run as somebody's long transaction does."""
        runs = self._workload.open_runs()
        table = fault.dice.choice(["fanout_ledgers", "fanout_slots", "fanout_runs"])
        if not runs:
            return None
        key = "id" if table == "fanout_runs" else "run_id"
        with self._stage.connect() as connection, connection.transaction():
            locked = connection.execute(
                f"SELECT FROM {table} WHERE {key} = %s ORDER BY ctid FOR UPDATE",
                [fault.dice.choice(runs)],
            )
            time.sleep(self._lease * fault.leases)
            return f"{locked.rowcount} of {table}"

    # -- the network

    def _chosen(self, fault: Fault) -> Callable[[], bool]:
        dice = fault.dice
        share = dice.choice([0.2, 0.6, 1.0])
        return lambda: dice.random() < share

    def _cut(self, fault: Fault) -> object:
        return self._stage.proxy.cut(self._chosen(fault))

    def _lose_replies(self, fault: Fault) -> object:
        return self._stage.proxy.lose_replies(self._chosen(fault))

    def _lose_requests(self, fault: Fault) -> object:
        return self._stage.proxy.lose_requests(self._chosen(fault))

    def _swallow(self, fault: Fault) -> object:
        return self._stage.proxy.swallow(self._chosen(fault), self._lease * fault.leases)

    def _freeze(self, fault: Fault) -> object:
        return self._stage.proxy.freeze(self._chosen(fault), self._lease * fault.leases)

    def _delay(self, fault: Fault) -> object:
        latency = fault.dice.choice([0.05, 0.3, 1.0])
        return self._stage.proxy.delay(self._chosen(fault), self._lease * fault.leases, latency)

    def _refuse(self, fault: Fault) -> object:
        return self._stage.proxy.refuse(self._lease * fault.leases)

    # -- hands on the queue

    def _job(self, fault: Fault, condition: str) -> int | None:
        rows = self._stage.query(
            f"SELECT id FROM procrastinate_jobs WHERE {condition} ORDER BY id DESC LIMIT 50"
        )
        return fault.dice.choice(rows)["id"] if rows else None

    def _on_job(self, fault: Fault, condition: str, act: Callable[[int], object]) -> object:
        job = self._job(fault, condition)
        if job is None:
            return None
        try:
            return patiently(lambda: act(job)) and f"job {job}"
        except (procrastinate.exceptions.ConnectorException, psycopg.IntegrityError):
            return None  # refused: its queueing lock is taken, or it has ended meanwhile

    def _delete_job(self, fault: Fault) -> object:
        wanted = fault.dice.choice(["todo", "doing", "succeeded"])
        return self._on_job(
            fault,
            f"status = '{wanted}' AND {_OURS}",
            lambda job: self._stage.query(
                "DELETE FROM procrastinate_jobs WHERE id = %(job)s RETURNING id", job=job
            ),
        )

    def _cancel_job(self, fault: Fault) -> object:
        manager = chaos_app.app.job_manager
        return self._on_job(fault, f"status = 'todo' AND {_OURS}", manager.cancel_job_by_id)

    def _abort_job(self, fault: Fault) -> object:
        manager = chaos_app.app.job_manager
        return self._on_job(
            fault,
            f"status = 'doing' AND {_OURS}",
            lambda job: manager.cancel_job_by_id(job, abort=True),
        )

    def _retry_job(self, fault: Fault) -> object:
        return self._on_job(fault, f"status IN ('doing', 'failed') AND {_OURS}", _retried)

    def _retry_finished(self, fault: Fault) -> object:
        return self._on_job(
            fault,
            f"status IN ('succeeded', 'failed', 'aborted', 'cancelled') AND {_OURS}",
            lambda job: self._stage.query(
                "UPDATE procrastinate_jobs SET status = 'todo' WHERE id = %(job)s RETURNING id",
                job=job,
            ),
        )

    def _cancel_manager(self, fault: Fault) -> object:
        rows = self._stage.query(
            "SELECT id, manager_job_id FROM fanout_runs WHERE status = 'pending' ORDER BY id"
        )
        rows = [row for row in rows if row["id"] not in self._managers_cancelled]
        if not rows:
            return None
        row = fault.dice.choice(rows)
        self._managers_cancelled.add(row["id"])
        return chaos_app.app.job_manager.cancel_job_by_id(row["manager_job_id"], abort=True)

    def _delete_callback(self, fault: Fault) -> object:
        return self._on_job(
            fault,
            "status IN ('todo', 'doing') AND id IN (SELECT job_id FROM fanout_callbacks)",
            lambda job: self._stage.query(
                "DELETE FROM procrastinate_jobs WHERE id = %(job)s RETURNING id", job=job
            ),
        )

    def _retry_stalled(self, fault: Fault) -> object:
        """Do as procrastinate's documentation advises, with less patience."""
        rows = self._stage.query(
            "SELECT j.id FROM procrastinate_jobs j LEFT JOIN procrastinate_workers w"
            " ON w.id = j.worker_id WHERE j.status = 'doing' AND (w.id IS NULL"
            " OR w.last_heartbeat < now() - interval '12 seconds')"
        )
        retried = []
        for row in rows:
            try:
                patiently(lambda: _retried(row["id"]))  # noqa: B023 - called here
            except procrastinate.exceptions.ConnectorException:
                continue
            retried.append(row["id"])
        return retried

    # -- operators

    def _run(self, fault: Fault, runs: list[int]) -> Any:
        return self._workload.run(fault.dice.choice(runs)) if runs else None

    def _pause(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        if run is None:
            return None
        patiently(run.pause)
        time.sleep(self._lease * fault.leases)
        patiently(run.resume)
        return run

    def _limit(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        limit = fault.dice.choice([1, 3, 8, 30])
        try:
            return run and patiently(lambda: run.update(max_in_flight=limit)) and (run, limit)
        except errors.RunClosed:
            return None

    def _retry_failed(self, fault: Fault) -> object:
        run = self._run(fault, sorted(self._workload.runs))
        try:
            return run and patiently(run.retry_failed) and run
        except errors.RunClosed:
            return None

    def _cancel_run(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        if run is not None:
            self._workload.cancel(run.id, abort=fault.dice.random() < 0.5)
        return run


def _retried(job: int) -> bool:
    chaos_app.app.job_manager.retry_job_by_id(job, datetime.datetime.now(datetime.UTC))
    return True
