"""Declarations of client steps: fields of requests and replies, checked by both sides before use."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import UnionType
from typing import Any, Literal, TypeVar

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import plain
from polyfed.wire.payload import Payload, Scalar, TensorBundle

_OTHERS = 1000  # further fields of a reply, such as metrics of every class
_NAME = 128  # characters of the name of one

F = TypeVar("F", bound=Callable[..., Any])
StepKind = Literal["step", "query", "fresh"]
Declared = type[TensorBundle] | type[Scalar] | UnionType
"""A type of field, or several that it may have (``Representations | Logits``)."""


@dataclass(frozen=True)
class StepSchema:
    """The declaration of a client step.

    Attributes:
        kind: a ``step`` may change what a client keeps, a ``query`` may not, and a ``fresh`` query is put to the client
            as it was before its first step, whatever it keeps by now.
        returns: field of the reply -> its type.
        others: type of further scalar fields of the reply whose names are not known beforehand, or None.
        function: the method itself; the annotations of its parameters declare the fields of the request.
        name: name of the step in requests, records and random streams.
        mean_by: scalar field of the reply by which the round weighs it, where the round uses nothing but the weighted
            mean over the clients of a type, so that ``aggregation.secure`` can sum replies; None: it uses each reply.
        times: asks for this step per round, at most; sites answer no more.
    """

    kind: StepKind
    returns: Mapping[str, Declared]
    others: type[Scalar] | None
    function: Callable[..., Any]
    name: str
    mean_by: str | None = None
    times: int = 1

    @cached_property
    def receives(self) -> dict[str, Declared]:
        # annotations are text in modules that import ``annotations``
        hints = typing.get_type_hints(self.function)
        return {name: hints[name] for name in self._parameters}

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.function).parameters
        return dict(list(parameters.items())[2:])  # without self and client

    @property
    def bundles(self) -> list[str]:
        """Fields of the reply that hold tensors."""
        kinds = {name: typing.get_args(declared) or (declared,) for name, declared in self.returns.items()}
        return [name for name, own in kinds.items() if any(issubclass(kind, TensorBundle) for kind in own)]

    @property
    def title(self) -> str:
        """The step as messages name it, with the class that defines it."""
        *_, kind, name = ("", *self.function.__qualname__.split("."))
        return f"step '{name}'" + (f" of {kind}" if kind else "")

    @property
    def place(self) -> str:
        """``file:line`` of its definition."""
        code = self.function.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def require_request(self, payload: Payload) -> None:
        """Raise PayloadError unless the payload is what the step receives."""
        optional = {name for name, item in self._parameters.items() if item.default is not item.empty}
        _require(payload, self.receives, None, "request", optional)

    def require_reply(self, payload: Payload) -> None:
        """Raise PayloadError unless the payload is what the step declares to return."""
        # names are shown and stored, once for every client and round: a client chooses few, and words only
        if len(payload.fields) > _OTHERS:
            raise PayloadError(f"reply of {len(payload.fields)} fields, the limit is {_OTHERS}")
        for name in payload.fields:
            if not name.isprintable() or not 0 < len(name) <= _NAME:
                shown = repr(plain(name[:_NAME]))
                raise PayloadError(f"reply field {shown} has no name of 1 to {_NAME} printable characters")
        _require(payload, self.returns, self.others, "reply", set())


def client_step(
    others: type[Scalar] | None = None,
    /,
    *,
    mean_by: str | None = None,
    times: int = 1,
    name: str = "",
    **returns: Declared,
) -> Callable[[F], F]:
    """Mark a method ``(self, client, **fields) -> Reply`` as a step that the server may request.

    Args:
        others: type of further scalar fields of the reply whose names are not known beforehand, such as metrics.
        mean_by: scalar field that weighs a reply, where the round uses only the weighted mean of each type. The
            promise belongs to the class's own ``round``: a class that replaces ``round`` declares its step again.
        times: asks for this step per round, at most.
        name: name of the step in requests and random streams; by default that of the method.
        returns: every other field of the reply with its type; a reply with other fields is refused.
    """
    return _marker("step", others, returns, name=name, mean_by=mean_by, times=times)


def client_query(others: type[Scalar] | None = None, /, **returns: Declared) -> Callable[[F], F]:
    """Mark a step that changes nothing a client keeps, such as an evaluation; arguments as ``client_step``."""
    return _marker("query", others, returns)


def fresh_query(others: type[Scalar] | None = None, /, **returns: Declared) -> Callable[[F], F]:
    """Mark a query to a client that has learnt nothing yet: what it keeps is out of reach; see ``client_step``."""
    return _marker("fresh", others, returns)


def _marker(
    kind: StepKind, others: type[Scalar] | None, returns: Mapping[str, Declared], name: str = "", **more: Any
) -> Callable[[F], F]:
    def mark(function: F) -> F:
        schema = StepSchema(kind, dict(returns), others, function, name or function.__name__, **more)
        function.__client_step__ = schema  # type: ignore[attr-defined]
        return function

    return mark


def schema_of(step: Callable[..., Any]) -> StepSchema:
    """The declaration of a step.

    Raises:
        TypeError: it is not marked as one.
    """
    schema = getattr(step, "__client_step__", None)
    if not isinstance(schema, StepSchema):
        name = getattr(step, "__qualname__", step)
        raise TypeError(f"{name} is not a client step; mark it with @client_step() or @client_query()")
    return schema


@cache
def _declared_steps(method: type) -> Mapping[str, StepSchema]:
    # static: properties of the method must not be computed to look for marks
    marks = {name: getattr(inspect.getattr_static(method, name), "__client_step__", None) for name in dir(method)}
    return {
        # a round that replaces the one that a step was declared for may use more than the mean
        schema.name: schema if _depth(method, name) <= _depth(method, "round") else replace(schema, mean_by=None)
        for name, schema in marks.items()
        if isinstance(schema, StepSchema)
    }


def _depth(method: type, name: str) -> int:
    """Number of classes between a class and the base that defines an attribute."""
    return next((depth for depth, base in enumerate(method.__mro__) if name in vars(base)), len(method.__mro__))


def steps_of(algorithm: object) -> dict[str, StepSchema]:
    """Client steps of a method or of its class, by name."""
    return dict(_declared_steps(algorithm if isinstance(algorithm, type) else type(algorithm)))


def _require(
    payload: Payload, declared: Mapping[str, Declared], others: type[Scalar] | None, what: str, optional: set[str]
) -> None:
    missing = [name for name in declared if name not in payload.fields and name not in optional]
    if missing:
        close = difflib.get_close_matches(missing[0], payload.fields.keys() - declared.keys(), n=1)
        hint = f"; did you mean '{close[0]}', which it has?" if close else ""
        raise PayloadError(f"{what} lacks '{missing[0]}' ({_name(declared[missing[0]])}){hint}")
    for name, value in payload.fields.items():
        wanted = declared.get(name, others)
        if wanted is None:
            valid = ", ".join(declared) or "none"
            raise PayloadError(f"{what} has an undeclared field '{name}' ({_name(type(value))}); declared: {valid}")
        if not _fits(value, wanted):
            raise PayloadError(f"{what} field '{name}' is {_name(type(value))}, declared is {_name(wanted)}")


def _fits(value: TensorBundle | Scalar, wanted: Declared) -> bool:
    if wanted is float:  # whole numbers lose their point in some encodings
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) in (typing.get_args(wanted) if isinstance(wanted, UnionType) else (wanted,))


def _name(declared: Declared) -> str:
    if isinstance(declared, UnionType):
        return " or ".join(map(_name, typing.get_args(declared)))
    return declared.label if issubclass(declared, TensorBundle) else declared.__name__
