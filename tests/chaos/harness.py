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
from tests.chaos.breakage import Breakage
from tests.chaos.crew import MARK_VARIABLE, Crew
from tests.chaos.faults import Faults, Span
from tests.chaos.hands import Hands
from tests.chaos.plan import plan
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


def play(options: Options, tell: Callable[[str], None]) -> Result:
    """Play one round, and tell of each fault as it begins."""
    with Stage() as stage, opened(stage):
        try:
            return Round(stage, options, tell).play()
        finally:
            (options.folder / "server.log").write_text(stage.server_log())


class Round:
    """A round on its stage."""

    def __init__(self, stage: Stage, options: Options, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._options = options
        self._tell = tell
        self._findings: dict[str, list[str]] = {}
        self._journal = journal.Journal(options.folder / "journal")
        env = {
            journal.VARIABLE: str(self._journal.path),
            chaos_app.LEASE_VARIABLE: str(options.lease),
            MARK_VARIABLE: secrets.token_hex(8),
        }
        self._crew = Crew(stage.proxied_dsn, options.folder, env, options.workers, options.seed)
        self._workload = Workload(stage, options.seed, options.open_runs)
        self._faults = Faults(
            Breakage(stage, self._crew, self._workload, options.lease),
            Hands(stage, self._workload, options.lease),
        )
        self._over = threading.Event()
        self._onlooker = threading.Thread(target=self._look_on, name="chaos-onlooker")

    def play(self) -> Result:
        """Do it all."""
        try:
            self._crew.start()
            self._workload.start()
            self._onlooker.start()
            self._break()
            rest = self._come_to_rest()
        finally:
            self._end()
        record = Record.read(
            self._stage,
            lease=self._options.lease,
            specs=dict(self._workload.runs),
            cancelled=frozenset(self._workload.cancelled),
            lines=self._journal.read(),
            lives=self._crew.lives,
            spans=self._faults.spans,
        )
        self._judge(record)
        return Result(
            findings=self._findings,
            faults=self._faults.count(hit=True),
            missed=self._faults.count(hit=False),
            ends=self._crew.ends,
            figures=record.figures(),
            longest_stall=record.longest_stall(),
            rest=rest,
        )

    def _break(self) -> None:
        """Do the planned faults, each at its time, however long the others last."""
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(16, "chaos-fault") as threads:
            for fault in plan(self._options.seed, self._options.seconds):
                time.sleep(max(0.0, began + fault.at - time.monotonic()))
                threads.submit(self._faults.do, fault)
                self._tell(
                    f"{time.monotonic() - began:6.1f} s"
                    f"  {len(self._workload.runs):3d} runs  fault {fault.number + 1}: {fault.kind}"
                )
            time.sleep(max(0.0, began + self._options.seconds - time.monotonic()))

    def _look_on(self) -> None:
        """See to it that what must hold at every moment does."""
        while not self._over.wait(_LOOK_SECONDS):
            try:
                with self._stage.connect() as connection:
                    invariants.check(connection, damaged=True)
            except AssertionError as exc:
                self._find("invariants hold at every moment", [str(exc)])
            except Exception as exc:
                if not is_away(exc):
                    raise

    def _come_to_rest(self) -> float:
        """Wait until every run is closed and every callback is called; return the seconds."""
        self._workload.end()
        self._stage.proxy.heal()
        began = time.monotonic()
        while time.monotonic() - began < REST_SECONDS:
            # In this order: a close owes callbacks.
            if not self._workload.open_runs() and not self._stage.query(_OWED):
                break
            time.sleep(0.2)
        return time.monotonic() - began

    def _end(self) -> None:
        self._over.set()
        left = self._crew.close()
        self._onlooker.join()
        (self._options.folder / "faults.log").write_text(_told(self._faults.spans))
        self._find("no process is left", [f"process {pid}" for pid in left])
        self._find("workers start and end when asked to", self._crew.stuck)
        self._find("workers leave no coroutine behind", self._crew.alarms)
        self._find("runs can be started", self._workload.errors)
        self._find("faults can be done", self._faults.errors)

    def _judge(self, record: Record) -> None:
        for judge in judges.JUDGES:
            self._find(judge.__name__, list(judge(record)))
        with self._stage.connect() as connection:
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


def _told(spans: Sequence[Span]) -> str:
    """Return the faults as lines, in the order in which they began."""
    first = min((span.began for span in spans), default=0.0)
    return "".join(
        f"{span.fault.number + 1:4d} {span.began - first:7.2f} s {span.seconds:6.2f} s long"
        f"  {span.fault.kind}: {span.hit or 'hit nothing'}\n"
        for span in sorted(spans, key=lambda span: span.began)
    )
