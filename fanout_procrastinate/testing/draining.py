"""Working until nothing is due, on a real database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import procrastinate
import procrastinate.exceptions
import psycopg.conninfo
from procrastinate import periodic

from fanout_procrastinate import fanout, host
from fanout_procrastinate.testing import loops

_POLL_SECONDS = 0.02
_QUIET_SECONDS = 0.15
_LAST_SECONDS = 1.0


def drain(
    app: procrastinate.App,
    *,
    queues: Iterable[str] | None = None,
    concurrency: int = 10,
    timeout: float | None = 30.0,
) -> None:
    """Work on the app's jobs in this process until nothing is due; for tests with a database.

    Jobs that become due while others are at work count, those scheduled for later do not. A sweep
    is part of it, periodic tasks are not. The app may be open or not; nothing of it stays behind.

    Args:
        app: the app; with a connector for psycopg, or Django's.
        queues: only these; ``None`` = all.
        concurrency: jobs at the same time.
        timeout: seconds; ``None`` = for ever.

    Raises:
        TimeoutError: jobs are still at work; they were stopped, their items released.
        SchemaError: the tables are missing.

    Example:
        >>> def test_papers(app):  # doctest: +SKIP
        ...     run = extract_folder.defer(folder="papers")
        ...     drain(app)
        ...     assert run.progress().succeeded == 12
    """
    loops.refuse("drain")
    work = _Drain(app, queues, concurrency, timeout)
    asyncio.run(work.on_connector_of_its_own())


async def drain_async(
    app: procrastinate.App,
    *,
    queues: Iterable[str] | None = None,
    concurrency: int = 10,
    timeout: float | None = 30.0,
) -> None:
    """Work on the app's jobs until nothing is due; otherwise like `drain`."""
    work = _Drain(app, queues, concurrency, timeout)
    if host.is_open(app.connector):
        await work.until_nothing_is_due()
    else:
        await work.on_connector_of_its_own()


class _Drain:
    def __init__(
        self,
        app: procrastinate.App,
        queues: Iterable[str] | None,
        concurrency: int,
        timeout: float | None,
    ) -> None:
        self._app = app
        self._owner = fanout.FanOut.of(app)
        self._timeout = timeout
        self._worker: Any = None
        self._begun = 0
        self._running: list[str] = []
        self._options: dict[str, Any] = {
            "queues": queues,
            "concurrency": concurrency,
            "fetch_job_polling_interval": _POLL_SECONDS,
            "listen_notify": False,
            "install_signal_handlers": False,
            "worker_middleware": [*app.worker_defaults.get("worker_middleware", ()), self._count],
        }

    async def on_connector_of_its_own(self) -> None:
        with self._app.replace_connector(_worker_connector(self._app)):
            async with self._app.open_async():
                await self.until_nothing_is_due()

    async def until_nothing_is_due(self) -> None:
        limit = asyncio.timeout(self._timeout)
        try:
            with _no_periodic_tasks(self._app):
                async with limit:
                    while await self._is_due():
                        pass
        except TimeoutError as exc:
            if not limit.expired():
                raise
            names = ", ".join(self._running[:10])
            raise TimeoutError(f"still at work after {self._timeout:g} s: {names}") from exc
        finally:
            await self._owner.close_async()

    async def _is_due(self) -> bool:
        """Work for a while; answer whether there was anything to do."""
        # A worker that is stopping has its slots end after the item in hand: so it is stopped
        # only when all is quiet, and then it is the database that says whether anything is due.
        await self._work(wait=True)
        await self._owner.sweep_async()
        begun = self._begun
        await self._work(wait=False)
        return self._begun > begun

    async def _work(self, *, wait: bool) -> None:
        worker = asyncio.create_task(
            self._app.run_worker_async(wait=wait, **self._options), name="fanout-drain"
        )
        try:
            begun = -1
            while not worker.done() and not (wait and not self._running and begun == self._begun):
                begun = self._begun
                await asyncio.wait({worker}, timeout=_QUIET_SECONDS)
        except asyncio.CancelledError:
            running = list(self._running)
            await self._stop(worker, at_once=True)
            self._running = running
            raise
        await self._stop(worker)

    async def _stop(self, worker: asyncio.Task[None], *, at_once: bool = False) -> None:
        if at_once and self._worker is not None:
            self._worker.shutdown_graceful_timeout = _LAST_SECONDS
        if worker.done():
            return worker.result()
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker

    async def _count(
        self, call_next: Callable[[], Awaitable[Any]], job: procrastinate.JobContext, worker: Any
    ) -> Any:
        self._worker = worker
        self._begun += 1
        name = job.job.call_string
        self._running.append(name)
        try:
            return await call_next()
        finally:
            self._running.remove(name)


def _worker_connector(app: procrastinate.App) -> Any:
    """Return a connector to the same database that serves a worker, and nobody else."""
    connector: Any = app.connector
    if hasattr(connector, "get_worker_connector"):  # Django's
        return connector.get_worker_connector()
    with fanout.FanOut.of(app).connect() as connection:
        conninfo = psycopg.conninfo.make_conninfo(**connection.info.get_parameters())
        if connection.info.password:
            conninfo = psycopg.conninfo.make_conninfo(conninfo, password=connection.info.password)
    return procrastinate.PsycopgConnector(
        conninfo=conninfo,
        json_dumps=getattr(connector, "_json_dumps", None),
        json_loads=getattr(connector, "_json_loads", None),
    )


@contextlib.contextmanager
def _no_periodic_tasks(app: procrastinate.App) -> Iterator[None]:
    registry = app.periodic_registry
    app.periodic_registry = periodic.PeriodicRegistry()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        app.periodic_registry = registry
