"""What an ASGI server serves: Django, and the dashboard for its staff below /fanout."""

import os

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.sessions.backends.db import SessionStore
from django.core.asgi import get_asgi_application
from django.http import HttpRequest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
django_application = get_asgi_application()

# After Django is ready: the app is the real one only then.
from procrastinate.contrib.django import app  # noqa: E402

from fanout_procrastinate import web  # noqa: E402


def _is_staff(session_key: str | None) -> bool:
    request = HttpRequest()
    request.session = SessionStore(session_key)
    return bool(get_user(request).is_staff)


async def staff_only(request: Request, action: str, run_id: int | None) -> bool:
    """Let in whom Django knows as staff, by its own session; tell others how to get in."""
    session_key = request.cookies.get(settings.SESSION_COOKIE_NAME)
    if not await sync_to_async(_is_staff)(session_key):
        raise HTTPException(403, "this is for the staff: log in at /login/")
    return True


dashboard = web.create_app(app, authorize=staff_only, allowed_hosts=settings.ALLOWED_HOSTS)
application = Starlette(routes=[Mount("/fanout", dashboard), Mount("/", django_application)])
