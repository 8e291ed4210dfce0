"""Spans of time in words, for the command line and the dashboard."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float) -> str:
    """Return seconds in words, as exact as a person needs.

    Example:
        >>> duration(0.42), duration(42), duration(3723)
        ('0.4 s', '42 s', '1 h 02 min')
    """
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02} h"
