"""The transport: what crosses in which form, and what comes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from crossings import LIMITS, bits, crossed, drawn, model, of, received, weights
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.errors import PayloadError
from polyfed.wire.framing import pack, tensor_bytes, wire_size
from polyfed.wire.payload import Logits, Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport, dequantise, quantise


def test_representations_shrink_almost_four_times_framing_included() -> None:
    payload = Payload({"representations": Representations({"image": drawn(10_000, 256)}, order="o"), "n": 3})
    wire = Transport(dtype="int8").encode(payload)
    assert tensor_bytes(of(wire, "representations")) == 10_000 * (256 + 4)
    assert wire_size(payload) / wire_size(wire) > 3.9
    codes, scales = quantise(of(payload, "representations")["image"])
    back = received(Transport(dtype="int8"), payload)
    assert type(back.fields["representations"]) is Representations
    assert of(back, "representations").attributes() == {"order": "o"}
    assert torch.equal(of(back, "representations")["image"], dequantise(codes, scales))
    assert back.scalars == {"n": 3}


@pytest.mark.parametrize("kind", [TensorBundle, Weights, Representations, Logits])
@pytest.mark.parametrize(
    ("chosen", "of_weights", "of_rows", "of_others"),
    [
        ({}, 4.0, 4.0, 4.0),
        ({"dtype": "float16"}, 2.0, 2.0, 2.0),
        ({"dtype": "int8"}, 1.0, 1.0, 1.0),
        ({"representations": "int8"}, 4.0, 1.0, 4.0),
        ({"weights": "bfloat16"}, 2.0, 4.0, 4.0),
        ({"dtype": "float16", "weights": "float32", "representations": "int8"}, 4.0, 1.0, 2.0),
    ],
)
def test_each_kind_has_its_type(
    kind: type[TensorBundle], chosen: dict[str, str], of_weights: float, of_rows: float, of_others: float
) -> None:
    item = kind({"a": drawn(10, 50)})
    expected = {TensorBundle: of_others, Weights: of_weights}.get(kind, of_rows)
    transport = Transport.model_validate(chosen)
    scales = 40 if expected == 1 else 0
    assert tensor_bytes(of(transport.encode(Payload({"x": item})), "x")) == 500 * expected + scales
    back = of(received(transport, Payload({"x": item})), "x")
    assert type(back) is kind
    assert back["a"].dtype == torch.float32


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_shorter_floats_are_within_half_a_unit(dtype: str, bound: float) -> None:
    values = drawn(2000) * 2.0 ** torch.arange(-10, 10).repeat(100)
    back = of(received(Transport.model_validate({"dtype": dtype}), weights({"w": values})))["w"]
    normal = values.abs() >= 2.0**-14  # below, float16 has equal steps of 2^-24
    assert bool(((back - values).abs() <= bound * values.abs())[normal].all())
    assert bool(((back - values).abs() <= max(2.0**-25, bound * 2.0**-14))[~normal].all())


def test_integers_vectors_and_empty_tensors_stay_as_they_are_beside_eight_bits() -> None:
    before = model()
    back = of(received(Transport(dtype="int8"), weights(before)))
    assert list(back) == list(before)
    for name in ("bias", "steps", "empty"):
        assert torch.equal(back[name], before[name])
        assert back[name].dtype == before[name].dtype
    for name in ("conv", "linear"):
        off = (back[name] - before[name]).abs().flatten(1).amax(1)
        peak = before[name].abs().flatten(1).amax(1)
        assert bool((off <= peak / 254 * 1.0001).all())
        assert float(off.max()) > 0


def test_a_column_is_sent_as_it_is_since_scales_would_cost_more() -> None:
    payload = weights({"w": drawn(9, 1)})
    assert Transport(dtype="int8").encode(payload).fields["weights"] is payload.fields["weights"]


def test_an_artefact_under_two_names_stays_one() -> None:
    both = Representations({"image": drawn(5, 8)}, order="o")
    wire = Transport(dtype="int8").encode(Payload({"a": both, "b": both}))
    assert wire.fields["a"] is wire.fields["b"]
    back = Transport(dtype="int8").decode(wire)
    assert back.fields["a"] is back.fields["b"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_do_not_get_lost(value: float) -> None:
    after = model()
    after["linear"][3, 4] = value
    with pytest.raises(PayloadError, match=r"'linear' has NaN or infinite values"):
        received(Transport(dtype="int8"), weights(after)).require_sound(LIMITS)


OPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
        "weights": st.sampled_from([None, "float32", "float16", "int8"]),
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
