"""The sweep: one pass over what is broken. The logic is in `sweep_once`; others do the timing."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fanout_procrastinate import errors, models, steps, store

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RUNS_PER_SWEEP = 1000
_ROWS_PER_BATCH = 2000
_BATCHES_PER_SWEEP = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweeper:
    """Repair what crashes and hands on the queue have left.

    Args:
        run: runs one call in a transaction of its own.
        lease: seconds of silence after which a worker counts as dead.
        retention: seconds for which closed runs are kept; ``None`` = for ever.
        tasks: names of the library's own tasks, whose old job rows go with old runs.
        on_stuck: told a run, whether it was closed as stuck, and why; or that it waits for a
            worker. ``None`` = nobody asks.
        on_swept: told what was done, as counts by name.
    """

    run: store.RunCall
    lease: float
    retention: float | None = None
    tasks: Sequence[str] = ()
    on_stuck: Callable[[int, bool, str], None] | None = None
    on_swept: Callable[[Mapping[str, int]], None] = lambda done: None

    @property
    def second_look(self) -> float:
        """Return the seconds after which a slot found silent may be rescued."""
        return self.lease / 4

    def sweep_once(self) -> models.SweepReport:
        """Look at every open run, and repair each broken one on its own.

        On a healthy system nothing is written. A run that cannot be repaired is reported and does
        not keep the others from it.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer at all.
        """
        runs = self.run(store.sweep_plan(self.lease, _RUNS_PER_SWEEP))
        done, failed = self._repair(runs)
        self._tell_unserved()
        done["dead_permits"] += self.run(store.sweep_permits())
        done.update(self._pass_on())
        done.update(self._tidy())
        if self.retention is not None:
            done.update(self.prune(self.retention, _BATCHES_PER_SWEEP))
        self.on_swept(+done)
        return models.SweepReport(runs=runs, done=+done, errors=failed)

    def look_once(self) -> models.SweepReport:
        """Look only for what is at work and silent, which is cheap; otherwise like `sweep_once`."""
        runs = self.run(store.silent(self.lease))
        done, failed = self._repair(runs)
        self.on_swept(+done)
        return models.SweepReport(runs=runs, done=+done, errors=failed)

    def prune(self, age: float, most: int | None = None) -> dict[str, int]:
        """Remove the runs that closed so many seconds ago, and the library's own jobs that ended.

        Args:
            age: in seconds.
            most: batches of each kind; ``None`` = until nothing is left that was so old at first.

        Returns how many rows were removed, by name.

        Raises:
            SchemaError: the tables are missing.
            DatabaseError: the database did not answer.
        """
        begun = time.monotonic()

        def batches(call: Callable[[float], store.Call[int]]) -> int:
            total = 0
            for _ in itertools.count() if most is None else range(most):
                rows = self.run(call(age + time.monotonic() - begun))
                total += rows
                if rows == 0:
                    break
            return total

        return {
            "pruned": batches(lambda age: store.prune(age, _ROWS_PER_BATCH)),
            "pruned_jobs": batches(lambda age: store.prune_jobs(self.tasks, age, _ROWS_PER_BATCH)),
        }

    def _repair(self, runs: Mapping[int, str]) -> tuple[Counter[str], dict[int, str]]:
        done: Counter[str] = Counter()
        failed: dict[int, str] = {}
        for run_id, finding in runs.items():
            try:
                counts = self.run(store.sweep_run(run_id, self.lease))
            except errors.DatabaseError as exc:
                failed[run_id] = str(exc)
                logger.exception(
                    "Run %s could not be repaired (%s): %s",
                    run_id,
                    finding,
                    exc,
                    extra={"action": "sweep_failed", "run_id": run_id, "finding": finding},
                )
                continue
            done.update(counts)
            _log_repair(run_id, finding, counts)
            if counts.get("stopped"):
                self._tell_if_stuck(run_id)
        return done, failed

    def _tell_if_stuck(self, run_id: int) -> None:
        """Tell of a run that was stopped, if that was for it was stuck."""
        if self.on_stuck is None:
            return
        progress = self.run(store.progress(run_id))
        if progress is not None and (progress.reason or "").startswith("stuck"):
            self.on_stuck(run_id, True, progress.reason)

    def _tell_unserved(self) -> None:
        """Tell of the runs that nobody has worked on for `stuck_after`, for want of a worker."""
        if self.on_stuck is None:
            return
        for run_id, queue in self.run(store.unserved(_RUNS_PER_SWEEP)).items():
            self.on_stuck(run_id, False, f"waits for a worker on queue {queue}")

    def _pass_on(self) -> dict[str, int]:
        runs = self.run(store.lines())
        return {"passed_on": sum(steps.drive(self.run, steps.pass_on(run_id)) for run_id in runs)}

    def _tidy(self) -> dict[str, int]:
        rows = 0
        for run_id in self.run(store.untidy(10)):
            for _ in range(_BATCHES_PER_SWEEP):
                rows += self.run(store.tidy(run_id, _ROWS_PER_BATCH))
                if run_id not in self.run(store.untidy(10)):
                    break
        return {"tidied": rows}


def _log_repair(run_id: int, finding: str, counts: dict[str, int]) -> None:
    if not counts:
        return
    extra = {"action": "sweep_repair", "run_id": run_id, "finding": finding, "done": counts}
    if counts.get("recounted"):
        message = "Run %s repaired, whose counters disagreed with its items (%s): %s"
        logger.error(message, run_id, finding, _words(counts), extra=extra)
    else:
        logger.warning("Run %s repaired (%s): %s", run_id, finding, _words(counts), extra=extra)


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
