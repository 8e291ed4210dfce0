"""Typed payloads: items and results become JSON text by their annotations, and come back typed."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pydantic
import pydantic_core

from fanout_procrastinate import errors, sanitise, signatures

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (sanitise.MAX_DIGITS + 1))
_MAX_REASON_CHARS = 300
_MAX_PROBLEMS = 3
# What surely comes back from JSON as it went.
_PLAIN: tuple[Any, ...] = (str, int, float, bool, type(None))
# What says nothing of its contents.
_OPEN: tuple[Any, ...] = (Any, dict, list)


class Codec:
    """Turn values of one type into JSON text and back.

    Field names, never aliases, are stored; computed fields are not.

    Args:
        annotation: a pydantic model, dataclass, TypedDict, plain JSON type, union, ``Any``; an
            absent annotation (``inspect.Parameter.empty``) is ``Any``.

    Raises:
        ConfigurationError: pydantic cannot tell how to serialise the type.

    Example:
        >>> Codec(list[int]).dump_item(["1", 2])
        '[1,2]'
    """

    def __init__(self, annotation: Any = Any) -> None:
        self.annotation = Any if annotation is inspect.Parameter.empty else annotation
        self.name = _name_of(self.annotation)
        try:
            self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
                signatures.without_old_dicts(self.annotation)
            )
            if not self._adapter.pydantic_complete:  # names a class that was not there yet
                self._adapter.rebuild(force=True)
        except Exception as exc:  # pydantic runs hooks of the user's types here
            raise errors.ConfigurationError(
                f"{self.name} cannot be stored as JSON ({_one_line(exc)}); annotate with a "
                "pydantic model, a dataclass, a TypedDict or plain JSON types"
            ) from exc

    def __repr__(self) -> str:
        return f"Codec({self.name})"

    def validate(self, value: Any) -> Any:
        """Return the value as its annotation wants it: an instance, or what can become one.

        Raises:
            InvalidValue: it does not fit; the message is one line.
        """
        try:
            return self._adapter.validate_python(value)
        except Exception as exc:  # validators are the user's code
            raise self._refusal("does not fit", exc) from exc

    def dump_item(self, value: Any) -> str:
        """Return an item as JSON text; refuse what PostgreSQL or Python could not read back.

        Raises:
            InvalidValue: the item does not fit its annotation, cannot become JSON, or contains a
                NUL character, a lone surrogate, NaN or an infinity.
        """
        valid = self.validate(value)
        data = self._dump(valid)
        fault = self._fault(data, valid)
        if fault is not None:
            raise errors.InvalidValue(f"{self.name}: it contains {fault}; remove or replace it")
        if self.annotation in _OPEN:
            self._check_contents(valid, data)
        elif self.annotation not in _PLAIN:
            self._check_return(valid, data)
        return data.decode()

    def dump_result(self, value: Any) -> sanitise.Encoded:
        """Return a child's result as JSON text, cleaned and marked so where it must be.

        NaN and infinities become null, NUL characters and lone surrogates U+FFFD.

        Raises:
            InvalidValue: the result does not fit its annotation or cannot become JSON.
        """
        valid, cleaned = self._validate_result(value)
        try:
            data = self._dump(valid)
        except errors.InvalidValue as exc:
            return self._dump_cleaned(valid, exc)
        if self._fault(data, valid) is not None:
            return self._dump_cleaned(valid, None)
        return sanitise.Encoded(data.decode(), cleaned)

    def load(self, text: str | bytes) -> Any:
        """Return the typed value of stored JSON text.

        Raises:
            InvalidValue: it does not fit the annotation, for the type has changed since, or
                cleaning took a value (NaN) that it needs.
        """
        try:
            return self._adapter.validate_json(text, by_alias=True, by_name=True)
        except BaseException as exc:  # validators are the user's code
            raise self._refusal("no longer fits", exc) from exc

    def load_parsed(self, value: Any) -> Any:
        """Return the typed value of JSON that is parsed already, as drivers hand out ``jsonb``.

        Raises:
            InvalidValue: as ``load``.
        """
        # Through text, for a strict type takes "2024-05-01" for a date from JSON alone.
        return self.load(pydantic_core.to_json(value))

    def _check_contents(self, valid: Any, data: bytes) -> None:
        """Refuse contents that no annotation says how to read back."""
        back, same = pydantic_core.from_json(data), True
        with contextlib.suppress(Exception):  # comparing runs code of the user's
            same = valid == back or _same(self._plain(back), self._plain(valid))
        if not same:
            raise errors.InvalidValue(
                f"{self.name}: it comes back from JSON as something else (a set, a date, bytes, a "
                "key that is no str); annotate the child's item with the types that it has, such "
                "as dict[int, str], or list plain JSON types"
            )

    def _check_return(self, valid: Any, data: bytes) -> None:
        """Refuse an item that a child would get otherwise than it was listed, or not at all."""
        try:
            back = self.load(data)
        except errors.InvalidValue as exc:
            raise errors.InvalidValue(
                f"{self.name}: it does not come back from JSON ({exc}); keep every field that the "
                "child needs, as plain JSON types"
            ) from exc
        same = True
        with contextlib.suppress(Exception):  # comparing runs code of the user's
            same = _same(self._plain(back), self._plain(valid))
        if not same:
            raise errors.InvalidValue(
                f"{self.name}: it comes back from JSON as something else (what its annotation does "
                "not name, such as a date under Any or the fields of a subclass; a masked secret; "
                "a validator that changes its own output); annotate what it is, or give the child "
                "a reference instead"
            )

    def _plain(self, valid: Any) -> Any:
        # By what it is and not by the annotation, which may be a base class with fewer fields.
        return self._adapter.dump_python(
            valid, round_trip=True, warnings="none", serialize_as_any=True
        )

    def _validate_result(self, value: Any) -> tuple[Any, bool]:
        """Return the valid result, and whether its text had to be cleaned to become valid."""
        try:
            return self.validate(value), False
        except errors.InvalidValue as exc:
            tidy, changed = sanitise.clean(value, keep_objects=True)
            if not changed or not _is_about_text(exc.__cause__):
                raise
            return self.validate(tidy), True

    def _dump(self, valid: Any) -> bytes:
        try:
            return self._adapter.dump_json(valid, by_alias=False, round_trip=True, warnings="error")
        except Exception as exc:  # serialisers are the user's code
            raise self._refusal("cannot become JSON as", exc) from exc

    def _dump_cleaned(self, valid: Any, refused: errors.InvalidValue | None) -> sanitise.Encoded:
        try:
            plain = self._adapter.dump_python(
                valid, mode="json", by_alias=False, round_trip=True, warnings="error"
            )
        except Exception as exc:  # noqa: BLE001 - serialisers are the user's code; raised below
            plain = self._parts(valid, refused or self._refusal("cannot become JSON as", exc))
        return sanitise.Encoded(sanitise.encode(plain).text, cleaned=True)

    def _parts(self, valid: Any, refused: errors.InvalidValue) -> Any:
        """Take the value apart in Python, where text may be what it likes, and clean the parts."""
        try:
            parts = self._adapter.dump_python(
                valid, mode="python", by_alias=False, round_trip=True, warnings="error"
            )
            tidy, _ = sanitise.clean(parts, keep_objects=True)
            return pydantic_core.to_jsonable_python(tidy)
        except Exception as exc:
            raise refused from exc

    def _fault(self, data: bytes, valid: Any) -> str | None:
        """Name what must not be stored, else `None`. The cheap looks come first."""
        if b"\\u0000" in data and _NUL.search(data):
            return "text with a NUL character"
        if len(data) > sanitise.MAX_DIGITS and _LONG_NUMBER.search(data) and _long_integer(data):
            return f"an integer of more than {sanitise.MAX_DIGITS} digits"
        if not sanitise.is_shallow(data):
            return f"nesting deeper than {sanitise.MAX_DEPTH} levels"
        if (b"NaN" in data or b"Infinity" in data) and _has_constant(data):
            return "NaN or an infinity"
        if b"null" in data and self._has_lost_number(data, valid):
            return "NaN or an infinity"
        return None

    def _has_lost_number(self, data: bytes, valid: Any) -> bool:
        """Tell whether a null stands for NaN, which pydantic writes so without a word."""
        try:
            parts = self._adapter.dump_python(
                valid, mode="python", by_alias=False, round_trip=True, warnings="none"
            )
            return _lost_number(parts, pydantic_core.from_json(data))
        except Exception:  # noqa: BLE001 - the text is storable; only the mark is in question
            return False

    def _refusal(self, what: str, exc: BaseException) -> errors.InvalidValue:
        return errors.InvalidValue(f"{what} {self.name}: {_one_line(exc)}")


def item_codec(
    function: Callable[..., Any],
    skip_first: bool = False,
    *,
    namespace: Mapping[str, Any] | None = None,
) -> Codec:
    """Return the codec of the item that a child function takes.

    Call it at first use and not when declared: the annotation may name a class that its module
    defines further down.

    Args:
        function: the child.
        skip_first: its first parameter is the ``ItemContext``.
        namespace: further names for annotations, such as the locals of an enclosing function.

    Raises:
        ConfigurationError: the annotation cannot be resolved or serialised.
    """
    return Codec(signatures.item_annotation(function, skip_first, namespace))


def result_codec(
    function: Callable[..., Any], *, namespace: Mapping[str, Any] | None = None
) -> Codec:
    """Return the codec of what a child function returns; call it at first use, as ``item_codec``.

    Raises:
        ConfigurationError: the annotation cannot be resolved or serialised.
    """
    return Codec(signatures.return_annotation(function, namespace))


def _same(one: Any, other: Any) -> bool:
    """Compare plain values, for which NaN is the same as NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)


