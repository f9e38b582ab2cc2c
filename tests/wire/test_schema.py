"""Declarations of client steps, and the check of requests and replies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.baselines import LocalOnly
from polyfed.core.errors import PayloadError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Reply
from polyfed.federation.server import Server
from polyfed.wire.payload import Payload, Representations, Scalar, TensorBundle, Weights
from polyfed.wire.schema import client_query, client_step, schema_of, steps_of


class Base(Algorithm):
    """Two steps and a query."""

    def round(self, server: Server, cohort: Cohort) -> None:
        raise AssertionError("nothing is run here")

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights, rate: float = 0.1, *, label: str = "") -> Reply:
        raise AssertionError("nothing is run here")

    @client_query(float)
    def look(self, client: Client) -> Reply:
        raise AssertionError("nothing is run here")

    def helper(self) -> None:
        """Not a step."""


class Derived(Base):
    """One step in its own way, and what was a query without its mark."""

    def look(self, client: Client) -> Reply:
        raise AssertionError("nothing is run here")

    @client_step(loss=float)
    def fit(self, client: Client, known: Representations) -> Reply:  # type: ignore[override]
        raise AssertionError("nothing is run here")


WEIGHTS = Weights({"a": torch.zeros(1)})


def reply(**fields: TensorBundle | Scalar) -> Payload:
    return Payload(fields)


# ---- declarations


def test_steps_are_found_with_those_of_the_base() -> None:
    result = steps_of(Base())
    assert set(result) == {"fit", "look", "assess", "assess_global", "initial"}
    assert {name: schema.kind for name, schema in result.items()} == {
        "fit": "step",
        "look": "query",
        "assess": "query",
        "assess_global": "query",
        "initial": "fresh",
    }
    assert steps_of(Base) == result


def test_a_step_that_is_overridden_is_that_of_the_subclass() -> None:
    assert steps_of(Derived)["fit"].returns == {"loss": float}
    assert steps_of(Derived)["fit"].receives == {"known": Representations}
    assert "look" not in steps_of(Derived)  # a step declares its own reply


def test_parameters_declare_the_request_in_order() -> None:
    assert list(schema_of(Base().fit).receives.items()) == [("weights", Weights), ("rate", float), ("label", str)]
    assert schema_of(Base().look).receives == {}


def test_marking_leaves_the_method_callable() -> None:
    class Counts:
        @client_step(n=int)
        def fit(self, client: str) -> Reply:
            return Reply(n=len(client))

    assert Counts().fit("abc").n == 3


@pytest.mark.parametrize("what", [Base().helper, len, "fit", None])
def test_an_unmarked_function_is_named(what: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a client step; mark it with @client_step\(\) or @client_query\(\)"):
        schema_of(what)
    with pytest.raises(TypeError, match=r"Base\.helper"):
        schema_of(Base().helper)


# ---- requests


def test_a_request_has_what_the_step_receives_and_may_leave_out_defaults() -> None:
    schema = schema_of(Base().fit)
    schema.require_request(reply(weights=WEIGHTS, rate=0.5, label="x"))
    schema.require_request(reply(weights=WEIGHTS))
    schema.require_request(reply(weights=WEIGHTS, rate=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"request lacks 'weights' \(weights\)"),
        ({"rate": 0.5}, r"request lacks 'weights' \(weights\)"),
        ({"weights": WEIGHTS, "more": 1}, r"undeclared field 'more' \(int\); declared: weights, rate, label"),
        ({"weights": 3}, "request field 'weights' is int, declared is weights"),
        ({"weights": Representations({})}, "is representations, declared is weights"),
        ({"weights": TensorBundle({})}, "is tensors, declared is weights"),
        ({"weights": WEIGHTS, "rate": "fast"}, "request field 'rate' is str, declared is float"),
        ({"weights": WEIGHTS, "rate": WEIGHTS}, "request field 'rate' is weights, declared is float"),
    ],
)
def test_another_request_is_refused(fields: dict[str, TensorBundle | Scalar], message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        schema_of(Base().fit).require_request(reply(**fields))


# ---- replies


def test_a_reply_has_exactly_what_is_declared() -> None:
    schema = schema_of(Base().fit)
    schema.require_reply(reply(weights=WEIGHTS, num_examples=3))
    for fields, message in [
        ({"weights": WEIGHTS}, r"reply lacks 'num_examples' \(int\)"),
        (
            {"weights": WEIGHTS, "num_example": 3},
            r"reply lacks 'num_examples' \(int\); did you mean 'num_example', which it has\?",
        ),
        ({"weights": WEIGHTS, "num_examples": 3, "gradients": WEIGHTS}, r"undeclared field 'gradients' \(weights\)"),
        ({"weights": WEIGHTS, "num_examples": 3, "name": "x"}, "declared: weights, num_examples"),
    ]:
        with pytest.raises(PayloadError, match=message):
            schema.require_reply(reply(**fields))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no field 'num_example', .*; did you mean 'num_examples'\?"):
        _ = Reply(num_examples=3).num_example


@pytest.mark.parametrize(
    ("declared", "fits", "refused"),
    [
        (int, [0, -3, 1 << 70], [True, 1.0, "1", WEIGHTS]),
        (float, [0.5, 3, -1], [True, "0.5", WEIGHTS]),
        (bool, [True, False], [1, 0.0, "yes"]),
        (str, ["", "x"], [1, True, WEIGHTS]),
        (Weights, [WEIGHTS, Weights({})], [TensorBundle({}), Representations({}), 1]),
    ],
)
def test_types_are_exact_but_for_whole_numbers(declared: type, fits: list[Any], refused: list[Any]) -> None:
    @client_step(x=declared)
    def fit(self: object, client: object) -> Reply:
        raise AssertionError("nothing is run here")

    for value in fits:
        schema_of(fit).require_reply(reply(x=value))
    for value in refused:
        with pytest.raises(PayloadError, match=rf"reply field 'x' is \w+, declared is {schema_name(declared)}"):
            schema_of(fit).require_reply(reply(x=value))


def schema_name(declared: type) -> str:
    return declared.label if issubclass(declared, TensorBundle) else declared.__name__


def test_further_scalars_are_of_the_type_that_was_declared_for_them() -> None:
    nothing, schema = steps_of(LocalOnly)["fit"], schema_of(Base().look)
    nothing.require_reply(reply())
    with pytest.raises(PayloadError, match=r"undeclared field 'loss' \(float\); declared: none"):
        nothing.require_reply(reply(loss=0.5))
    schema.require_reply(reply())
    schema.require_reply(reply(accuracy=0.5, n=3))
    for value in ("high", WEIGHTS, True):
        with pytest.raises(PayloadError, match="reply field 'accuracy'"):
            schema.require_reply(reply(accuracy=value))


@pytest.mark.parametrize("name", ["", "x" * 129, "a\x1b[2J", "a\nround 3", "a\u202eb"])
def test_a_metric_has_a_name_of_printable_characters(name: str) -> None:
    with pytest.raises(PayloadError, match="has no name of 1 to 128 printable characters") as caught:
        schema_of(Base.look).require_reply(reply(**{name: 0.5}))
    assert str(caught.value).isprintable()
    schema_of(Base.look).require_reply(reply(**{"macro_f1 of größe (%)": 0.5, "x" * 128: 0.5}))


def test_a_client_reports_a_bounded_number_of_metrics() -> None:
    schema_of(Base.look).require_reply(reply(**{f"m{k}": 0.5 for k in range(1000)}))
    with pytest.raises(PayloadError, match="reply of 1001 fields, the limit is 1000"):
        schema_of(Base.look).require_reply(reply(**{f"m{k}": 0.5 for k in range(1001)}))
