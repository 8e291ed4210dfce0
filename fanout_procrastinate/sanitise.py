"""The one sanitiser: any value becomes JSON text that PostgreSQL stores and Python reads back.

``jsonb`` refuses NUL characters, lone surrogates, NaN and infinities; Python refuses to read
integers of more than 4,300 digits, and pydantic nesting beyond 200 levels. An outcome must be
recordable whatever it contains, so nothing here raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import json.encoder
import math
import re
from collections.abc import Iterable
from typing import Any

import pydantic_core

MAX_DEPTH = 200
MAX_DIGITS = 4300
CUT_MARK = " …[cut]"
UNREADABLE = "[value that could not be read]"

_FORBIDDEN = re.compile("[\x00\ud800-\udfff]")
# Looks behind, so that a run of digits is scanned once and not from each of its places.
_LONG_NUMBER = re.compile(rf"(?<![0-9])[0-9]{{{MAX_DIGITS + 1}}}")
_MAX_BITS = int(MAX_DIGITS * math.log2(10))
_REPR_CHARS = 500
# Sorted keys make the text canonical. They also fail on keys of mixed types, the one way in which
# two keys of a dict can become the same JSON key, and so send that case to the slow path.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Hold JSON text and whether anything had to be changed to make it storable."""

    text: str
    cleaned: bool = False

    @property
    def size(self) -> int:
        """Return the bytes of UTF-8."""
        return json_size(self.text)


def encode(value: Any) -> Encoded:
    """Return any value as storable JSON text, cleaned only where needed. Never raises.

    Keys come out sorted and as text, so equal values give equal texts.

    Example:
        >>> encode({"b": 1, "a": float("nan")})
        Encoded(text='{"a":null,"b":1}', cleaned=True)
    """
    with contextlib.suppress(Exception):  # whatever is wrong with it, the slow path copes
        text = _ENCODER.encode(value)
        if is_storable(text):
            return Encoded(text)
    cleaned, changed = clean(value)
    try:
        return Encoded(to_json(cleaned), changed)
    except Exception:  # noqa: BLE001 - the last resort: an outcome can always be recorded
        return Encoded(to_json(UNREADABLE), True)


def to_json(value: Any) -> str:
    """Return compact JSON text, keys sorted, of a value that ``clean`` has seen.

    Raises:
        ValueError, TypeError: the value was not cleaned.
    """
    return _ENCODER.encode(value)


def json_size(text: str) -> int:
    """Return the bytes of the text as UTF-8; a lone surrogate counts as three."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def is_storable(text: str) -> bool:
    """Tell whether PostgreSQL takes this JSON text and Python reads it back.

    The text is the output of a JSON encoder without NaN. May say no of a text that merely looks
    suspicious (``\\u0000`` after an escaped backslash); ``clean`` then finds nothing to change.
    """
    if "\\u0000" in text or (not text.isascii() and _FORBIDDEN.search(text)):
        return False
    if len(text) > MAX_DIGITS and _LONG_NUMBER.search(text):
        return False
    return is_shallow(text)


def is_shallow(text: str | bytes) -> bool:
    """Tell whether JSON text is nested within what pydantic's parser takes (200 levels)."""
    opened = (
        text.count("[") + text.count("{")
        if isinstance(text, str)
        else text.count(b"[") + text.count(b"{")
    )
    if opened < MAX_DEPTH:
        return True
    try:
        pydantic_core.from_json(text)
    except ValueError:
        return False
    return True


def clean(value: Any, *, keep_objects: bool = False) -> tuple[Any, bool]:
    """Return the value made of plain JSON types, and whether anything was changed. Never raises.

    NUL characters and lone surrogates become U+FFFD, NaN and infinities ``None``; integers of
    more than 4,300 digits, cycles, nesting beyond 200 levels and foreign objects become a short
    text. Keys become text; of keys that clash the later ones get a suffix ``~2``, ``~3``.

    Args:
        value: anything.
        keep_objects: leave foreign objects (dates, models) as they are, for an encoder that
            knows them.

    Example:
        >>> clean({"a": "x\\x00y", "b": [1.5, float("inf")]})
        ({'a': 'x\ufffdy', 'b': [1.5, None]}, True)
    """
    cleaner = _Cleaner(keep_objects)
    try:
        return cleaner.walk(value), cleaner.changed
    except Exception:  # noqa: BLE001 - no stack or memory left: say so in place of the value
        return UNREADABLE, True


def plain(value: Any) -> Any:
    """Return a copy of the value made of plain JSON types. Never raises.

    Models, dataclasses, dates and the like become what pydantic makes of them; otherwise as
    ``clean`` does.

    Example:
        >>> plain({"sizes": (1, 2), "seen": {3}, "part": b"ab"})
        {'sizes': [1, 2], 'seen': [3], 'part': 'YWI='}
    """
    try:
        return _Plainer(keep_objects=False).walk(value)
    except Exception:  # noqa: BLE001 - no stack or memory left: say so in place of the value
        return UNREADABLE


