"""What a child function's signature says: its shape, and the types of its item and result."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import typing_extensions

from fanout_procrastinate import errors

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_child_signature(function: Callable[..., Any], pass_context: bool) -> None:
    """Check that a child takes one item, after its context where it asked for one.

    Raises:
        ConfigurationError: it does not; the message names the remedy.
    """
    name = getattr(function, "__qualname__", repr(function))
    target = _target(function)
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise errors.ConfigurationError(
            f"the child {name} yields; a child returns its result, only a manager yields"
        )
    expected = 2 if pass_context else 1
    shape = "(context, item)" if pass_context else "(item)"
    given = _positional(function)
    if len(given) < expected:
        raise errors.ConfigurationError(
            f"the child {name} must take {shape} as named positional parameters"
            + ("" if pass_context else "; a decorator on it needs functools.wraps")
        )
    surplus = [
        parameter.name
        for parameter in _signature(function).parameters.values()
        if parameter not in given[:expected]
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in _VARIABLE
    ]
    if surplus:
        hint = "" if pass_context else ", or pass_context=True if the first is the context"
        raise errors.ConfigurationError(
            f"the child {name} must take {shape} alone; give a default to, or remove, "
            f"{', '.join(surplus)}{hint}"
        )


def item_annotation(
    function: Callable[..., Any], skip_first: bool, namespace: Mapping[str, Any] | None
) -> Any:
    """Return the resolved type of a child's item; `Any` where there is none."""
    parameter = _positional(function)[1 if skip_first else 0]
    return _resolved(function, parameter.name, parameter.annotation, namespace)


def return_annotation(function: Callable[..., Any], namespace: Mapping[str, Any] | None) -> Any:
    """Return the resolved type of a child's result; `Any` where there is none."""
    annotation = _signature(function).return_annotation
    return _resolved(function, "return", annotation, namespace)


def without_old_dicts(annotation: Any) -> Any:
    """Return an annotation whose ``typing.TypedDict``s pydantic takes.

    Before Python 3.12 it wants those of ``typing_extensions``, which are rebuilt here: anywhere
    in the annotation, but not inside of classes other than a ``TypedDict``.
    """
    if sys.version_info >= (3, 12):
        return annotation
    return _rebuilt(annotation, ())


def _rebuilt(annotation: Any, within: tuple[Any, ...]) -> Any:
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        # One that contains itself is left to pydantic, whose error says what to do.
        return annotation if annotation in within else _rebuilt_dict(annotation, within)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if not args or origin in (typing.Literal, collections.abc.Callable):
        return annotation
    if origin is typing.Annotated:
        return typing.Annotated[(_rebuilt(args[0], within), *args[1:])]
    parts = tuple(_rebuilt(part, within) for part in args)
    if parts == args:
        return annotation
    return typing.Union[parts] if origin is types.UnionType else origin[parts]  # noqa: UP007


def _rebuilt_dict(annotation: Any, within: tuple[Any, ...]) -> Any:
    fields: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        marked = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
        kind = _rebuilt(typing.get_args(hint)[0] if marked else hint, (*within, annotation))
        required = name in annotation.__required_keys__
        if marked:  # the keys above know nothing of what annotations in quotes say
            required = typing.get_origin(hint) is typing.Required
        fields[name] = kind if required else typing.NotRequired[kind]
    make: Any = typing_extensions.TypedDict
    made = make(annotation.__name__, fields)
    for name in ("__module__", "__qualname__", "__doc__", "__pydantic_config__"):
        if hasattr(annotation, name):
            setattr(made, name, getattr(annotation, name))
    return made


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as exc:
        raise errors.ConfigurationError(
            f"{function!r} has no readable signature; wrap it in a plain function"
        ) from exc


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = _signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in _POSITIONAL]


def _target(function: Any) -> Any:
    """Return the plain function behind wrappers, partials and callable objects."""
    while True:
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.isroutine(function) or isinstance(function, type):
            return function
        else:
            function = type(function).__call__


def _resolved(
    function: Callable[..., Any],
    name: str,
    annotation: Any,
    namespace: Mapping[str, Any] | None,
) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any

    # Only the one annotation: the others may name what is imported for type checkers alone.
    def stub() -> None: ...

    stub.__annotations__ = {name: annotation}
    module = getattr(_target(function), "__globals__", {})
    try:
        return typing.get_type_hints(stub, module, dict(namespace or {}), include_extras=True)[name]
    except Exception as exc:  # an annotation is code of the user's
        raise errors.ConfigurationError(
            f"{getattr(function, '__qualname__', function)}: the annotation of {name!r}, "
            f"{annotation!r}, cannot be resolved ({exc}); import or define that name "
            "at the top of the module, outside of `if TYPE_CHECKING`"
        ) from exc
