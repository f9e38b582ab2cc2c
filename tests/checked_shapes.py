"""The checker of annotations in losses, aggregation, models and tasks; pyproject.toml names it in ``addopts``."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_F = TypeVar("_F", bound=Callable[..., object])
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as mypy has it
_jaxtyped: Any = jaxtyping.jaxtyped

FIRST = 2
calls: Counter[object] = Counter()
"""Calls of each function in this test, or between tests."""


def checked(function: _F) -> _F:
    """The function with its arguments and result checked at each call; unchanged if a hint means nothing to beartype.

    Such is ``Self`` where jaxtyping shows it the method without its class.
    """
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """``jaxtyping.jaxtyped`` for what has shapes, whose arguments it binds, and checks twice, at every call.

    Other functions are checked without it. After ``FIRST`` calls in a test neither is: the batches of a training loop
    are alike. Functions within functions are not checked, as each call of the outer one would compile that again.
    """
    checks_shapes = _jaxtyped(typechecker=typechecker)

    def decorated(target: Any) -> Any:
        if "<locals>" in target.__qualname__:
            return target
        if not isinstance(target, types.FunctionType):
            return checks_shapes(target)
        return _at_first(target, checks_shapes(target) if _may_have_shapes(target) else checked(target))

    return decorated


def _at_first(function: _F, checks: _F) -> _F:
    key = object()

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        if calls[key] >= FIRST or jaxtyping.config.jaxtyping_disable:
            return function(*arguments, **named)
        calls[key] += 1
        return checks(*arguments, **named)

    return call  # type: ignore[return-value]


def _may_have_shapes(target: Any) -> bool:
    try:
        return "jaxtyping." in str(get_type_hints(target))
    except Exception:  # names that are there for mypy alone, or not yet
        return True


jaxtyping.jaxtyped = jaxtyped