def _name_of(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).replace("typing.", "")[:100]


def _one_line(exc: BaseException) -> str:
    """Return what an exception says, in one line of bounded length."""
    try:
        text = _problems(exc) if isinstance(exc, pydantic.ValidationError) else str(exc)
    except Exception:  # noqa: BLE001 - texts of validators are the user's code
        text = ""
    text = text.partition("For further information")[0]  # pydantic adds an address
    line = sanitise.clean_text(" ".join((text or type(exc).__name__).split()))
    if "surrogates not allowed" in line:
        line = "text with a lone surrogate (a file name that is not UTF-8?); remove or replace it"
    if "invalid utf-8 sequence" in line:
        line = "bytes that are not UTF-8; annotate them as pydantic.Base64Bytes"
    return line if len(line) <= _MAX_REASON_CHARS else line[:_MAX_REASON_CHARS] + "…"


def _is_about_text(exc: BaseException | None) -> bool:
    """Tell whether pydantic refused text that is not Unicode, as some constraints make it do."""
    return isinstance(exc, pydantic.ValidationError) and any(
        problem["type"] == "string_unicode" for problem in exc.errors(include_url=False)
    )


def _problems(exc: pydantic.ValidationError) -> str:
    found = exc.errors(include_url=False, include_context=False, include_input=False)
    lines = []
    for problem in found[:_MAX_PROBLEMS]:
        place = ".".join(str(step) for step in problem["loc"])
        lines.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    if len(found) > _MAX_PROBLEMS:
        lines.append(f"and {len(found) - _MAX_PROBLEMS} more")
    return "; ".join(lines)


def _has_constant(data: bytes) -> bool:
    """Tell NaN and infinities from texts that contain these words."""
    found: list[str] = []
    json.loads(data, parse_constant=found.append)
    return bool(found)


def _long_integer(data: bytes) -> bool:
    """Tell a number that Python would not read back from a text of digits."""
    try:
        pydantic_core.from_json(data)
    except ValueError:
        return True
    return False


def _lost_number(parts: Any, stored: Any) -> bool:
    """Walk a value and its JSON side by side, looking for NaN where a null is stored."""
    if stored is None:
        return isinstance(parts, float) and not math.isfinite(parts)
    if isinstance(stored, dict) and isinstance(parts, dict):
        pairs = zip(parts.values(), stored.values(), strict=False)
        return any(_lost_number(part, kept) for part, kept in pairs)
    if isinstance(stored, list) and isinstance(parts, list | tuple | set | frozenset | deque):
        members: Iterable[Any] = parts
        return any(_lost_number(part, kept) for part, kept in zip(members, stored, strict=False))
    return False
