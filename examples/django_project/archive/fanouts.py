"""The library's settings in this project."""

import procrastinate

from fanout_procrastinate import FanOut


def on_app_ready(app: procrastinate.App) -> None:
    """Give the app its settings."""
    FanOut(app)
