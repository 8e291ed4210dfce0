"""What may go wrong with a request, as a status and a sentence; for programs and for people."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from procrastinate.exceptions import AppNotOpen, SyncConnectorConfigurationError
from starlette.exceptions import HTTPException

from fanout_procrastinate import errors

logger = logging.getLogger(__name__)

_UNAVAILABLE = "the database does not answer; try again in a moment"
_SYNC = "the procrastinate app has a sync connector; the dashboard needs a PsycopgConnector"
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
        logger.warning(
            "Database did not answer a request",
            extra={"action": "dashboard_failed", "exception": str(exc)},
        )
        return Failure(status=503, message=_UNAVAILABLE)
    return Failure(status=500, message="something went wrong; the server's log tells what")
