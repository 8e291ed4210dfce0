"""The named statements of ``sql/queries.sql``."""

from __future__ import annotations

import importlib.resources
import re

_HEADER = re.compile(r"^-- ([a-z0-9_]+) --\n(?:-- .*\n)+", re.MULTILINE)


def parse(text: str) -> dict[str, str]:
    """Split a file of named blocks; each name stands alone between dashes, its purpose below."""
    parts = _HEADER.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


QUERIES = parse(
    (importlib.resources.files("fanout_procrastinate") / "sql" / "queries.sql").read_text("utf-8")
)
