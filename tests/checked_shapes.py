"""The checker of annotations in losses, aggregation, models and tasks; pyproject.toml names it in ``addopts``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_F = TypeVar("_F", bound=Callable[..., object])
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as mypy has it
_jaxtyped: Any = jaxtyping.jaxtyped


def checked(function: _F) -> _F:
    """The function with its arguments and result checked at every call; unchanged if a hint means nothing to beartype.

    Such is ``Self`` where jaxtyping shows it the method without its class.
    """
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """``jaxtyping.jaxtyped`` for what has shapes, whose arguments it binds, and checks twice, at every call.

    Other functions are checked without it. Those within functions are not: each call of the outer one would compile
    their check again, which took a tenth of the time of all tests.
    """
    checks_shapes = _jaxtyped(typechecker=typechecker)

    def decorated(target: Any) -> Any:
        if "<locals>" in target.__qualname__:
            return target
        return checks_shapes(target) if _may_have_shapes(target) else _unless_disabled(target)

    return decorated


def _unless_disabled(function: _F) -> _F:
    checks = checked(function)

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        return (function if jaxtyping.config.jaxtyping_disable else checks)(*arguments, **named)

    return call  # type: ignore[return-value]


def _may_have_shapes(target: Any) -> bool:
    if not isinstance(target, types.FunctionType):
        return True
    try:
        return "jaxtyping." in str(get_type_hints(target))
    except Exception:  # names that are there for mypy alone, or not yet
        return True


jaxtyping.jaxtyped = jaxtyped
