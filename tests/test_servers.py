"""The ground that the other tests stand on: servers, databases and guarded processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg import conninfo

from tests import servers
from tests.databases import Databases, environment
from tests.guarded import Guarded
from tests.waiting import wait_until
from tests.workers import ROOT

OWNER = """
import sys, time
from tests import installations, servers
server = servers.Server(installations.find(int(sys.argv[1]))).start()
print(server.root, flush=True)
time.sleep(600)
"""


def test_server_is_of_the_wanted_version(server: servers.Server | servers.GivenServer) -> None:
    with psycopg.connect(server.dsn) as connection:
        assert connection.info.server_version // 10000 == server.version


def test_bare_database_has_the_host_schema(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM procrastinate_jobs").fetchone() == (0,)


@pytest.mark.database_settings(deadlock_timeout="50ms")
def test_database_has_settings_of_its_own(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn) as connection:
        assert connection.execute("SHOW deadlock_timeout").fetchone() == ("50ms",)


def test_connections_are_seen(bare_dsn: str, databases: Databases) -> None:
    name = str(conninfo.conninfo_to_dict(bare_dsn)["dbname"])
    with psycopg.connect(bare_dsn, application_name="left behind"):
        (line,) = databases.connections(name)
    assert "left behind" in line
    wait_until(lambda: not databases.connections(name))


@pytest.mark.parametrize("how", ["fast", "immediate", "kill"])
def test_server_starts_again_on_its_data(
    own_server: Callable[..., servers.Server], how: servers.Stop
) -> None:
    server = own_server(tcp=True)
    dsn = conninfo.make_conninfo(server.dsn, host="127.0.0.1")
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    server.stop(how)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)
    server.start()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT one FROM kept").fetchone() == (1,)


def test_server_that_cannot_start_says_why(own_server: Callable[..., servers.Server]) -> None:
    with pytest.raises(RuntimeError, match="max_connections"):
        own_server(settings={"max_connections": "many"})


def test_server_dies_with_its_owner() -> None:
    version = os.environ.get("FANOUT_TEST_PG", "18")
    command = [sys.executable, "-c", OWNER, version]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        postmaster = int((root / "data/postmaster.pid").read_text().split()[0])
        owner.kill()
    wait_until(lambda: not root.exists())
    with pytest.raises(ProcessLookupError):
        os.kill(postmaster, 0)


def test_environment_names_the_database(bare_dsn: str) -> None:
    named = environment(bare_dsn)
    assert named["PGDATABASE"] == conninfo.conninfo_to_dict(bare_dsn)["dbname"]


def test_guarded_tells_the_exit_code(tmp_path: Path) -> None:
    guarded = Guarded(["sh", "-c", "echo said; exit 3"], log=tmp_path / "log")
    assert guarded.wait(10.0) == 3
    guarded.close()
    assert (tmp_path / "log").read_text() == "said\n"


def test_guarded_ends_the_whole_group(tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    guarded = Guarded(command, log=tmp_path / "log", remove=[folder])
    child = int(wait_until((tmp_path / "log").read_text))
    guarded.send_signal(signal.SIGKILL)
    assert guarded.wait(10.0) == -signal.SIGKILL
    os.kill(child, 0)
    guarded.close()
    wait_until(lambda: not _runs(child))
    assert not folder.exists()


def test_guarded_says_what_it_cannot_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="no-such-command"):
        Guarded(["no-such-command"], log=tmp_path / "log")
    assert "FileNotFoundError" in capfd.readouterr().err


def _runs(pid: int) -> bool:
    """Tell whether a process runs; an orphan may stay a zombie where nobody reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
