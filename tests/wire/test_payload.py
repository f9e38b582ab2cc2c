"""Payloads: what they refuse, what they weigh in the ledger, and the type in which they cross."""

from __future__ import annotations

import pytest
import torch
from crossings import LIMITS, sample

from polyfed.core.errors import PayloadError
from polyfed.wire.framing import wire_size
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights
from polyfed.wire.transport import Transport


def test_a_payload_that_is_sound_passes() -> None:
    sample().require_sound(LIMITS)
    Payload({"weights": Weights({}), "none": Representations({"image": torch.zeros(0, 4)})}).require_sound(LIMITS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("type_name", [TensorBundle, Weights, Representations])
def test_values_that_are_not_finite_are_named(type_name: type[TensorBundle], dtype: torch.dtype, value: float) -> None:
    tensors = {"image": torch.zeros(3, 2, dtype=dtype), "text": torch.zeros(3, 2, dtype=dtype)}
    tensors["text"][2, 1] = value
    with pytest.raises(PayloadError, match="reps: tensor 'text' has NaN or infinite values"):
        Payload({"reps": type_name(tensors)}).require_sound(LIMITS)
    with pytest.raises(PayloadError, match="NaN or infinite"):  # a single number where a matrix belongs
        Payload({"reps": type_name({"image": torch.tensor(value, dtype=dtype)})}).require_sound(LIMITS)
    with pytest.raises(PayloadError, match=f"loss is {value}"):
        Payload({"n": 1, "loss": value}).require_sound(LIMITS)


def test_a_limit_cannot_be_infinite() -> None:
    for name in ("row_norm", "tensor_norm"):
        with pytest.raises(ValueError, match=name):
            Limits.model_validate({name: float("inf")})


def test_rows_of_representations_are_bounded_one_by_one() -> None:
    limits = Limits(row_norm=2.0, tensor_norm=3.0)
    many = torch.full((1000, 4), 1.0)  # every row has norm 2, all of them together 63
    Payload({"reps": Representations({"image": many})}).require_sound(limits)
    many[7, 0] = 1.01
    with pytest.raises(PayloadError, match=r"reps: tensor 'image' has norm 2\.01, the limit is 2"):
        Payload({"reps": Representations({"image": many})}).require_sound(limits)


def test_other_tensors_are_bounded_as_a_whole() -> None:
    limits = Limits(row_norm=0.1, tensor_norm=3.0)
    full = torch.full((3,), 1 << 40)  # has no norm
    Payload({"w": Weights({"a": torch.ones(9), "b": torch.ones(9), "steps": full})}).require_sound(limits)
    with pytest.raises(PayloadError, match=r"w: tensor 'b' has norm 3\.16, the limit is 3"):
        Payload({"w": Weights({"a": torch.ones(9), "b": torch.ones(10)})}).require_sound(limits)


def test_a_norm_is_taken_where_it_does_not_overflow() -> None:
    big = torch.full((4,), 300.0, dtype=torch.float16)  # its square is beyond float16
    Payload({"w": Weights({"a": big})}).require_sound(LIMITS)
    with pytest.raises(PayloadError, match="norm"):  # finite values, but no finite norm in fp32
        Payload({"w": Weights({"a": torch.full((4,), 3e38)})}).require_sound(LIMITS)


def test_representations_know_their_set_shape_and_modalities() -> None:
    reps = Representations({"image": torch.zeros(5, 2)}, order="abc")
    reps.require("abc", {"image": (5, 2)})
    for order, shapes, message in [
        ("abd", {"image": (5, 2)}, r"of another public set or order \(abc, expected abd\)"),
        ("abc", {"image": (6, 2)}, r"of 'image' are torch.float32 \[5, 2\], expected \[6, 2\]"),
        ("abc", {"image": (5, 3)}, r"of 'image' are torch.float32 \[5, 2\], expected \[5, 3\]"),
        ("abc", {"image": (5, 2), "text": (5, 2)}, r"of \['image'\], expected \['image', 'text'\]"),
        ("abc", {}, r"of \['image'\], expected \[\]"),
    ]:
        with pytest.raises(PayloadError, match=message):
            reps.require(order, shapes)


def test_what_payloads_share_is_narrowed_once() -> None:
    shared = {"w": torch.randn(4), "steps": torch.tensor(3)}
    encode = Transport(dtype="bfloat16").encoder()
    first, second, other = (
        encode(Payload({"weights": Weights(tensors)}))
        for tensors in (dict(shared), dict(shared), {"w": shared["w"].clone()})
    )
    assert first.bundles["weights"]["w"] is second.bundles["weights"]["w"]
    assert first.bundles["weights"]["steps"] is shared["steps"]
    assert first.bundles["weights"]["w"] is not other.bundles["weights"]["w"]


def test_what_is_narrowed_does_not_depend_on_what_was_freed_before() -> None:
    encode = Transport(dtype="float16").encoder()
    for number in range(50):  # each tensor may get the address of one before it
        wire = encode(Payload({"weights": Weights({"w": torch.full((3,), float(number))})}))
        assert wire.bundles["weights"]["w"].tolist() == [number] * 3


def test_fp32_crosses_by_reference() -> None:
    payload = sample()
    for received in (Transport().encode(payload), Transport().decode(payload)):
        assert list(received.fields) == list(payload.fields)
        assert all(received.fields[name] is value for name, value in payload.fields.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_cross_in_one_layout_of_memory(dtype: str) -> None:
    """Sums depend on strides and alignment: what is handed over by reference is laid out as if it came off a wire."""
    full = torch.arange(60.0)
    odd = {"transposed": full.view(6, 10).T, "unaligned": full[1:9], "strided": full[::2], "one": full[3]}
    wire = Transport.model_validate({"dtype": dtype}).encode(Payload({"w": Weights(odd), "n": 1}))
    for name, value in wire.bundles["w"].items():
        assert value.is_contiguous()
        assert value.data_ptr() % 64 == 0
        assert torch.equal(value.float(), odd[name])
    assert wire.scalars == {"n": 1}


def test_ledger_lines_of_a_message_add_up_to_its_bytes() -> None:
    ledger = Ledger()
    ledger.enter(3, "c-1", "up", "fit", sample())
    assert sum(line["bytes"] for line in ledger.records) == wire_size(sample())
    assert {line["bundle"] for line in ledger.records} == {"weights", "reps", "framing"}
    assert all((line["round"], line["client"], line["direction"]) == (3, "c-1", "up") for line in ledger.records)
    sizes = {line["bundle"]: line["bytes"] for line in ledger.records}
    assert sizes["weights"] == 3 * 4 * 4 + 8
    assert sizes["reps"] == 2 * 5 * 2 * 4
