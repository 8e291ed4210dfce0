"""What an exception says about an HTTP response: its status, and how long to wait.

Client libraries are recognised by the attributes of their errors, so none has to be imported:
``exc.status_code`` or ``exc.response.status_code`` and their like, ``exc.response.headers``, and
the dictionary in which botocore keeps its response.
"""

from __future__ import annotations

import datetime
import email.utils
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fanout_procrastinate import errors

# Ordered by how surely the name means HTTP; `code` last, for other protocols use it too.
_STATUS_NAMES = ("status_code", "status", "http_status", "code")
_HEADER_NAMES = ("headers", "hdrs")
_MAX_HEADERS = 1000
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?", re.ASCII)


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status (100..599) that the exception carries, else ``None``. Never raises."""
    if not issubclass(type(exc), Exception):
        return None  # SystemExit.code is an exit status
    response = _attribute(exc, "response")
    candidates: Iterator[Any] = itertools.chain(
        (_attribute(exc, name) for name in _STATUS_NAMES),
        (_attribute(response, name) for name in _STATUS_NAMES),
        (_botocore(response, "HTTPStatusCode"),),
    )
    for found in candidates:
        if issubclass(type(found), int) and 100 <= int.__int__(found) <= 599:
            return int.__int__(found)
    return None


def retry_after(exc: BaseException) -> float | None:
    """Return the seconds that the exception's ``Retry-After`` header asks for. Never raises.

    A date counts from the response's own ``Date`` where it has one, for the clocks of two
    machines may differ. The result is within 0 .. 7 days; ``None`` without a readable header.
    """
    response = _attribute(exc, "response")
    candidates = itertools.chain(
        (_attribute(response, name) for name in _HEADER_NAMES),
        (_botocore(response, "HTTPHeaders"),),
        (_attribute(exc, name) for name in _HEADER_NAMES),
    )
    for headers in candidates:
        found = _wanted_headers(headers)
        if "retry-after" in found:
            return _seconds(found["retry-after"], found.get("date", ""))
    return None


def _attribute(owner: object, name: str) -> object:
    if owner is None:
        return None
    try:
        return getattr(owner, name, None)
    except BaseException:  # noqa: BLE001 - a property of the user's may raise anything at all
        return None


def _botocore(response: object, name: str) -> object:
    if type(response) is not dict:
        return None
    metadata = response.get("ResponseMetadata")
    return metadata.get(name) if type(metadata) is dict else None


def _wanted_headers(headers: object) -> dict[str, str]:
    """Return the first `retry-after` and `date` header, names in lower case."""
    found: dict[str, str] = {}
    try:
        for name, value in _header_pairs(headers):
            key = _text(name).strip().lower()
            if key in ("retry-after", "date"):
                found.setdefault(key, _text(value).strip())
    except BaseException:  # noqa: BLE001 - any object may stand in for headers
        return found
    return found


def _header_pairs(headers: object) -> Iterator[tuple[object, object]]:
    items = _attribute(headers, "items")
    pairs = items() if callable(items) else headers
    if isinstance(pairs, Iterable):
        for pair in itertools.islice(pairs, _MAX_HEADERS):
            if isinstance(pair, tuple | list) and len(pair) == 2:
                yield pair[0], pair[1]


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(value)[:200]


def _seconds(wanted: str, sent_at: str) -> float | None:
    if _NUMBER.fullmatch(wanted):
        return errors.clamp_seconds(float(wanted))
    moment = _http_date(wanted)
    if moment is None:
        return None
    start = _http_date(sent_at) or datetime.datetime.now(datetime.UTC)
    return errors.clamp_seconds((moment - start).total_seconds())


def _http_date(text: str) -> datetime.datetime | None:
    try:
        moment = email.utils.parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.astimezone(datetime.UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