def clean_text(text: str) -> str:
    """Return the text with NUL characters and lone surrogates replaced by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text)


def cut_text(text: str, max_bytes: int, *, keep_end: bool = False) -> tuple[str, bool]:
    """Return the text cut to a number of bytes, as it counts inside JSON, and whether it was cut.

    The cut falls between characters; the mark `` …[cut]`` stands where text is missing.

    Args:
        text: clean text (see ``clean_text``).
        max_bytes: bytes of UTF-8 with JSON's escapes, without the quotes, the mark included.
        keep_end: drop the beginning instead of the end.

    Example:
        >>> cut_text("abcdefghijklmnop", 12)
        ('abc …[cut]', True)
    """
    if len(text) <= max_bytes and _escaped_size(text) <= max_bytes:
        return text, False
    room = max_bytes - _escaped_size(CUT_MARK)
    if room < 0:
        return "", True
    short, fits = 0, min(len(text), room)
    while short < fits:  # the longest part that fits, by halving
        middle = (short + fits + 1) // 2
        part = text[-middle:] if keep_end else text[:middle]
        if _escaped_size(part) <= room:
            short = middle
        else:
            fits = middle - 1
    if keep_end:
        return CUT_MARK + text[len(text) - short :], True
    return text[:short] + CUT_MARK, True


def _escaped_size(text: str) -> int:
    return json_size(json.encoder.encode_basestring(text)) - 2


class _Cleaner:
    def __init__(self, keep_objects: bool) -> None:
        self.changed = False
        self._keep_objects = keep_objects
        self._path: set[int] = set()

    def walk(self, value: Any) -> Any:
        # By type(value), never isinstance(): an object can lie about (or raise in) `__class__`.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, str):
            return self._text(str.__str__(value))
        if issubclass(kind, int):
            return self._integer(int.__int__(value))
        if issubclass(kind, float):
            return self._float(float.__pos__(value))
        if issubclass(kind, dict | list | tuple | set | frozenset):
            return self._container(kind, value)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if self._keep_objects:
            return value
        return self._replace(self._describe(value))

    def _replace(self, by: Any) -> Any:
        self.changed = True
        return by

    def _text(self, text: str) -> str:
        tidy = clean_text(text)
        self.changed = self.changed or tidy != text
        return tidy

    def _integer(self, number: int) -> int | str:
        bits = number.bit_length()
        if bits <= _MAX_BITS:
            return number
        return str(self._replace(f"[integer of about {int(bits / math.log2(10))} digits]"))

    def _float(self, number: float) -> float | None:
        return number if math.isfinite(number) else self._replace(None)

    def _container(self, kind: type, value: Any) -> Any:
        if len(self._path) >= MAX_DEPTH:
            return self._replace("[nested too deep]")
        if id(value) in self._path:
            return self._replace("[cycle]")
        self._path.add(id(value))
        try:
            if issubclass(kind, dict):
                return self._pairs(list(dict.items(value)))
            return [self.walk(member) for member in self._members(kind, value)]
        finally:
            self._path.discard(id(value))

    def _members(self, kind: type, value: Any) -> Iterable[Any]:
        if issubclass(kind, list):
            return list.__iter__(value)
        if issubclass(kind, tuple):
            return tuple.__iter__(value)
        self.changed = True
        base = set if issubclass(kind, set) else frozenset
        return list(base.__iter__(value))

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        clashes: dict[str, int] = {}
        for raw, value in pairs:
            key = wanted = self._key(raw)
            while key in result:
                clashes[wanted] = clashes.get(wanted, 1) + 1
                key = f"{wanted}~{clashes[wanted]}"
                self.changed = True
            result[key] = self.walk(value)
        return result

    def _key(self, raw: Any) -> str:
        kind = type(raw)
        if issubclass(kind, str):
            return self._text(str.__str__(raw))
        if raw is None or kind is bool:
            return {None: "null", True: "true", False: "false"}[raw]
        if issubclass(kind, int):
            return str(self._integer(int.__int__(raw)))
        if issubclass(kind, float):
            return float.__repr__(raw)
        return str(self._replace(self._describe(raw)))

    def _describe(self, value: Any) -> str:
        try:
            shown = str.__str__(repr(value))[:_REPR_CHARS]
        except BaseException:  # noqa: BLE001 - a repr() of the user's may raise anything at all
            shown = f"<{type.__dict__['__name__'].__get__(type(value))}>"
        return clean_text(shown)


class _Plainer(_Cleaner):
    def _object(self, value: Any) -> Any:
        try:
            made = pydantic_core.to_jsonable_python(
                value, bytes_mode="base64", fallback=self._describe
            )
        except Exception:  # noqa: BLE001 - serialisers may be the user's code
            return UNREADABLE  # not its repr(), which nothing could redact
        return self.walk(made)
