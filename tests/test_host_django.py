"""Control within a Django request: it must not hold a run's locks until the request ends."""

import json

import pytest

from tests.databases import environment, run_script

pytest.importorskip("django")

_VIEW = """
import json, sys
import django
from django.conf import settings
import psycopg

settings.configure(
    INSTALLED_APPS=["procrastinate.contrib.django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **json.loads(sys.argv[1])}},
    USE_TZ=True,
)
django.setup()
from django.db import transaction
from procrastinate.contrib.django import app
from fanout_procrastinate import FanOut, Limit, fanout_child

real = app  # Django's proxy of the app

@fanout_child(real, name="work", limits=[Limit("few", concurrency=5)])
def work(item: int) -> int:
    return item

run = work.map([1, 2, 3])
said = {}
with transaction.atomic():
    run.pause()
    run.update(max_in_flight=7)
    run.resume()
    run.cancel()
    FanOut.of(real).update_limit("few", concurrency=2)
    FanOut.of(real).pause_limit("few", 60)
    with psycopg.connect("", autocommit=True) as other:
        other.execute("SET lock_timeout = '2s'")
        other.execute("SELECT FROM fanout_runs WHERE id = %s FOR UPDATE", [run.id])
        said["status"] = other.execute(
            "SELECT status, max_in_flight FROM fanout_runs WHERE id = %s", [run.id]
        ).fetchone()
        said["limit"] = other.execute(
            "SELECT concurrency FROM fanout_limits WHERE name = 'few' FOR UPDATE"
        ).fetchone()
with transaction.atomic():
    inside = FanOut.of(real)
    unseen = work.map([1])
    unseen.cancel()
    said["unseen"] = unseen.progress().status
    transaction.set_rollback(True)
with transaction.atomic():
    said["read"] = inside.get_run(run.id).progress().status
print(json.dumps(said))
"""


def test_control_in_a_request_holds_no_lock_of_a_run(dsn: str) -> None:
    """Another session takes the run's lock while the request's transaction is still open."""
    env = environment(dsn)
    keys = {"NAME": "PGDATABASE", "HOST": "PGHOST", "PORT": "PGPORT", "USER": "PGUSER"}
    database = {name: env[key] for name, key in keys.items() if env.get(key)}
    said = json.loads(run_script(_VIEW, dsn, json.dumps(database)).splitlines()[-1])
    assert said == {
        "status": ["cancelled", 7],
        "limit": [2],
        "unseen": "cancelled",
        "read": "cancelled",
    }
