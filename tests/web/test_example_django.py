"""The Django example: migrations, a run in the request's transaction, staff on the dashboard."""

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import psycopg
import pytest

from tests.databases import Databases, environment
from tests.waiting import wait_until
from tests.web.served import Served, own_environment
from tests.workers import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.pg18_only]

PROJECT = ROOT / "examples/django_project"
STAFF = {"username": "anna", "password": "a long password"}
CREATE_STAFF = (
    "from django.contrib.auth.models import User;"
    f"User.objects.create_user(is_staff=True, **{STAFF!r});"
    "User.objects.create_user('ben', password='another password')"
)


BATCH = '{"name": "%s", "documents": [{"title": "%s", "text": "%s"}]}'
BROKEN = [
    *("{", "[]", "{}", '{"name": "x", "documents": 7}', '"x"', b"\xff"),
    *(BATCH % ("\\u0000", "t", "a"), BATCH % ("n", "\\u0000", "a"), BATCH % ("n", "t", "\\u0000")),
    *(BATCH % ("\\ud800", "t", "a"), BATCH % ("n", "\\ud800", "a"), BATCH % ("n", "t", "\\ud800")),
    *(BATCH % ("n" * 201, "t", "a"), BATCH % ("n", "t" * 201, "a")),
    *("[" * 100_000, '{"name": ' + "[" * 900 + "]" * 900 + ', "documents": []}'),
]


def manage(dsn: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROJECT,
        env={**own_environment(), **environment(dsn)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def project(databases: Databases) -> Iterator[str]:
    """A database as `migrate` makes it."""
    name = f"fanout_django_{secrets.token_hex(4)}"
    dsn = databases.create(name)
    manage(dsn, "migrate", "--verbosity=0")
    yield dsn
    databases.drop(name)


@pytest.fixture
def start(project: str) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*command: str) -> Served:
        started.append(Served(project, command=command, cwd=PROJECT))
        return started[-1]

    yield start
    for one in started:
        print(one.output())
        one.close()


def log_in(client: httpx.Client, **who: str) -> httpx.Response:
    """Do what a browser does at Django's own login."""
    client.get("/login/")
    token = {"csrfmiddlewaretoken": client.cookies["csrftoken"]}
    return client.post("/login/", data=who | token)


def test_project(project: str, start: Callable[..., Served]) -> None:
    """C02: what the request rolls back takes its run along; workers, page and dashboard agree."""
    assert "No changes" in manage(project, "makemigrations", "--check", "archive")
    manage(project, "shell", "--command", CREATE_STAFF)
    start("manage.py", "procrastinate", "worker", "--queues=archive", "--concurrency=2")
    served = start("-m", "uvicorn", "project.asgi:application", "--port=0").wait_ready()
    with httpx.Client(base_url=served.url, timeout=20) as client, psycopg.connect(project) as conn:
        documents = [{"title": f"page {n}", "text": "word " * n} for n in range(5)]
        refused = client.post(
            "/batches", json={"name": "twice", "documents": [*documents, documents[0]]}
        )
        assert refused.status_code == 409
        for table in ("archive_batch", "fanout_runs", "procrastinate_jobs"):
            sql = f"SELECT count(*) FROM {table}"
            if table == "procrastinate_jobs":
                sql += " WHERE task_name LIKE 'archive%'"
            assert conn.execute(sql).fetchone() == (0,), table

        added = client.post("/batches", json={"name": "once", "documents": documents})
        assert added.status_code == 201, added.text
        path = f"/batches/{added.json()['batch']}"
        wait_until(lambda: client.get(path).json()["status"] == "completed", 20.0)
        assert client.get(path).json()["words"] == {f"page {n}": n for n in range(5)}

        for broken in BROKEN:
            assert client.post("/batches", content=broken).status_code == 400, broken

        refused = client.get("/fanout/")
        assert (refused.status_code, "log in at /login/" in refused.text) == (403, True)
        log_in(client, username="ben", password="another password")
        assert client.get("/fanout/").status_code == 403
        assert log_in(client, **STAFF).headers["location"] == "/fanout/"
        assert client.get("/fanout/").status_code == 200
        page = client.get(f"/fanout/runs/{added.json()['run']}")
        assert page.status_code == 200 and "archive.count_batch" in page.text
        with client.stream("GET", f"/fanout/api/runs/{added.json()['run']}/events") as stream:
            assert "event: closed" in list(stream.iter_lines())
