"""What a request asks for: its parameters and its body, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request

from fanout_procrastinate import models
from fanout_procrastinate.web import failures, reading

_LARGEST_BODY = 65_536


class _Id(Convertor[int]):
    """Read an id in a path; what is too long to be one is no path of ours."""

    regex = "[0-9]{1,19}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


# Starlette's own for whole numbers raises an error at more digits than Python reads.
register_url_convertor("fanout_id", _Id())


def text(request: Request, name: str) -> str | None:
    """Return a parameter; ``None`` where it is missing or empty."""
    given = request.query_params.get(name, "").strip()
    if "\0" in given:
        raise failures.Refused(f"{name}: no text has a NUL character", 400)
    return given or None


def whole(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """Return a whole number.

    Raises:
        Refused: it is none, or out of bounds.
    """
    given = text(request, name)
    if given is None:
        return default
    digits = given.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(given) < 20 and least <= int(given) <= most:
        return int(given)
    raise failures.Refused(f"{name}={given}: give a whole number from {least} to {most}", 400)


def run_status(request: Request) -> str | None:
    """Return the wanted state of runs.

    Raises:
        Refused: there is no such state.
    """
    return _one_of(request, [str(one) for one in models.RunStatus])


def item_status(request: Request) -> str | None:
    """Return the wanted state of items.

    Raises:
        Refused: there is no such state.
    """
    return _one_of(request, [str(one) for one in models.ItemStatus])


def after(request: Request) -> int:
    """Return the position after which a page begins."""
    return whole(request, "after", -1, least=-1, most=reading.LARGEST_ID)


def _one_of(request: Request, words: list[str]) -> str | None:
    given = text(request, "status")
    if given is None or given in words:
        return given
    raise failures.Refused(f"status={given}: give one of {', '.join(words)}", 400)


async def json_body(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object; an empty one where there is no body.

    Raises:
        Refused: it is something else.
    """
    body = await _body(request)
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise failures.Refused("the body is no JSON object", 400)
    return found


async def form_body(request: Request) -> Mapping[str, str]:
    """Return the fields of a form.

    Raises:
        Refused: it is too large, or no text.
    """
    try:
        pairs = parse_qsl((await _body(request)).decode(), keep_blank_values=True)
    except ValueError as exc:
        raise failures.Refused("the form is no text", 400) from exc
    return dict(pairs)


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LARGEST_BODY:
                raise failures.Refused(f"the body has more than {_LARGEST_BODY} bytes", 413)
    except ClientDisconnect as exc:
        raise failures.Refused("the client went away within the body", 400) from exc
    return body
