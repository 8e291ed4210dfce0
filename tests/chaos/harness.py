"""One round: build the system, break it by plan, let it come to rest, and judge."""

import concurrent.futures
import dataclasses
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import invariants
from tests.apps import journal
from tests.chaos import app as chaos_app
from tests.chaos import judges
from tests.chaos.crew import MARK_VARIABLE, Crew
from tests.chaos.faults import Faults
from tests.chaos.plan import Fault, plan
from tests.chaos.record import Record
from tests.chaos.stage import Stage, is_away
from tests.chaos.workload import Workload, opened

REST_SECONDS = 120.0
"""After the last fault every run has to be closed by then. Procrastinate takes 30 s to see that a
worker is dead which had fetched a job and not begun it."""
_AUDIT_SECONDS = 60.0
_LOOK_SECONDS = 2.0
_OWED = "SELECT run_id FROM fanout_callbacks WHERE state IN ('owed', 'running')"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What kind of round: `seconds` of faults, for `workers` on `open_runs` runs at a time."""

    seconds: float
    seed: int
    folder: Path
    workers: int = 3
    open_runs: int = 4
    lease: float = chaos_app.LEASE_SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a round went; `findings` say what is wrong, by the name of what should hold."""

    findings: dict[str, list[str]]
    faults: Counter[str]
    missed: Counter[str]
    ends: Counter[str]
    figures: Counter[str]
    longest_stall: float
    rest: float

    @property
    def lost(self) -> int:
        """Return how many things were lost: runs, items, callbacks that did not end."""
        return sum(len(self.findings.get(one.__name__, ())) for one in judges.LOSSES)

    @property
    def double(self) -> int:
        """Return how many things were done twice."""
        return sum(len(self.findings.get(one.__name__, ())) for one in judges.DOUBLES)


class Round:
    """A round with its system running."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self._options = options
        self._tell = tell
        self._findings: dict[str, list[str]] = {}
        self._log = journal.Journal(options.folder / "journal")
        self._over = threading.Event()

    def run(self) -> Result:
        """Do it all."""
        with Stage() as stage, opened(stage):
            try:
                return self._run(stage)
            finally:
                log = self._options.folder / "server.log"
                log.write_text(stage.server_log())

    def _run(self, stage: Stage) -> Result:
        options = self._options
        env = {
            journal.VARIABLE: str(self._log.path),
            chaos_app.LEASE_VARIABLE: str(options.lease),
            MARK_VARIABLE: secrets.token_hex(8),
        }
        crew = Crew(stage.proxied_dsn, options.folder, env, options.workers, options.seed)
        workload = Workload(stage, options.seed, options.open_runs)
        faults = Faults(stage, crew, workload, options.lease)
        onlooker = threading.Thread(target=self._look_on, args=[stage], name="chaos-onlooker")
        try:
            crew.start()
            workload.start()
            onlooker.start()
            self._break(faults, workload)
            workload.end()
            stage.proxy.heal()
            rest = self._wait_for_rest(stage, workload)
        finally:
            self._over.set()
            left = crew.close()
            onlooker.join()
            (options.folder / "faults.log").write_text("\n".join(faults.log) + "\n")
        self._find("no process is left", [f"process {pid}" for pid in left])
        self._find("workers start and end when asked to", crew.stuck)
        self._find("runs can be started", workload.errors)
        self._find("faults can be done", faults.errors)
        record = Record.read(stage, workload.runs, workload.cancelled, self._log, crew.lives)
        self._judge(stage, record)
        return Result(
            findings=self._findings,
            faults=faults.done,
            missed=faults.missed,
            ends=crew.ends,
            figures=record.figures(),
            longest_stall=record.longest_stall(),
            rest=rest,
        )

    def _break(self, faults: Faults, workload: Workload) -> None:
        """Do the planned faults, each at its time, however long the others last."""
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(16, "chaos-fault") as threads:
            for fault in plan(self._options.seed, self._options.seconds):
                time.sleep(max(0.0, began + fault.at - time.monotonic()))
                threads.submit(faults.do, fault, began)
                self._tell(_line(began, fault, workload))
            time.sleep(max(0.0, began + self._options.seconds - time.monotonic()))

    def _look_on(self, stage: Stage) -> None:
        """See to it that what must hold at every moment does."""
        while not self._over.wait(_LOOK_SECONDS):
            try:
                with stage.connect() as connection:
                    invariants.check(connection, damaged=True)
            except AssertionError as exc:
                self._find("invariants hold at every moment", [str(exc)])
            except Exception as exc:
                if not is_away(exc):
                    raise

    def _wait_for_rest(self, stage: Stage, workload: Workload) -> float:
        """Wait until every run is closed and every callback is called; return the seconds."""
        began = time.monotonic()
        while time.monotonic() - began < REST_SECONDS:
            # In this order: a close owes callbacks.
            if not workload.open_runs() and not stage.query(_OWED):
                break
            time.sleep(0.2)
        return time.monotonic() - began

    def _judge(self, stage: Stage, record: Record) -> None:
        for judge in judges.JUDGES:
            self._find(judge.__name__, list(judge(record)))
        with stage.connect() as connection:
            for check in (invariants.check, invariants.check_quiet):
                try:
                    check(connection)
                except AssertionError as exc:
                    self._find(f"invariants.{check.__name__}", [str(exc)])
        audit = chaos_app.fanout.audit(timeout=_AUDIT_SECONDS)
        self._find("the audit finds nothing", [str(finding) for finding in audit])

    def _find(self, name: str, found: Sequence[str]) -> None:
        if found:
            self._findings.setdefault(name, []).extend(found)


def _line(began: float, fault: Fault, workload: Workload) -> str:
    return (
        f"{time.monotonic() - began:6.1f} s  run {max(workload.runs, default=0):3d}"
        f"  fault {fault.number + 1:3d}: {fault.kind}"
    )
