"""The layout of messages: what is unpacked is what was packed, each bundle once, and damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from crossings import LIMITS, bits, crossed
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import PayloadError
from polyfed.wire.framing import pack, pack_frame, unpack, unpack_frame, wire_size
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Frame
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def laid_out(payload: Payload) -> int:
    """Bytes of what ``pack`` made, counted one by one."""
    messages, frames = pack({"it": payload})
    texts = [messages["it"], *(frame.header for frame in frames)]
    return sum(len(text.encode()) for text in texts) + sum(len(raw) for frame in frames for raw in frame.buffers)


def require_equal(back: Payload, payload: Payload) -> None:
    assert list(back.fields) == list(payload.fields)
    for name, value in payload.scalars.items():
        assert type(back.scalars[name]) is type(value)
        assert back.scalars[name] == value
    for name, bundle in payload.bundles.items():
        other = back.bundles[name]
        assert type(other) is type(bundle)
        assert other.attributes() == bundle.attributes()
        assert list(other) == list(bundle)
        for key, tensor in bundle.items():
            assert other[key].dtype == tensor.dtype
            assert other[key].shape == tensor.shape
            assert torch.equal(bits(other[key]), bits(tensor))


# ---- there and back

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.text(max_size=8)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bytes as any type, in any order of memory."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    count = int(torch.Size(shape).numel())
    stream = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(top, (count * dtype.itemsize,), generator=stream, dtype=torch.uint8)
    made = raw.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    return made.permute(draw(st.permutations(range(len(shape)))))


ARTEFACTS = st.one_of(
    st.builds(TensorBundle, st.dictionaries(NAMES, tensors(), max_size=4)),
    st.builds(Weights, st.dictionaries(NAMES, tensors(), max_size=4)),
    st.builds(Representations, st.dictionaries(NAMES, tensors(), max_size=3), order=st.text(max_size=8)),
)
PAYLOADS = st.builds(Payload, st.dictionaries(NAMES, st.one_of(SCALARS, ARTEFACTS), max_size=8))


@settings(max_examples=40, deadline=None)
@given(PAYLOADS, st.booleans())
def test_what_is_unpacked_is_what_was_packed(payload: Payload, checksums: bool) -> None:
    require_equal(crossed(payload, checksums=checksums), payload)


@given(PAYLOADS)
def test_the_size_is_that_of_what_is_laid_out(payload: Payload) -> None:
    assert wire_size(payload) == laid_out(payload)


@pytest.mark.parametrize(
    "order",
    [
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(5, 6),
        lambda x: x.view(1, 4, 6, 1).to(memory_format=torch.channels_last),
    ],
)
def test_the_order_in_memory_does_not_matter(order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = order(torch.arange(24.0).view(4, 6))
    back = crossed(Payload({"w": Weights({"a": tensor})})).bundles["w"]["a"]
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


def test_values_that_json_has_no_word_for_cross_too() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0])
    numbers = {"inf": float("inf"), "big": 1 << 62, "whole": 1, "real": 1.0, "x": 0.1 + 0.2, "truth": True, "text": "1"}
    payload = Payload({"w": Weights({"a": tensor}), **numbers})  # not a digit is lost
    require_equal(crossed(payload), payload)
    assert str(crossed(Payload({"x": float("nan")})).scalars["x"]) == "nan"


def test_parameters_cross_without_their_gradients() -> None:
    back = crossed(Payload({"w": Weights({"a": torch.nn.Parameter(torch.ones(2))})})).bundles["w"]["a"]
    assert not back.requires_grad


def test_a_type_that_cannot_cross_is_refused_by_name() -> None:
    with pytest.raises(PayloadError, match="complex64"):
        pack({"it": Payload({"w": Weights({"a": torch.zeros(1, dtype=torch.complex64)})})})


# ---- each bundle once


def test_artefacts_made_for_each_client_of_the_same_tensors_are_one_part() -> None:
    """Bundles of FedAvg's ``each(server.weights_for)``: one per client, tensors by reference."""
    weights, names = {"image": torch.randn(50), "text": torch.randn(50)}, [("image",), ("image", "text"), ("text",)]
    payloads = {
        f"c{k}": Payload({"weights": Weights({name: weights[name] for name in names[k % 3]}), "n": k})
        for k in range(12)
    }
    messages, frames = pack(payloads)
    assert len(frames) == 3
    for name, payload in payloads.items():
        [place] = json.loads(messages[name])["parts"].values()
        require_equal(Payload({**payload.fields, "weights": unpack_frame(frames[place])}), payload)
    everything = Payload({name: payload.bundles["weights"] for name, payload in payloads.items()})
    assert wire_size(everything) == laid_out(everything)


def test_equal_tensors_under_other_names_kinds_or_attributes_are_parts_of_their_own() -> None:
    tensor = torch.randn(4, 2)
    fields: dict[str, TensorBundle] = {
        "a": Weights({"x": tensor}),
        "b": Weights({"y": tensor}),
        "c": TensorBundle({"x": tensor}),
        "d": Representations({"x": tensor}, order="one"),
        "e": Representations({"x": tensor}, order="two"),
        "f": Weights({"x": tensor.clone()}),
        "g": Weights({"x": tensor.flip(0)}),  # a view, of the same memory
    }
    payload = Payload(fields)
    messages, frames = pack({"it": payload})
    assert len(frames) == len(fields)
    require_equal(unpack(messages["it"], frames, LIMITS), payload)


def test_a_message_that_repeats_an_artefact_is_entered_as_it_is_laid_out() -> None:
    weights = Weights({"a": torch.randn(100)})
    payload, ledger = Payload({"first": weights, "again": weights}), Ledger()
    ledger.enter(1, "x", "down", "fit", payload)
    assert [line["bytes"] for line in ledger.records if line["kind"] == "weights"] == [400, 0]
    assert sum(line["bytes"] for line in ledger.records) == wire_size(payload) == laid_out(payload)
    assert all(line["bytes"] >= 0 for line in ledger.records)


# ---- no copies


def test_packing_and_unpacking_copy_nothing() -> None:
    tensor = torch.randn(64, 32)
    messages, frames = pack({"it": Payload({"w": Weights({"a": tensor, "b": tensor[8:]})})})
    back = unpack(messages["it"], frames, LIMITS).bundles["w"]
    assert back["a"].data_ptr() == tensor.data_ptr()
    assert back["b"].data_ptr() == tensor[8:].data_ptr()


def test_what_arrives_is_a_view_of_the_bytes_that_arrived() -> None:
    frame = pack_frame(Weights({"a": torch.zeros(3)}))
    place = torch.zeros(12, dtype=torch.uint8)  # on a boundary of 64
    received = unpack_frame(Frame(frame.header, [place.numpy().data]))["a"]
    place[:4] = torch.tensor([5.0]).view(torch.uint8)
    assert received.tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize("offset", [1, 4, 16, 32])
def test_what_arrives_off_a_boundary_is_moved_to_one(offset: int) -> None:
    bundle = Weights({"a": torch.randn(3)})
    frame = pack_frame(bundle)
    place = torch.zeros(offset + 12, dtype=torch.uint8)
    place[offset:] = bits(bundle["a"])
    received = unpack_frame(Frame(frame.header, [place.numpy().data[offset:]]))["a"]
    assert torch.equal(received, bundle["a"])
    assert received.data_ptr() % 64 == 0
