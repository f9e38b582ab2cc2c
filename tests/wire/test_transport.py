"""The transport: what crosses in which form, and what comes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from crossings import LIMITS, bits, crossed, drawn, model, of, received, trained, weights
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.wire.compression import dequantise, quantise
from polyfed.wire.framing import pack, tensor_bytes, wire_size
from polyfed.wire.payload import Logits, Payload, Prototypes, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport

# ---- types


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


@pytest.mark.parametrize("kind", [TensorBundle, Weights, Representations, Logits, Prototypes])
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
@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"topk": 0.05}, {"topk": 0.05, "dtype": "int8"}])
def test_values_that_are_not_finite_do_not_get_lost(options: dict[str, Any], value: float) -> None:
    transport, before = Transport.model_validate(options), model()
    after = trained(before)
    after["linear"][3, 4] = value
    with pytest.raises(PayloadError, match=r"'linear' has NaN or infinite values"):
        received(transport, weights(after), weights(before)).require_sound(LIMITS)


@pytest.mark.parametrize(
    "bad", [{"dtype": "int4"}, {"topk": 0}, {"topk": 1.1}, {"topk": math.nan}, {"unchanged": True}]
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Transport.model_validate(bad)


# ---- against what was received


def naive_topk(after: Tensor, before: Tensor, share: float) -> Tensor:
    """Entry by entry: the k that moved farthest take their new values."""
    new, old = after.double().flatten().tolist(), before.double().flatten().tolist()
    order = sorted(range(len(new)), key=lambda k: -abs(new[k] - old[k]))
    for k in order[: math.ceil(share * len(new))]:
        old[k] = new[k]
    return torch.tensor(old, dtype=torch.float64).view(after.shape)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 3e-7), ("float16", 4e-5), ("bfloat16", 3e-4), ("int8", 2e-4)]
)
def test_the_entries_that_moved_farthest_arrive(dtype: str, tolerance: float) -> None:
    transport, before = Transport.model_validate({"weights": dtype, "topk": 0.1}), model()
    after = trained(before)
    back = of(received(transport, weights(after), weights(before)))
    expected = naive_topk(after["linear"], before["linear"], 0.1)
    assert float((back["linear"] - expected).abs().max()) <= tolerance
    assert int((back["linear"] != before["linear"]).sum()) == pytest.approx(120, abs=1)
    assert list(back) == list(after)


def test_vectors_and_numbers_cross_whole_beside_the_largest_entries() -> None:
    before = model()
    after = trained(before) | {"steps": torch.tensor(99)}
    back = of(received(Transport(topk=0.01), weights(after), weights(before)))
    assert torch.equal(back["bias"], after["bias"])
    assert int(back["steps"]) == 99


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.5), ("float16", 1 / 3), ("int8", 0.2)])
def test_where_places_would_cost_more_than_they_save_all_entries_cross(dtype: str, least: float) -> None:
    before, after = weights({"w": drawn(40, 30)}), weights({"w": drawn(40, 30, seed=1)})
    dense = Transport.model_validate({"dtype": dtype}).encode(after)
    size = tensor_bytes(of(dense))
    for share in (least - 0.01, least + 0.01, 1.0):
        wire = Transport.model_validate({"dtype": dtype, "topk": share}).encode(after, before)
        assert (tensor_bytes(of(wire)) < size) == (share < least)
        if share > least:
            assert all(torch.equal(value, of(dense)[name]) for name, value in of(wire).items())


@pytest.mark.parametrize("reference", ["none", "other-name", "other-kind", "other-shape", "other-type"])
def test_without_an_earlier_form_everything_crosses(reference: str) -> None:
    after, transport = model(3), Transport(topk=0.05, unchanged="omit")
    request = {
        "none": None,
        "other-name": Payload({"others": Weights(model(3))}),
        "other-kind": Payload({"weights": 5}),
        "other-shape": weights({name: value.flatten()[1:] for name, value in model(3).items() if value.ndim}),
        "other-type": weights({name: value.double() for name, value in model(3).items()}),
    }[reference]
    back = of(received(transport, weights(after), request))
    assert all(torch.equal(back[name], value) for name, value in after.items())


def test_only_weights_are_thinned() -> None:
    request, reply = (Payload({"x": Representations({"image": drawn(30, 20, seed=seed)})}) for seed in (0, 1))
    assert Transport(topk=0.05).encode(reply, request).fields == reply.fields


def test_requests_are_sent_whole() -> None:
    payload = weights(model())
    assert Transport(topk=0.1, unchanged="omit").encoder()(payload).fields == payload.fields


def test_a_change_under_the_name_of_what_it_changes_is_thinned_as_it_is() -> None:
    """SCAFFOLD receives c and replies with the change of c_k: small, and not near c."""
    control, change = drawn(20, 10), 0.01 * drawn(20, 10, seed=1)
    back = of(received(Transport(topk=0.2), weights({"c": change}), weights({"c": control})))["c"]
    assert torch.equal(back[back != 0], change[back != 0])
    assert int((back != 0).sum()) == 40
    assert float((back - change).norm()) < float(change.norm())


def test_what_did_not_change_is_left_out_and_comes_back_bit_for_bit() -> None:
    transport, before = Transport(unchanged="omit"), model()
    before["conv"][0, 0, 0, 0] = -0.0
    after = trained(before)
    wire = transport.encode(weights(after), weights(before))
    assert tensor_bytes(of(wire)) == 4 * (40 * 30 + 40)
    back = of(received(transport, weights(after), weights(before)))
    assert list(back) == list(after)
    for name, value in after.items():
        assert torch.equal(bits(back[name]), bits(value))


def test_zero_and_minus_zero_are_not_the_same() -> None:
    request, reply = weights({"w": torch.zeros(3)}), weights({"w": torch.tensor([0.0, -0.0, 0.0])})
    back = of(received(Transport(unchanged="omit"), reply, request))["w"]
    assert torch.signbit(back).tolist() == [False, True, False]


OPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
        "weights": st.sampled_from([None, "float32", "float16", "int8"]),
        "topk": st.sampled_from([None, 0.01, 0.3, 1.0]),
        "unchanged": st.sampled_from(["send", "omit"]),
    }
)


@given(options=OPTIONS, rows=st.integers(0, 6), width=st.integers(0, 6), seed=st.integers(0, 100))
def test_by_reference_and_by_bytes_are_the_same_bits(options: dict[str, Any], rows: int, width: int, seed: int) -> None:
    transport = Transport.model_validate(options)
    old = {"a": drawn(rows, width, seed=seed), "b": drawn(3, seed=seed), "n": torch.tensor(3), "f": drawn(2, 2)}
    new = {"a": drawn(rows, width, seed=seed + 1), "b": drawn(3, seed=seed), "n": torch.tensor(4), "f": drawn(2, 2)}
    request = transport.decode(transport.encode(weights(old)))
    wire = transport.encode(weights(new), request)
    here, there = transport.decode(wire, request), transport.decode(crossed(wire), request)
    assert list(here.fields) == list(there.fields)
    for name, value in of(here).items():
        assert torch.equal(bits(value), bits(of(there)[name]))
        assert value.shape == new[name].shape
        assert value.dtype == new[name].dtype
        assert value.is_contiguous()
        assert value.data_ptr() % 64 == 0
    messages, parts = pack({"it": wire})
    laid_out = sum(len(part.header.encode()) + sum(raw.nbytes for raw in part.buffers) for part in parts)
    assert wire_size(wire) == laid_out + len(messages["it"].encode())
