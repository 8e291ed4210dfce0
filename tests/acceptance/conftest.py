"""What acceptance tests share: the scripted app on a database, and its workers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import procrastinate
import pytest

from tests import invariants
from tests.acceptance.scene import Scene
from tests.apps import journal, scripted
from tests.conftest import Connection
from tests.workers import Worker


@pytest.fixture
def scene(
    dsn: str,
    connect: Callable[..., Connection],
    workers: Callable[..., Worker],
    tmp_path: Path,
) -> Iterator[Scene]:
    """The scripted app on the test's database, and whatever happens to it."""
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with scripted.app.replace_connector(connector), scripted.app.open():
        yield Scene(connect, workers, journal.Journal(tmp_path / "journal"))
        scripted.fanout.close()
    invariants.check(connect(), damaged=True)
