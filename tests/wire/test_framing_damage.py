"""Damaged and hostile messages: refused with a reason, and never more than that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossings import LIMITS, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import PayloadError
from polyfed.wire.framing import SCHEMA, pack, pack_frame, unpack, unpack_frame
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Frame, Limits
from polyfed.wire.payload import Payload, Representations, TensorBundle, Weights

NAMES = st.text(min_size=1, max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), SCALARS), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2)
)


def damaged(payload: Payload, damage: Callable[[dict[str, Any]], None], limits: Limits = LIMITS) -> Payload:
    """Outcome of a message with a changed text."""
    messages, frames = pack({"it": payload})
    content = json.loads(messages["it"])
    damage(content)
    return unpack(json.dumps(content), frames, limits)


def damaged_part(bundle: TensorBundle, damage: Callable[[dict[str, Any]], None], *buffers: bytes) -> TensorBundle:
    """Outcome of a frame with a changed header, and changed bytes if given."""
    frame = pack_frame(bundle)
    header = json.loads(frame.header)
    damage(header)
    return unpack_frame(Frame(json.dumps(header), [memoryview(raw) for raw in buffers] or frame.buffers))


def test_checksums_find_every_flipped_bit() -> None:
    frame = pack_frame(Weights({"a": torch.randn(3), "b": torch.tensor([1, 2], dtype=torch.int16)}), checksums=True)
    assert list(unpack_frame(frame)) == ["a", "b"]
    for which, buffer in enumerate(frame.buffers):
        for position in range(len(buffer)):
            for bit in range(8):
                raw = [bytearray(other) for other in frame.buffers]
                raw[which][position] ^= 1 << bit
                with pytest.raises(PayloadError, match="checksum"):
                    unpack_frame(Frame(frame.header, [memoryview(bytes(other)) for other in raw]))


def test_without_checksums_nothing_is_checked_or_paid() -> None:
    frame = pack_frame(Weights({"a": torch.zeros(2)}))
    raw = bytearray(frame.buffers[0])
    raw[3] ^= 0x40
    assert unpack_frame(Frame(frame.header, [memoryview(bytes(raw))]))["a"].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("count", [0, 8, 9, 11, 13])
def test_bytes_that_were_cut_off_or_added_are_noticed(count: int) -> None:
    frame = pack_frame(Weights({"a": torch.zeros(3)}))
    with pytest.raises(PayloadError, match=rf"tensor 'a' \[3\] has {count} bytes, not 12"):
        unpack_frame(Frame(frame.header, [memoryview((bytes(frame.buffers[0]) + b"\0")[:count])]))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_buffers_are_counted(count: int) -> None:
    frame = pack_frame(Weights({"a": torch.zeros(3), "b": torch.zeros(3)}))
    with pytest.raises(PayloadError, match=f"{count} tensors where 2 .*are announced"):
        unpack_frame(Frame(frame.header, [frame.buffers[0]] * count))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "null", "\xff" * 40, '"text"', "[" * 10**5, '{"a":' * 10**5], ids=len
)
def test_text_that_is_not_a_message(text: str) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        unpack(text, [], LIMITS)
    with pytest.raises(PayloadError, match="damaged message"):
        unpack_frame(Frame(text, []))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("parts"),
        lambda content: content.pop("scalars"),
        lambda content: content.pop("fields"),
        lambda content: content["parts"].update(weights=7),
        lambda content: content["parts"].update(weights="0"),
        lambda content: content["parts"].update(weights=[0]),
        lambda content: content["parts"].update(more=0),
        lambda content: content["parts"].pop("reps"),
        lambda content: content["scalars"].pop("n"),
        lambda content: content["scalars"].update(more=1),
        lambda content: content["fields"].append("more"),
        lambda content: content["fields"].append("n"),
        lambda content: content["fields"].append(["n"]),
        lambda content: content.update(parts=5),
        lambda content: content.update(scalars="text"),
        lambda content: content.update(fields=None),
        lambda content: content["fields"].append(3),
        lambda content: content["scalars"].update(weights=1),  # a name of tensors and of a number
        lambda content: content["parts"].update(weights=-1),  # parts are not counted from the end
    ],
)
def test_a_message_that_contradicts_itself_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged(sample(), damage)


@pytest.mark.parametrize("value", [[1], {"a": 1}, None, []])
def test_scalars_are_scalars(value: Any) -> None:
    with pytest.raises(PayloadError, match=r"n is \w+, not a number, text or truth value"):
        damaged(sample(), lambda content: content["scalars"].update(n=value))


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1, None, "2"])
def test_another_layout_is_refused_with_a_remedy(schema: Any) -> None:
    with pytest.raises(PayloadError, match=rf"schema {schema}, this polyfed speaks {SCHEMA}: use equal versions"):
        damaged(sample(), lambda content: content.update(schema=schema))


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header.update(kind="gradients"),
        lambda header: header.update(kind=["weights"]),
        lambda header: header.pop("kind"),
        lambda header: header.pop("crc"),
        lambda header: header.update(crc="00000000"),
        lambda header: header.update(attributes={}),
        lambda header: header.update(attributes={"tensors": 1}),
        lambda header: header.update(attributes=None),
        lambda header: header.update(tensors=[["a", "complex64", [2]]]),
        lambda header: header.update(tensors=[["a", "float31", [2]]]),
        lambda header: header.update(tensors=[["a", ["float32"], [2]]]),
        lambda header: header.update(tensors=[["a", "float32"]]),
        lambda header: header.update(tensors=[["a", "float32", 2]]),
        lambda header: header.update(tensors=[["a", "float32", ["two"]]]),
        lambda header: header.update(tensors=[["a", "float32", [-2]]]),
        lambda header: header.update(tensors=[["a", "float32", [-1, -2]]]),
        lambda header: header.update(tensors=[["a", "float32", [3]]]),
        lambda header: header.update(tensors=[["a", "float64", [2]]]),
        *(lambda header, order=order: header["attributes"].update(order=order) for order in ([1], {"a": 1}, None, 3)),
        lambda header: header.update(tensors=5),
        lambda header: header.update(tensors=[["a", "float32", [1.7]]]),
        *(
            lambda header, shape=shape: header.update(tensors=[["a", "float32", shape]])
            for shape in (
                [1 << 32, 1 << 32],
                [0, 10**30],
                [0, 1 << 62, 4],
                [0, 1 << 39, 1 << 39],
                [float("inf")],
                [0, 1 << 62, 1 << 62],
            )
        ),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(Representations({"a": torch.zeros(2)}, order="o"), damage)


def test_two_tensors_of_one_name_are_refused() -> None:
    twice = Weights({"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(PayloadError, match="names of their own"):
        damaged_part(twice, lambda header: header.update(tensors=[["a", "float32", [1]]] * 2))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_other_text_is_refused_or_read_but_never_breaks_the_receiver(data: st.DataObject) -> None:
    """One place of a valid message or header replaced by any JSON: PayloadError, or a payload that can be entered."""
    messages, frames = pack({"it": Payload({"w": Representations({"a": torch.zeros(2, 1)}, order="o"), "n": 1})})
    value = data.draw(JSON)
    content, header = json.loads(messages["it"]), json.loads(frames[0].header)
    target = data.draw(st.sampled_from([content, content["parts"], content["scalars"], header, header["attributes"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = value
    try:
        payload = unpack(json.dumps(content), [Frame(json.dumps(header), frames[0].buffers)], LIMITS)
    except PayloadError:
        return
    Ledger().enter(1, "c", "up", "fit", payload)
    payload.require_sound(LIMITS)


# ---- limits


def test_what_came_with_a_message_counts_referred_to_or_not() -> None:
    messages, frames = pack({"it": Payload({"n": 1})})
    flood = pack_frame(Weights({"a": torch.zeros(1000)}))
    with pytest.raises(PayloadError, match="no field refers to frame 0 of its 1"):
        unpack(messages["it"], [*frames, flood], Limits(message_bytes=4000))
    with pytest.raises(PayloadError, match=r"message of 8,000 bytes, the limit is 7,999 \(limits\.message_bytes\)"):
        unpack(messages["it"], [*frames, flood, flood], Limits(message_bytes=7999))
    with pytest.raises(PayloadError, match=r"message of 3 tensors, the limit is 2 \(limits\.tensors\)"):
        unpack(messages["it"], [*frames, flood, flood, flood], Limits(tensors=2))


def test_text_counts_that_of_headers_too() -> None:
    limits = Limits(text_bytes=2000)
    messages, frames = pack({"it": Payload({"n": "x" * 1000})})
    assert unpack(messages["it"], frames, limits).fields["n"] == "x" * 1000
    wordy = Frame(" " * 1000, [])
    for text, own in ((messages["it"], [wordy]), (messages["it"] + " " * 1000, []), ("", [wordy, wordy, wordy])):
        with pytest.raises(PayloadError, match=r"with text of .* bytes, the limit is 2,000 \(limits\.text_bytes\)"):
            unpack(text, own, limits)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 10**400])
def test_whole_numbers_have_64_bits(number: int) -> None:
    with pytest.raises(PayloadError, match="beyond 64 bits"):
        damaged(sample(), lambda content: content["scalars"].update(n=number))


def test_a_deep_header_is_refused() -> None:
    frame = pack_frame(Weights({"a": torch.zeros(1)}))
    deep = frame.header.replace("[1]", "[" * 500 + "]" * 500)
    with pytest.raises(PayloadError, match="nested deeper than 32 levels"):
        unpack_frame(Frame(deep, frame.buffers))
