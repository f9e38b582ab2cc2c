"""Payloads: encoding, exact size, and refusal of damage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.errors import PayloadError
from polyfed.federation.ledger import Ledger, Transport
from polyfed.federation.payload import (
    Payload,
    Representations,
    Weights,
    decode,
    encode,
    encoded_size,
    tensor_bytes,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64]


def sample() -> Payload:
    weights = Weights({"a.weight": torch.randn(3, 4), "a.count": torch.tensor(7), "empty": torch.zeros(0, 2)})
    reps = Representations({"image": torch.randn(5, 2), "text": torch.randn(5, 2)}, order="abc")
    return Payload({"weights": weights, "reps": reps, "n": 12, "loss": 0.5, "name": "größe", "ok": True})


def test_what_is_decoded_is_what_was_encoded() -> None:
    payload = sample()
    back = decode(encode(payload))
    assert back.scalars == payload.scalars
    for name, artefact in payload.artefacts.items():
        other = back.artefacts[name]
        assert type(other) is type(artefact)
        assert other.attributes() == artefact.attributes()
        assert list(other) == list(artefact)
        assert all(
            torch.equal(other[key], value) and other[key].dtype == value.dtype for key, value in artefact.items()
        )


def test_size_is_that_of_the_encoding() -> None:
    assert encoded_size(sample()) == len(encode(sample()))
    assert encoded_size(Payload()) == len(encode(Payload()))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
        max_size=6,
    )
)
def test_size_holds_for_any_names_shapes_and_types(spec: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    payload = Payload({"weights": Weights(tensors)})
    assert encoded_size(payload) == len(encode(payload))


@pytest.mark.parametrize("damage", [lambda blob: blob[:-3], lambda blob: b"", lambda blob: b"\xff" * 40])
def test_damaged_bytes_are_refused(damage) -> None:
    with pytest.raises(PayloadError, match="damaged"):
        decode(damage(encode(sample())))


def test_values_that_are_not_finite_are_named() -> None:
    with pytest.raises(PayloadError, match="reps: tensor 'image'"):
        Payload({"reps": Representations({"image": torch.tensor([[float("nan")]])})}).require_finite()
    with pytest.raises(PayloadError, match="loss is inf"):
        Payload({"loss": float("inf")}).require_finite()
    sample().require_finite()


def test_representations_know_their_set_shape_and_modalities() -> None:
    reps = Representations({"image": torch.zeros(5, 2)}, order="abc")
    reps.require("abc", 5, 2, ("image",))
    for order, rows, dim, names in [
        ("abd", 5, 2, ("image",)),
        ("abc", 6, 2, ("image",)),
        ("abc", 5, 3, ("image",)),
        ("abc", 5, 2, ("image", "text")),
    ]:
        with pytest.raises(PayloadError):
            reps.require(order, rows, dim, names)


def test_transport_halves_the_bytes_and_gives_fp32_back() -> None:
    payload = Payload({"reps": Representations({"image": torch.randn(8, 4)}, order="o"), "n": 3})
    transport = Transport(dtype="float16")
    wire = transport.narrow(payload)
    assert tensor_bytes(wire.artefacts["reps"]) == 8 * 4 * 2
    back = transport.widen(wire).artefacts["reps"]["image"]
    assert back.dtype == torch.float32
    assert torch.allclose(back, payload.artefacts["reps"]["image"], atol=1e-3)


def test_ledger_lines_of_a_message_add_up_to_its_bytes() -> None:
    ledger = Ledger()
    ledger.enter(3, "c-1", "up", "fit", sample())
    assert sum(line["bytes"] for line in ledger.records) == len(encode(sample()))
    assert {line["artefact"] for line in ledger.records} == {"weights", "reps", "framing"}
    assert all((line["round"], line["client"], line["direction"]) == (3, "c-1", "up") for line in ledger.records)
