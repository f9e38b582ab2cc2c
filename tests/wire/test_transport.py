"""The transport: what crosses in which form, and what comes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from crossings import LIMITS, bits, crossed, drawn, model, of, received, weights
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.settings import parse_settings
from polyfed.wire.framing import pack, tensor_bytes, wire_size
from polyfed.wire.payload import Logits, Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport


@pytest.mark.parametrize("type_name", [TensorBundle, Weights, Representations, Logits])
@pytest.mark.parametrize(
    ("chosen", "of_weights", "of_rows", "of_others"),
    [
        ({}, 4.0, 4.0, 4.0),
        ({"dtype": "float16"}, 2.0, 2.0, 2.0),
        ({"representations": "float16"}, 4.0, 2.0, 4.0),
        ({"weights": "bfloat16"}, 2.0, 4.0, 4.0),
        ({"dtype": "float16", "weights": "float32"}, 4.0, 2.0, 2.0),
    ],
)
def test_each_kind_has_its_type(
    type_name: type[TensorBundle], chosen: dict[str, str], of_weights: float, of_rows: float, of_others: float
) -> None:
    item = type_name({"a": drawn(10, 50)})
    expected = {TensorBundle: of_others, Weights: of_weights}.get(type_name, of_rows)
    transport = Transport.model_validate(chosen)
    assert tensor_bytes(of(transport.encode(Payload({"x": item})), "x")) == 500 * expected
    back = of(received(transport, Payload({"x": item})), "x")
    assert type(back) is type_name
    assert back["a"].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_shorter_floats_are_within_half_a_unit(dtype: str, bound: float) -> None:
    values = drawn(2000) * 2.0 ** torch.arange(-10, 10).repeat(100)
    back = of(received(Transport.model_validate({"dtype": dtype}), weights({"w": values})))["w"]
    normal = values.abs() >= 2.0**-14  # below, float16 has equal steps of 2^-24
    assert bool(((back - values).abs() <= bound * values.abs())[normal].all())
    assert bool(((back - values).abs() <= max(2.0**-25, bound * 2.0**-14))[~normal].all())


def test_integers_and_empty_tensors_stay_as_they_are_with_16_bits() -> None:
    before = model()
    back = of(received(Transport(dtype="float16"), weights(before)))
    assert list(back) == list(before)
    assert all(back[name].dtype == value.dtype for name, value in before.items())
    assert all(torch.equal(back[name], before[name]) for name in ("steps", "empty"))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_types_without_16_bits_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(ConfigError, match="'float32', 'float16' or 'bfloat16'"):
        parse_settings(Transport, {"dtype": dtype})


def test_an_artefact_under_two_names_stays_one() -> None:
    both = Representations({"image": drawn(5, 8)}, order="o")
    wire = Transport(dtype="float16").encode(Payload({"a": both, "b": both}))
    assert wire.fields["a"] is wire.fields["b"]
    back = Transport(dtype="float16").decode(wire)
    assert back.fields["a"] is back.fields["b"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_do_not_get_lost(value: float) -> None:
    after = model()
    after["linear"][3, 4] = value
    with pytest.raises(PayloadError, match=r"'linear' has NaN or infinite values"):
        received(Transport(dtype="float16"), weights(after)).require_sound(LIMITS)


OPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
        "weights": st.sampled_from([None, "float32", "float16"]),
    }
)


@given(options=OPTIONS, rows=st.integers(0, 6), width=st.integers(0, 6), seed=st.integers(0, 100))
def test_by_reference_and_by_bytes_are_the_same_bits(options: dict[str, Any], rows: int, width: int, seed: int) -> None:
    transport = Transport.model_validate(options)
    sent = {"a": drawn(rows, width, seed=seed), "b": drawn(3, seed=seed), "n": torch.tensor(3), "f": drawn(2, 2)}
    wire = transport.encode(weights(sent))
    here, there = transport.decode(wire), transport.decode(crossed(wire))
    assert list(here.fields) == list(there.fields)
    for name, value in of(here).items():
        assert torch.equal(bits(value), bits(of(there)[name]))
        assert value.shape == sent[name].shape
        assert value.dtype == sent[name].dtype
        assert value.is_contiguous()
        assert value.data_ptr() % 64 == 0
    messages, parts = pack({"it": wire})
    laid_out = sum(len(part.header.encode()) + sum(raw.nbytes for raw in part.buffers) for part in parts)
    assert wire_size(wire) == laid_out + len(messages["it"].encode())
