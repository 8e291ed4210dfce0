"""The library's settings in this project."""

from typing import Any

import procrastinate
import psycopg
from django.db import connection

from fanout_procrastinate import FanOut


def connect() -> psycopg.Connection[Any]:
    """Open a connection of the library's own: Django's connector does not tell how."""
    params = connection.get_connection_params()
    for name in ("cursor_factory", "context"):
        params.pop(name, None)
    return psycopg.connect(**params)


def on_app_ready(app: procrastinate.App) -> None:
    """Give the app its settings."""
    FanOut(app, connection_factory=connect)
