"""How figures, times and JSON read on a page."""

from __future__ import annotations

import datetime
import json
from typing import Any

import markupsafe

from fanout_procrastinate import durations, models

_LONGEST_JSON = 100_000


def duration(seconds: float | None) -> str:
    """Return seconds in words; nothing for `None`."""
    return "" if seconds is None else durations.duration(seconds)


def took(begun: datetime.datetime | None, ended: datetime.datetime | None) -> str:
    """Return in words how long something took, or has taken so far."""
    if begun is None:
        return ""
    until = ended or datetime.datetime.now(tz=datetime.UTC)
    return duration((until - begun).total_seconds())


def moment(when: datetime.datetime | None) -> markupsafe.Markup:
    """Return a time in UTC; the page's script turns it into the reader's time zone."""
    if when is None:
        return markupsafe.Markup("")
    in_utc = when.astimezone(datetime.UTC)
    return markupsafe.Markup('<time datetime="{}">{}</time>').format(
        in_utc.isoformat(timespec="seconds"), in_utc.strftime("%Y-%m-%d %H:%M:%S UTC")
    )


def number(value: float | None) -> str:
    """Return a number with its thousands apart.

    Example:
        >>> number(1234567)
        '1,234,567'
    """
    return "" if value is None else f"{value:,}"


def rate(value: float) -> str:
    """Return items per second."""
    return f"{value:.1f}/s" if value < 100 else f"{value:,.0f}/s"


def share(progress: models.Progress) -> float | None:
    """Return the final items' share in percent; ``None`` for no items at all, unless that is all.

    A run that failed, or was cancelled, before it had any has not done everything.
    """
    listing = progress.total is None and not progress.closed
    told = progress.total or listing or progress.status is models.RunStatus.COMPLETED
    return progress.percent if told else None


def pretty(value: Any) -> str:
    """Return JSON in lines, cut where nobody would read on."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) <= _LONGEST_JSON:
        return text
    return f"{text[:_LONGEST_JSON]}\n… {len(text) - _LONGEST_JSON:,} more characters"


def cut(text: object, length: int) -> str:
    """Return text of at most so many characters; a mark shows where it was cut."""
    whole = str(text)
    return whole if len(whole) <= length else whole[: length - 1] + "…"


def dotted(text: object) -> markupsafe.Markup:
    """Return a dotted name that may go on in the next line after each dot."""
    return markupsafe.Markup(".<wbr>").join(str(text).split("."))
