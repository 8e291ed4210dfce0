"""The command `fanout dashboard`: where it listens, what it refuses, how it ends."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import httpx
import procrastinate
import pytest

from fanout_procrastinate.cli import main
from fanout_procrastinate.cli import session as cli_session
from tests.support import unconnected
from tests.waiting import wait_until
from tests.web.served import APP, TOKEN, Served

pytestmark = pytest.mark.pg18_only

Serve = Callable[..., Served]


@pytest.fixture
def serve(dsn: str) -> Iterator[Serve]:
    started: list[Served] = []

    def start(*arguments: str, **options: object) -> Served:
        started.append(Served(dsn, arguments, **options))  # type: ignore[arg-type]
        return started[-1].wait_ready()

    yield start
    for one in started:
        one.close()


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Calls the command, which must refuse at once as a wrong command line; returns its message."""
    monkeypatch.setattr(cli_session.Session, "reached", property(lambda _: _Owner()))
    monkeypatch.delenv("FANOUT_DASHBOARD_TOKEN", raising=False)

    def call(*arguments: str) -> str:
        assert main([f"--app={APP}", "dashboard", *arguments]) == 2
        return capsys.readouterr().err

    return call


class _Owner:
    app = unconnected()


def test_serves_reads_and_controls(serve: Serve) -> None:
    served = serve()
    assert served.url.startswith("http://127.0.0.1:")
    with httpx.Client(base_url=served.url) as client:
        assert "Enter token" in client.get("/").text
        assert client.get("/api/runs").json() == {"runs": []}
        answer = client.post("/api/runs/1/pause", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 404
        assert client.get("/", headers={"host": "evil.example"}).status_code == 400


def test_read_only_with_further_names_and_its_address_as_json(serve: Serve) -> None:
    served = serve("--read-only", "--allowed-host=fan.example", "--json")
    assert json.loads(served.output()) == {"url": f"{served.url}/"}
    with httpx.Client(base_url=served.url) as client:
        assert client.get("/", headers={"host": "fan.example"}).status_code == 200
        answer = client.post("/api/runs/1/pause", headers={"authorization": f"Bearer {TOKEN}"})
        assert "read-only" in answer.json()["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_with_streams_open(serve: Serve, number: signal.Signals) -> None:
    """A deployment is not held up by who watches."""
    served = serve()
    with (
        httpx.Client(base_url=served.url, timeout=20) as client,
        client.stream("GET", "/api/events") as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith(("event", "retry"))
        os.kill(served.pid, number)
        wait_until(lambda: served.code() is not None, 6.0, "it ends")
        assert list(lines)  # and to its end, or httpx would complain
    assert "Traceback" not in served.output()
    assert "ASGI callable" not in served.output()


def test_other_addresses_need_a_token(refused: Callable[..., str]) -> None:
    message = refused("--host=0.0.0.0")
    assert "give --token" in message


def test_other_addresses_ask_for_it_before_anything(serve: Serve) -> None:
    served = serve("--host=0.0.0.0")
    with httpx.Client(base_url=f"http://127.0.0.1:{served.port}") as client:
        assert client.get("/").headers["location"] == "/login?next=/"
        assert client.get("/api/runs").status_code == 403


def test_tokens_must_be_long(refused: Callable[..., str]) -> None:
    assert "at least 16" in refused("--token=short")


def test_token_of_the_environment(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANOUT_DASHBOARD_TOKEN", "short")
    assert "at least 16" in refused()


def test_taken_and_impossible_addresses(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(f"--port={port}")
    assert "cannot listen" in refused("--port=99999999")
    assert "cannot listen" in refused("--host=no.such.host.invalid", f"--token={TOKEN}")


def test_sync_connectors(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    sync = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo="host=/no"))
    monkeypatch.setattr(_Owner, "app", sync)
    assert "give it a PsycopgConnector" in refused()


def test_missing_extra(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("fanout_procrastinate.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert 'pip install "fanout_procrastinate[binary,web]"' in refused()
