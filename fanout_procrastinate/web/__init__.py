"""The dashboard: pages, a JSON API and live events of an app's runs, as one ASGI application."""

from fanout_procrastinate.web.application import create_app

__all__ = ["create_app"]
