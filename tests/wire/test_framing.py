"""The layout of messages: what is unpacked is what was packed, each bundle once; damage is refused; envelopes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossings import LIMITS, bits, crossed, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.models.slots import Slot, TensorSlot, decode_slots, encode_slots
from polyfed.wire.framing import SCHEMA, pack, pack_frame, unpack, unpack_frame, wire_size
from polyfed.wire.ledger import Ledger
from polyfed.wire.limits import Frame, Limits
from polyfed.wire.messages import Answer, Cause, Request, answer_of, envelope_answer, envelope_requests, request_of
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


# ---- damaged and hostile messages


JSON_NAMES = st.text(min_size=1, max_size=8)
JSON_SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), JSON_SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_NAMES, inner, max_size=2),
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


# ---- envelopes


INFO = {"id": "a", "group": "g", "modalities": ["m"], "task": "t", "samples": 3, "batch_size": 2, "architecture": "x/h"}


@pytest.mark.parametrize(
    "change", [{"round": -1}, {"phase": -1}, {"round": 1.5}, {"round": "1"}, {"after": [-1, 0]}, {"after": [1, True]}]
)
def test_a_request_has_labels_that_a_file_can_be_called_after(change: dict[str, Any]) -> None:
    [envelope], _ = envelope_requests([Request("a", "fit", 1, 0, (0, 2), Payload({"n": 1}))])
    assert request_of(envelope.text, [], Limits()).after == (0, 2)
    with pytest.raises(PayloadError, match="damaged request: TypeError"):
        request_of(json.dumps(json.loads(envelope.text) | change), [], Limits())


def test_an_error_is_reported_in_a_bounded_line() -> None:
    text = "x\x1b[2J\nround 3: client b" + "y" * 5000
    text, _ = envelope_answer(Answer.failed("a", Cause.LATE, text, "first\n" + "z" * 50_000 + "\nlast"))
    answer = answer_of(Request("a", "fit", 1, 0, None, Payload()), text, [], Limits())
    assert answer.failure is not None
    assert answer.failure.cause is Cause.LATE
    assert answer.failure.text.startswith("x\u241b[2J\u240around 3")
    assert len(answer.failure.text) == 1000
    assert len(answer.failure.details) == 20_000
    assert answer.failure.details.endswith("\nlast")


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 10**400},
        {"samples": 1 << 63},
        {"samples": 0},
        {"batch_size": 0},
        {"samples": 10**9},  # passes of more batches than epsilon is computed of
        {"group": "g\x1b[2J"},
        {"task": "t\nforged"},
        {"architecture": "\u202ex"},
        {"architecture": "x" * 5000},
        {"modalities": ["image\x07"]},
        {"id": "a\x1b"},
    ],
)
def test_a_client_is_described_in_words_and_numbers_of_64_bits(change: dict[str, Any]) -> None:
    assert ClientInfo.from_json(INFO).samples == 3
    with pytest.raises(PayloadError) as caught:
        ClientInfo.from_json(INFO | change)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 6000


def test_deep_slots_are_refused() -> None:
    with pytest.raises(PayloadError, match="nested deeper than 32 levels"):
        decode_slots("[" * 100_000 + "]" * 100_000)


def test_slots_of_tensors_name_the_frozen_parts_around_them() -> None:
    slots = {
        "encoders.image.w": TensorSlot(Slot("image", "trunk"), "w", (("image", "3xaa"),)),
        "heads.h.w": TensorSlot(Slot("h", "head"), "w", (("image", "3xaa"), ("text", "4xbb"))),
        "heads.h.b": TensorSlot(Slot("h", "head"), "b"),
    }
    assert decode_slots(encode_slots(slots)) == slots
    for row in (
        '"a", "b", "c", "d", ["image"]',
        '"a", "b", "c", "d", ["image", 3]',
        '"a", "b", "c"',
        '"a", "b", "c", 1',
    ):
        with pytest.raises(PayloadError, match="not a description of a model's parameters"):
            decode_slots(f"[[{row}]]")
