"""What may go wrong with a request, as a status and a sentence; for programs and for people."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator, Mapping

from procrastinate.exceptions import AppNotOpen, SyncConnectorConfigurationError
from starlette.exceptions import HTTPException

from fanout_procrastinate import errors

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0

_UNAVAILABLE = "the database does not answer; try again in a moment"
_SYNC = "the procrastinate app has a sync connector; the dashboard needs a PsycopgConnector"
_UNKNOWN = (
    "the database does not answer, and whether it has changed the run before that is unknown; look "
    "at the run before you try again"
)
_NOT_OPEN = (
    "the procrastinate app is not open in this process; open it in the lifespan of the application "
    "that mounts the dashboard: async with app.open_async()"
)


class Refused(Exception):
    """Say no to a request.

    Args:
        message: why, and what to do about it.
        status: of the response.
        login: whether a token entered now would help.
    """

    def __init__(self, message: str, status: int = 403, *, login: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.login = login


@contextlib.asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Give up reading when the database does not answer; a decorator too.

    The app's pool waits for half a minute, and a reader of a page does not. Nothing that changes a
    run belongs here: cut off in the middle, nobody knows whether it was done.

    Raises:
        Refused: it took too long.
    """
    limit = asyncio.timeout(ANSWER_SECONDS)
    try:
        async with limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        logger.warning(
            "Database did not answer a request in time", extra={"action": "dashboard_failed"}
        )
        raise Refused(_UNAVAILABLE, 503) from exc


@contextlib.contextmanager
def fate_told() -> Iterator[None]:
    """Say of a change during which the database went away that nobody knows what became of it.

    Raises:
        Refused: so it was.
    """
    try:
        yield
    except errors.DatabaseError as exc:
        _log(exc)
        raise Refused(_UNKNOWN, 503) from exc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """What is answered in place of what was asked for."""

    status: int
    message: str
    login: bool = False
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def failure_of(exc: Exception) -> Failure:
    """Return what to answer; of what nobody foresaw, which the server logs, no more than that."""
    if isinstance(exc, Refused):
        return Failure(status=exc.status, message=exc.message, login=exc.login)
    if isinstance(exc, HTTPException):
        return Failure(status=exc.status_code, message=exc.detail, headers=exc.headers or {})
    if isinstance(exc, errors.RunNotFound):
        return Failure(status=404, message=str(exc))
    if isinstance(exc, errors.RunClosed):
        return Failure(status=409, message=str(exc))
    if isinstance(exc, errors.ConfigurationError):
        return Failure(status=400, message=str(exc))
    if isinstance(exc, AppNotOpen):
        return Failure(status=503, message=_NOT_OPEN)
    if isinstance(exc, SyncConnectorConfigurationError):
        return Failure(status=503, message=_SYNC)
    if isinstance(exc, errors.SchemaError):
        return Failure(status=503, message=str(exc))
    if isinstance(exc, errors.DatabaseError):
        _log(exc)
        return Failure(status=503, message=_UNAVAILABLE)
    return Failure(status=500, message="something went wrong; the server's log tells what")


def _log(exc: errors.DatabaseError) -> None:
    logger.warning(
        "Database did not answer a request",
        extra={"action": "dashboard_failed", "exception": str(exc)},
    )
