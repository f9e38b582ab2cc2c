"""The checker of annotations in losses, aggregation, models and tasks; pyproject.toml names it in ``addopts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_F = TypeVar("_F", bound=Callable[..., object])
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as mypy has it


def checked(function: _F) -> _F:
    """The function with its arguments and result checked at every call; unchanged if a hint means nothing to beartype.

    Such is ``Self`` where jaxtyping shows it the method without its class.
    """
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function
