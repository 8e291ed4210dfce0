"""The record of an exception as it is stored with its item: bounded, clean, never refused."""

from __future__ import annotations

import traceback
from typing import Any

from fanout_procrastinate import outcomes, sanitise

DEFAULT_ERROR_BYTES = 16384

_MIN_ERROR_BYTES = 1024
_MAX_FRAMES = 50


def describe(
    exc: BaseException,
    *,
    classification: outcomes.Classification | None = None,
    max_bytes: int = DEFAULT_ERROR_BYTES,
) -> dict[str, Any]:
    """Return the record of an exception that is stored with its item. Never raises.

    Keys: ``type``, ``message``, ``traceback`` (its end), ``class`` (``permanent`` or
    ``transient``), ``rule``, ``truncated``, ``cleaned``. The text is storable as it is.

    Args:
        exc: what was raised.
        classification: the verdict to record; ``None`` classes it without declared types.
        max_bytes: the most that the record may take as UTF-8 JSON, at least 1024.

    Example:
        >>> describe(ValueError("no pages"))["type"]
        'ValueError'
    """
    limit = max(max_bytes, _MIN_ERROR_BYTES)
    verdict = classification or outcomes.classify(exc)
    record: dict[str, Any] = {
        "type": _type_name(exc),
        "message": _message(exc, limit),
        "traceback": "",
        "class": verdict.name,
        "rule": verdict.rule,
        "truncated": False,
        "cleaned": False,
    }
    for key, share in (("type", 8), ("rule", 16), ("message", 2)):
        _fit(record, key, record[key], limit // share)
    # What the rest leaves goes to the traceback. A flag that turns true gets shorter, not longer.
    rest = limit - sanitise.json_size(sanitise.to_json(record))
    text, shortened = _traceback(exc)
    _fit(record, "traceback", text, rest, keep_end=True)
    record["truncated"] = record["truncated"] or shortened
    return record


def _fit(
    record: dict[str, Any], key: str, text: str, max_bytes: int, *, keep_end: bool = False
) -> None:
    # Cleaning ten megabytes of which two kilobytes are kept would be a waste.
    part = text[-max_bytes - 1 :] if keep_end else text[: max_bytes + 1]
    tidy = sanitise.clean_text(part)
    record[key], cut = sanitise.cut_text(tidy, max_bytes, keep_end=keep_end)
    record["truncated"] = record["truncated"] or cut
    record["cleaned"] = record["cleaned"] or tidy != part


def _type_name(exc: BaseException) -> str:
    kind = type(exc)
    try:
        module, name = kind.__module__, kind.__qualname__
        return name if module == "builtins" else f"{module}.{name}"
    except BaseException:  # noqa: BLE001 - a metaclass of the user's may raise anything at all
        return "unknown"


def _message(exc: BaseException, limit: int) -> str:
    try:
        return str.__str__(str(exc))[: limit + 1]
    except BaseException:  # noqa: BLE001 - __str__ of the user's may raise anything at all
        return "[the exception could not be turned into text]"


def _traceback(exc: BaseException) -> tuple[str, bool]:
    """Return the formatted traceback, and whether frames were left out."""
    try:
        report = traceback.TracebackException.from_exception(
            exc, limit=-_MAX_FRAMES, compact=True, max_group_width=10, max_group_depth=5
        )
        text = "".join(report.format()).rstrip()
        left_out = sum(1 for _ in traceback.walk_tb(exc.__traceback__)) - _MAX_FRAMES
    except BaseException:  # noqa: BLE001 - it calls code of the user's; the frames alone are safe
        return _frames(exc), True
    if left_out > 0:
        return f"[{left_out} earlier frames left out]\n{text}", True
    return text, False


def _frames(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_tb(exc.__traceback__, limit=-_MAX_FRAMES)).rstrip()
    except Exception:  # noqa: BLE001 - better a record without frames than none
        return ""
