"""What people do: hands on procrastinate's queue, and operators of runs."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import procrastinate.exceptions
import psycopg
from procrastinate import sql

from fanout_procrastinate import errors
from tests.chaos import app as chaos_app
from tests.chaos.plan import Fault
from tests.chaos.stage import Stage, patiently
from tests.chaos.workload import Workload

_CHILDREN = "queueing_lock LIKE 'fanout_child:%%'"
_OTHERS = "task_name LIKE 'tests.chaos.app.%%' AND NOT args ? 'slot'"
"""Managers and callbacks."""


class Hands:
    """Lay hands on jobs and runs; each method does one kind of fault, and returns what it hit."""

    def __init__(self, stage: Stage, workload: Workload, lease: float) -> None:
        self._stage = stage
        self._workload = workload
        self._lease = lease
        self._managers_cancelled: set[int] = set()

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

    def delete_job(self, fault: Fault) -> object:
        wanted = fault.dice.choice(["todo", "doing", "succeeded"])
        return self._on_job(
            fault,
            f"status = '{wanted}' AND {_CHILDREN}",
            lambda job: self._stage.query(
                "DELETE FROM procrastinate_jobs WHERE id = %(job)s RETURNING id", job=job
            ),
        )

    def cancel_job(self, fault: Fault) -> object:
        manager = chaos_app.app.job_manager
        return self._on_job(fault, f"status = 'todo' AND {_CHILDREN}", manager.cancel_job_by_id)

    def abort_job(self, fault: Fault) -> object:
        manager = chaos_app.app.job_manager
        return self._on_job(
            fault,
            f"status = 'doing' AND {_CHILDREN}",
            lambda job: manager.cancel_job_by_id(job, abort=True),
        )

    def retry_job(self, fault: Fault) -> object:
        return self._on_job(fault, f"status IN ('doing', 'failed') AND {_CHILDREN}", _retried)

    def retry_finished(self, fault: Fault) -> object:
        """Put back a finished job of ours: of a child, or of a callback or manager."""
        whose = fault.dice.choice([_CHILDREN, _OTHERS])
        return self._on_job(
            fault,
            f"status IN ('succeeded', 'failed', 'aborted', 'cancelled') AND {whose}",
            lambda job: self._stage.query(
                "UPDATE procrastinate_jobs SET status = 'todo' WHERE id = %(job)s RETURNING id",
                job=job,
            ),
        )

    def cancel_manager(self, fault: Fault) -> object:
        rows = self._stage.query(
            "SELECT id, manager_job_id FROM fanout_runs WHERE status = 'pending' ORDER BY id"
        )
        rows = [row for row in rows if row["id"] not in self._managers_cancelled]
        if not rows:
            return None
        row = fault.dice.choice(rows)
        self._managers_cancelled.add(row["id"])
        return chaos_app.app.job_manager.cancel_job_by_id(row["manager_job_id"], abort=True)

    def delete_callback(self, fault: Fault) -> object:
        return self._on_job(
            fault,
            "status IN ('todo', 'doing') AND id IN (SELECT job_id FROM fanout_callbacks)",
            lambda job: self._stage.query(
                "DELETE FROM procrastinate_jobs WHERE id = %(job)s RETURNING id", job=job
            ),
        )

    def retry_stalled(self, fault: Fault) -> object:
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

    def remove_old_jobs(self, fault: Fault) -> object:
        """Remove all that has ended, as procrastinate's own task does each night."""
        rows = self._stage.query(
            sql.queries["delete_old_jobs"].rstrip("; \n") + " RETURNING id",
            nb_hours=0,
            queue=None,
            statuses=["succeeded", "failed", "cancelled", "aborted"],
        )
        return len(rows)

    def prune_workers(self, fault: Fault) -> object:
        """Forget workers as procrastinate does, with less patience: living ones too."""
        rows = self._stage.query("SELECT procrastinate_prune_stalled_workers_v1(4)")
        return len(rows)

    # -- operators

    def _run(self, fault: Fault, runs: list[int]) -> Any:
        return self._workload.run(fault.dice.choice(runs)) if runs else None

    def pause(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        if run is None:
            return None
        patiently(run.pause)
        time.sleep(self._lease * fault.leases)
        patiently(run.resume)
        return run

    def limit(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        limit = fault.dice.choice([1, 3, 8, 30])
        try:
            return run and patiently(lambda: run.update(max_in_flight=limit)) and (run, limit)
        except errors.RunClosed:
            return None

    def retry_failed(self, fault: Fault) -> object:
        run = self._run(fault, sorted(self._workload.runs))
        try:
            return run and patiently(run.retry_failed) and run
        except errors.RunClosed:
            return None

    def cancel_run(self, fault: Fault) -> object:
        run = self._run(fault, self._workload.open_runs())
        if run is not None:
            self._workload.cancel(run.id, abort=fault.dice.random() < 0.5)
        return run


def _retried(job: int) -> bool:
    chaos_app.app.job_manager.retry_job_by_id(job, datetime.datetime.now(datetime.UTC))
    return True
