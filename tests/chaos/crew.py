"""The worker processes of a round: each place is filled again as soon as its worker has ended."""

import dataclasses
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.chaos import app as chaos_app
from tests.workers import Worker

MARK_VARIABLE = "FANOUT_CHAOS"
"""In the environment of all that workers start."""
_AWAKE_SECONDS = 5.0
"""A worker that was woken up may find out later than this that it has lost what it held."""
KILLED = "killed"
TAKEN_ALONG = "taken along"
"""By an item or a manager."""
_DEATHS = (KILLED, TAKEN_ALONG)
_USAGE = 2
"""The exit code where the app cannot be loaded."""
_LOGGED = {
    "PYTHONFAULTHANDLER": "1",
    "PROCRASTINATE_LOG_FORMAT": "%(asctime)s %(levelname)s %(name)s: %(message)s",
}
_ALARMS = ("was never awaited", "Task was destroyed but it is pending")
"""What Python says of faulty code."""
END_SECONDS = 60.0
"""A worker asked to stop has to be gone by then."""


@dataclasses.dataclass(kw_only=True)
class Life:
    """One worker's life; times are the clock's, in seconds."""

    name: str
    """Its connections' ``application_name``."""
    pid: int
    began: float
    ended: float | None = None
    how: str = ""
    """What ended it."""
    stops: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """When it was stopped, and when it was woken again."""

    def well_at(self, moment: float) -> bool:
        """Return whether nothing excuses that it held something then without renewing it.

        It has died by then, or was stopped a moment before. An end in good order is no excuse.
        """
        died = self.how in _DEATHS and self.ended is not None and self.ended < moment
        stopped = any(began < moment < ended + _AWAKE_SECONDS for began, ended in self.stops)
        return not died and not stopped


class Berth:
    """One place for a worker, and the one in it."""

    def __init__(self, number: int, dice: random.Random) -> None:
        self.number = number
        self.dice = dice
        self.worker: Worker | None = None
        self.life: Life | None = None
        self.started = 0
        self.stopped = False
        """By SIGSTOP."""
        self.wanted_since: float | None = None
        """When it was asked to end, by whatever signal."""
        self.how = ""


class Crew:
    """Start workers, see to it that there are enough of them, and keep what they logged.

    Args:
        dsn: their database, through the proxy.
        folder: for their logs.
        env: for their environment.
    """

    def __init__(
        self, dsn: str, folder: Path, env: Mapping[str, str], size: int, seed: int
    ) -> None:
        self._dsn = dsn
        self._folder = folder
        self._env = env
        self.berths = [
            Berth(number, random.Random(f"{seed}:berth {number}")) for number in range(size)
        ]
        self.ends: Counter[str] = Counter()
        self.stuck: list[str] = []
        self.alarms: list[str] = []
        self.lives: list[Life] = []
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-crew", daemon=True)

    def start(self) -> None:
        """Fill all places."""
        for berth in self.berths:
            self._fill(berth)
        self._thread.start()

    def kill(self, berth: Berth) -> bool:
        """End the worker as the out-of-memory killer does; return whether there was one."""
        return self._signal(berth, signal.SIGKILL, KILLED)

    def term(self, berth: Berth) -> bool:
        """Ask the worker to end, as a deployment does."""
        return self._signal(berth, signal.SIGTERM, "asked to end")

    def freeze(self, berth: Berth, seconds: float) -> bool:
        """Stop the worker for a time, and wake it."""
        with self._lock:
            worker, life = berth.worker, berth.life
            if worker is None or life is None or berth.stopped or not worker.is_running():
                return False
            worker.kill(signal.SIGSTOP)
            berth.stopped = True
        began = time.time()
        time.sleep(seconds)
        with self._lock:
            worker.kill(signal.SIGCONT)
            life.stops.append((began, time.time()))
            if berth.worker is worker:
                berth.stopped = False
        return True

    def close(self) -> list[int]:
        """End all workers as a deployment does; return the pids of what is left of them."""
        self._ending.set()
        self._thread.join()
        with self._lock:
            for berth in self.berths:
                self._signal(berth, signal.SIGCONT, "")
                self._signal(berth, signal.SIGTERM, "at the end")
            for berth in self.berths:
                self._ended(berth, END_SECONDS)
        return left_over(self._env[MARK_VARIABLE])

    def _signal(self, berth: Berth, number: signal.Signals, how: str) -> bool:
        with self._lock:
            worker = berth.worker
            if worker is None or not worker.is_running() or berth.how == how != "":
                return False
            worker.kill(number)
            if how:
                berth.how = how
                berth.wanted_since = time.monotonic()
            return True

    def _watch(self) -> None:
        while not self._ending.wait(0.1):
            for berth in self.berths:
                with self._lock:
                    self._look_at(berth)

    def _look_at(self, berth: Berth) -> None:
        worker = berth.worker
        if worker is None or not worker.is_running():
            self._ended(berth, 1.0)
            self._fill(berth)
        elif berth.wanted_since is None or berth.stopped:
            return
        elif time.monotonic() - berth.wanted_since > END_SECONDS:
            self._ended(berth, 0.0)

    def _ended(self, berth: Berth, timeout: float) -> None:
        """Note how a worker ended, keep its log, and make its place free."""
        worker = berth.worker
        life = berth.life
        if worker is None or life is None:
            return
        try:
            code = worker.wait(timeout)
        except AssertionError:
            self.stuck.append(f"worker {worker.pid} ({berth.how}) still ran after {END_SECONDS} s")
            worker.kill(signal.SIGABRT)  # faulthandler writes where it hangs
            time.sleep(1.0)
            worker.kill(signal.SIGKILL)
            code = worker.wait()
        took_along = code == chaos_app.EXIT_CODE
        life.how = TAKEN_ALONG if took_along else berth.how or f"by itself ({code})"
        if code == _USAGE:
            self.stuck.append(f"worker {worker.pid} could not start: {worker.output()[-500:]}")
        life.ended = time.time()
        self.ends[life.how] += 1
        self._keep_log(life, worker.output())
        worker.close()
        berth.worker = None

    def _keep_log(self, life: Life, output: str) -> None:
        for line in output.splitlines():
            if any(alarm in line for alarm in _ALARMS):
                self.alarms.append(f"{life.name}: {line}")
        (self._folder / f"{life.name}.log").write_text(f"{output}\n{life}\n")

    def _fill(self, berth: Berth) -> None:
        dice = berth.dice
        arguments = ["--fetch-job-polling-interval=1"]
        if dice.random() < 0.5:
            arguments.append(f"--shutdown-graceful-timeout={dice.choice([0.5, 2])}")
        arguments.append(f"--delete-jobs={dice.choice(['never', 'never', 'successful', 'always'])}")
        berth.started += 1
        name = f"worker-{berth.number}-{berth.started}"
        berth.worker = Worker(
            self._dsn,
            "tests.chaos.app.app",
            queues=chaos_app.QUEUE,
            concurrency=dice.choice([3, 5, 8]),
            arguments=arguments,
            env={**self._env, **_LOGGED, "PGAPPNAME": name},
        )
        berth.life = Life(name=name, pid=berth.worker.pid, began=time.time())
        self.lives.append(berth.life)
        berth.stopped = False
        berth.wanted_since = None
        berth.how = ""


def left_over(mark: str, timeout: float = 10.0) -> list[int]:
    """End the processes that carry this mark, and return those that lived too long."""
    deadline = time.monotonic() + timeout
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        process.kill()
    return [process.pid for process in found]


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE) == mark and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found
