"""The runs of a round: so many are open at any time; and what operators do to them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import procrastinate
import psycopg_pool

from fanout_procrastinate import Run
from tests.chaos import app as chaos_app
from tests.chaos import pieces
from tests.chaos.stage import Stage, patiently


class Workload:
    """Start runs, each time one has closed, until `end`.

    The app is open for as long as this is: `with Workload(stage, 1, 4) as workload`.
    """

    def __init__(self, stage: Stage, seed: int, open_runs: int) -> None:
        self._stage = stage
        self._specs = pieces.specs(seed)
        self._open_runs = open_runs
        self.runs: dict[int, pieces.Spec] = {}
        self.cancelled: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="chaos-workload", daemon=True)
        self.errors: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Start no more."""
        self._ending.set()
        self._thread.join()

    def run(self, run_id: int) -> Run:
        return patiently(lambda: chaos_app.fanout.get_run(run_id))

    def open_runs(self) -> list[int]:
        rows = self._stage.query(
            "SELECT id FROM fanout_runs WHERE status IN ('pending', 'processing') ORDER BY id"
        )
        return [row["id"] for row in rows]

    def closed_runs(self) -> list[int]:
        return sorted(set(self.runs) - set(self.open_runs()))

    def cancel(self, run_id: int, abort: bool) -> None:
        """Cancel a run; from now on it may close as cancelled."""
        self.cancelled.add(run_id)
        run = self.run(run_id)
        patiently(lambda: run.cancel(abort=abort, reason="chaos"))

    def _loop(self) -> None:
        while not self._ending.is_set():
            try:
                for _ in range(self._open_runs - len(self.open_runs())):
                    self._start_one(next(self._specs))
            except Exception as exc:  # noqa: BLE001 - it is part of the verdict
                self.errors.append(f"a run could not be started: {exc!r}")
            time.sleep(0.2)

    def _start_one(self, spec: pieces.Spec) -> None:
        manager: Any = chaos_app.MANAGERS[spec.listing]
        # The key makes it safe to ask again where the answer was lost.
        deferrer = manager.configure(
            run_key=f"run {spec.number}", max_in_flight=spec.max_in_flight, tags=[spec.seed]
        )
        run = patiently(
            lambda: deferrer.defer(count=spec.count, seed=spec.seed, stumble=spec.stumble)
        )
        self.runs[run.id] = spec


@contextlib.contextmanager
def opened(stage: Stage) -> Iterator[None]:
    """Open the harness's own app on the database, straight, with a new connection for each call."""
    app = chaos_app.app
    with (
        psycopg_pool.NullConnectionPool(stage.dsn, open=True, max_size=20) as pool,
        app.replace_connector(procrastinate.SyncPsycopgConnector()),
        app.open(pool),
    ):
        yield
        chaos_app.fanout.close()
