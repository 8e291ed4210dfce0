"""What acceptance tests share: workers of the scripted app, its journal, and looks at the tables."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import procrastinate
import pytest

from tests import invariants
from tests.acceptance.scene import Scene
from tests.apps import journal, scripted
from tests.conftest import Connection
from tests.workers import Worker


@pytest.fixture
def scene(
    dsn: str, conn: Connection, workers: Callable[..., Worker], tmp_path: Path
) -> Iterator[Scene]:
    """The scripted app on the test's database, and whatever happens to it."""
    connector = procrastinate.SyncPsycopgConnector(conninfo=dsn)
    with scripted.app.replace_connector(connector), scripted.app.open():
        yield Scene(conn, workers, journal.Journal(tmp_path / "journal"))
        scripted.fanout.close()
    invariants.check(conn, damaged=True)
