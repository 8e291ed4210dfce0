"""Signatures of children: their shape, and annotations resolved one at a time."""

import functools
from typing import Annotated, Any

import pytest

from fanout_procrastinate import errors, signatures
from fanout_procrastinate.signatures import check_child_signature


def plain(item): ...


async def coroutine(item): ...


def typed(item: "Later") -> "list[Later] | None": ...


def with_context(context, item): ...


def with_default(item=None): ...


def with_options(item, dry_run=False, *, loud=True): ...


def with_rest(item, *rest, **more): ...


def positional_only(item, /): ...


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Callable:
    def __call__(self, item: "Later") -> int: ...

    def method(self, item: "Later") -> int: ...


class Later:
    """Defined below what names it."""


@pytest.mark.parametrize(
    "function",
    [
        plain,
        coroutine,
        typed,
        with_default,
        with_options,
        with_rest,
        positional_only,
        wrapping(typed),
        Callable(),
        Callable().method,
        functools.partial(with_context, None),
        lambda item: item,
    ],
    ids=range(12),
)
def test_one_item(function):
    check_child_signature(function, False)


@pytest.mark.parametrize("function", [with_context, wrapping(with_context), with_options])
def test_context_and_item(function):
    check_child_signature(function, True)


def nothing(): ...


def keyword_only(*, item): ...


def only_rest(*args, **kwargs): ...


def demanding(item, *, model): ...


def generator(item):
    yield item


async def async_generator(item):
    yield item


@pytest.mark.parametrize(
    ("function", "pass_context", "remedy"),
    [
        (nothing, False, "must take .item. as named positional"),
        (keyword_only, False, "must take .item. as named positional"),
        (only_rest, False, "functools.wraps"),
        (with_context, False, "pass_context=True"),
        (Callable.method, False, "remove, item"),
        (plain, True, "must take .context, item."),
        (demanding, False, "give a default to, or remove, model"),
        (generator, False, "only a manager yields"),
        (async_generator, False, "only a manager yields"),
        (wrapping(generator), False, "only a manager yields"),
        (3, False, "wrap it in a plain function"),
    ],
)
def test_wrong_shapes(function, pass_context, remedy):
    with pytest.raises(errors.ConfigurationError, match=remedy):
        check_child_signature(function, pass_context)


@pytest.mark.parametrize(
    "function",
    [typed, wrapping(typed), Callable(), Callable().method, functools.partial(typed)],
    ids=range(5),
)
def test_names_defined_later_are_found(function):
    assert signatures.item_annotation(function, False, None) is Later


def test_annotations_keep_their_extras():
    def child(item: Annotated[int, "extra"]) -> None: ...

    assert signatures.item_annotation(child, False, None) == Annotated[int, "extra"]
    assert signatures.return_annotation(child, None) is type(None)


def test_no_annotation_is_any():
    assert signatures.item_annotation(plain, False, None) is Any
    assert signatures.return_annotation(plain, None) is Any


def test_an_annotation_that_cannot_be_resolved():
    def child(item: "Nowhere") -> "1 +": ...  # noqa: F722, F821

    with pytest.raises(errors.ConfigurationError, match=r"child: .*'item', 'Nowhere'.*TYPE_CHECK"):
        signatures.item_annotation(child, False, None)
    with pytest.raises(errors.ConfigurationError, match="'return'"):
        signatures.return_annotation(child, None)
