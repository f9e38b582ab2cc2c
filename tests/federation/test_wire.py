"""The layout of messages: what is unpacked is what was packed, each artefact once, and damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.errors import PayloadError
from polyfed.federation.ledger import Ledger
from polyfed.federation.limits import Limits
from polyfed.federation.parts import Part
from polyfed.federation.payload import Artefact, Payload, Representations, Scalar, Weights
from polyfed.federation.wire import SCHEMA, pack, pack_part, unpack, unpack_part, wire_size

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
LIMITS = Limits()


def crossed(payload: Payload, *, checksums: bool = False) -> Payload:
    """The payload after its bytes went through another process."""
    messages, parts = pack({"it": payload}, checksums=checksums)
    return unpack(messages["it"], [through_bytes(part) for part in parts], LIMITS)


def through_bytes(part: Part) -> Part:
    return Part(part.header, [memoryview(bytes(buffer)) for buffer in part.buffers])


def laid_out(payload: Payload) -> int:
    """Bytes of what ``pack`` made, counted one by one; a part for every field that refers to it."""
    messages, parts = pack({"it": payload})
    named = [parts[place] for place in json.loads(messages["it"])["parts"].values()]
    headers = sum(len(part.header.encode()) for part in named)
    return len(messages["it"].encode()) + headers + sum(len(bytes(buffer)) for part in named for buffer in part.buffers)


def require_equal(back: Payload, payload: Payload) -> None:
    assert list(back.fields) == list(payload.fields)
    for name, value in payload.scalars.items():
        assert type(back.scalars[name]) is type(value)
        assert back.scalars[name] == value
    for name, artefact in payload.artefacts.items():
        other = back.artefacts[name]
        assert type(other) is type(artefact)
        assert other.attributes() == artefact.attributes()
        assert list(other) == list(artefact)
        for key, tensor in artefact.items():
            assert other[key].dtype == tensor.dtype
            assert other[key].shape == tensor.shape
            assert torch.equal(bits(other[key]), bits(tensor))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sample() -> Payload:
    weights = Weights({"a.weight": torch.randn(3, 4), "a.count": torch.tensor(7), "empty": torch.zeros(0, 2)})
    reps = Representations({"image": torch.randn(5, 2), "text": torch.randn(5, 2)}, order="abc")
    return Payload({"n": 12, "weights": weights, "loss": 0.5, "reps": reps, "name": "größe", "ok": True})


# ---- there and back

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 4), max_size=3)
SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))


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
    st.builds(Artefact, st.dictionaries(NAMES, tensors(), max_size=4)),
    st.builds(Weights, st.dictionaries(NAMES, tensors(), max_size=4)),
    st.builds(Representations, st.dictionaries(NAMES, tensors(), max_size=3), order=st.text(max_size=8)),
)
PAYLOADS = st.builds(Payload, st.dictionaries(NAMES, st.one_of(SCALARS, ARTEFACTS), max_size=8))


@settings(max_examples=150, deadline=None)
@given(PAYLOADS, st.booleans())
def test_what_is_unpacked_is_what_was_packed(payload: Payload, checksums: bool) -> None:
    require_equal(crossed(payload, checksums=checksums), payload)


@settings(max_examples=150, deadline=None)
@given(PAYLOADS)
def test_the_size_is_that_of_what_is_laid_out(payload: Payload) -> None:
    assert wire_size(payload) == laid_out(payload)


def test_the_size_of_a_message_of_many_artefacts() -> None:
    payload = Payload({f"w{k}": Weights({"a": torch.tensor(k)}) for k in range(12)})
    assert wire_size(payload) == laid_out(payload)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
def test_every_type_and_shape_crosses(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(max(int(torch.Size(shape).numel()), 1))[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    require_equal(crossed(Payload({"w": Weights({"a": tensor})})), Payload({"w": Weights({"a": tensor})}))


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
    back = crossed(Payload({"w": Weights({"a": tensor})})).artefacts["w"]["a"]
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


def test_values_that_json_has_no_word_for_cross_too() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0])
    payload = Payload({"w": Weights({"a": tensor}), "high": float("inf"), "big": 1 << 80})
    require_equal(crossed(payload), payload)
    assert str(crossed(Payload({"x": float("nan")})).scalars["x"]) == "nan"


def test_parameters_cross_without_their_gradients() -> None:
    live = torch.nn.Parameter(torch.ones(2))
    back = crossed(Payload({"w": Weights({"a": live})})).artefacts["w"]["a"]
    assert not back.requires_grad


def test_numbers_stay_what_they_are() -> None:
    back = crossed(Payload({"whole": 1, "real": 1.0, "truth": True, "text": "1"})).scalars
    assert [type(back[name]) for name in ("whole", "real", "truth", "text")] == [int, float, bool, str]


def test_a_type_that_cannot_cross_is_refused_by_name() -> None:
    with pytest.raises(PayloadError, match="complex64"):
        pack({"it": Payload({"w": Weights({"a": torch.zeros(1, dtype=torch.complex64)})})})


# ---- each artefact once


def test_a_broadcast_is_one_part_however_many_it_goes_to() -> None:
    weights = Weights({"a": torch.randn(100)})
    messages, parts = pack({f"c{k}": Payload({"weights": weights, "n": k}) for k in range(30)})
    assert len(parts) == 1
    assert len(messages) == 30
    found = [unpack(messages[f"c{k}"], parts, LIMITS) for k in range(30)]
    assert [payload.scalars["n"] for payload in found] == list(range(30))
    assert all(torch.equal(payload.artefacts["weights"]["a"], weights["a"]) for payload in found)


def test_artefacts_made_for_each_client_of_the_same_tensors_are_one_part() -> None:
    """As FedAvg's ``each(server.weights_for)`` makes them: a new artefact a client, tensors by reference."""
    weights = {"image": torch.randn(50), "text": torch.randn(50)}
    kinds = [("image",), ("image", "text"), ("text",)]
    payloads = {
        f"c{k}": Payload({"weights": Weights({name: weights[name] for name in kinds[k % 3]})}) for k in range(9)
    }
    messages, parts = pack(payloads)
    assert len(parts) == 3
    for k, (name, payload) in enumerate(payloads.items()):
        require_equal(unpack(messages[name], parts, LIMITS), payload)
        assert tuple(unpack(messages[name], parts, LIMITS).artefacts["weights"]) == kinds[k % 3]


def test_equal_tensors_under_other_names_kinds_or_attributes_are_parts_of_their_own() -> None:
    tensor = torch.randn(4, 2)
    fields: dict[str, Artefact] = {
        "a": Weights({"x": tensor}),
        "b": Weights({"y": tensor}),
        "c": Artefact({"x": tensor}),
        "d": Representations({"x": tensor}, order="one"),
        "e": Representations({"x": tensor}, order="two"),
        "f": Weights({"x": tensor.clone()}),
    }
    payload = Payload(fields)
    messages, parts = pack({"it": payload})
    assert len(parts) == len(fields)
    require_equal(unpack(messages["it"], parts, LIMITS), payload)


def test_a_view_of_a_tensor_is_not_taken_for_the_tensor() -> None:
    tensor = torch.arange(4.0)
    payloads = {"a": Payload({"w": Weights({"x": tensor})}), "b": Payload({"w": Weights({"x": tensor.flip(0)})})}
    messages, parts = pack(payloads)
    assert unpack(messages["b"], parts, LIMITS).artefacts["w"]["x"].tolist() == [3, 2, 1, 0]


def test_the_ledger_counts_what_every_client_gets() -> None:
    weights = Weights({"a": torch.randn(100)})
    ledger = Ledger()
    for name in ("x", "y"):
        ledger.enter(1, name, "down", "fit", Payload({"weights": weights}))
    assert [line["bytes"] for line in ledger.records if line["artefact"] == "weights"] == [400, 400]


# ---- no copies


def test_packing_and_unpacking_copy_nothing() -> None:
    tensor = torch.randn(64, 32)
    messages, parts = pack({"it": Payload({"w": Weights({"a": tensor, "b": tensor[8:]})})})
    back = unpack(messages["it"], parts, LIMITS).artefacts["w"]
    assert back["a"].data_ptr() == tensor.data_ptr()
    assert back["b"].data_ptr() == tensor[8:].data_ptr()


def test_what_arrives_is_a_view_of_the_bytes_that_arrived() -> None:
    part = pack_part(Weights({"a": torch.zeros(3)}))
    place = torch.zeros(12, dtype=torch.uint8)  # on a boundary of 64
    received = unpack_part(Part(part.header, [place.numpy().data]))["a"]
    place[:4] = torch.tensor([5.0]).view(torch.uint8)
    assert received.tolist() == [5.0, 0.0, 0.0]


@pytest.mark.parametrize("offset", [1, 4, 16, 32])
def test_what_arrives_off_a_boundary_is_moved_to_one(offset: int) -> None:
    artefact = Weights({"a": torch.randn(3)})
    part = pack_part(artefact)
    place = torch.zeros(offset + 12, dtype=torch.uint8)
    place[offset:] = bits(artefact["a"])
    received = unpack_part(Part(part.header, [place.numpy().data[offset:]]))["a"]
    assert torch.equal(received, artefact["a"])
    assert received.data_ptr() % 64 == 0


# ---- damage


def damaged(payload: Payload, damage: Callable[[dict[str, Any]], None], limits: Limits = LIMITS) -> Payload:
    """What comes of a message whose text was changed."""
    messages, parts = pack({"it": payload})
    content = json.loads(messages["it"])
    damage(content)
    return unpack(json.dumps(content), parts, limits)


def damaged_part(artefact: Artefact, damage: Callable[[dict[str, Any]], None], *buffers: bytes) -> Artefact:
    """What comes of a part whose header was changed, and its bytes if there are any."""
    part = pack_part(artefact)
    header = json.loads(part.header)
    damage(header)
    return unpack_part(Part(json.dumps(header), [memoryview(raw) for raw in buffers] or part.buffers))


def test_checksums_find_every_flipped_bit() -> None:
    artefact = Weights({"a": torch.randn(3), "b": torch.tensor([1, 2], dtype=torch.int16)})
    part = pack_part(artefact, checksums=True)
    assert list(unpack_part(part)) == ["a", "b"]
    for which, buffer in enumerate(part.buffers):
        for position in range(len(buffer)):
            for bit in range(8):
                raw = [bytearray(other) for other in part.buffers]
                raw[which][position] ^= 1 << bit
                with pytest.raises(PayloadError, match="checksum"):
                    unpack_part(Part(part.header, [memoryview(bytes(other)) for other in raw]))


def test_without_checksums_nothing_is_checked_or_paid() -> None:
    part = pack_part(Weights({"a": torch.zeros(2)}))
    raw = bytearray(part.buffers[0])
    raw[3] ^= 0x40
    assert unpack_part(Part(part.header, [memoryview(bytes(raw))]))["a"].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("cut", [1, 3, 4, 12])
def test_bytes_that_were_cut_off_are_missed(cut: int) -> None:
    part = pack_part(Weights({"a": torch.zeros(3)}))
    with pytest.raises(PayloadError, match=rf"tensor 'a' \[3\] has {12 - cut} bytes, expected 12"):
        unpack_part(Part(part.header, [memoryview(bytes(part.buffers[0])[:-cut])]))


def test_bytes_too_many_are_noticed() -> None:
    part = pack_part(Weights({"a": torch.zeros(3)}))
    with pytest.raises(PayloadError, match="has 13 bytes, expected 12"):
        unpack_part(Part(part.header, [memoryview(bytes(part.buffers[0]) + b"\0")]))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_buffers_are_counted(count: int) -> None:
    part = pack_part(Weights({"a": torch.zeros(3), "b": torch.zeros(3)}))
    with pytest.raises(PayloadError, match=f"{count} tensors where 2 are announced"):
        unpack_part(Part(part.header, [part.buffers[0]] * count))


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", "\xff" * 40, '"text"'])
def test_text_that_is_no_message(text: str) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        unpack(text, [], LIMITS)
    with pytest.raises(PayloadError, match="damaged message"):
        unpack_part(Part(text, []))


def test_text_that_is_nested_without_end() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(PayloadError, match="damaged message"):
            unpack(text, [], LIMITS)


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
    ],
)
def test_a_message_that_contradicts_itself_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged(sample(), damage)


def test_names_that_are_no_names_are_refused() -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged(sample(), lambda content: content["fields"].append(3))


def test_a_name_cannot_stand_for_a_number_and_for_tensors() -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged(sample(), lambda content: content["scalars"].update(weights=1))


def test_parts_are_not_counted_from_the_end() -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged(sample(), lambda content: content["parts"].update(weights=-1))


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
        lambda header: header.update(attributes={"order": "abc"}),
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
        lambda header: header.update(tensors=5),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(Weights({"a": torch.zeros(2)}), damage)


@pytest.mark.parametrize(
    "shape", [[1 << 32, 1 << 32], [0, 10**30], [0, 1 << 62, 4], [float("inf")], [0, 1 << 62, 1 << 62]]
)
def test_shapes_beyond_any_memory_are_refused(shape: list[int]) -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(Weights({"a": torch.zeros(0)}), lambda header: header.update(tensors=[["a", "float32", shape]]))


def test_a_shape_has_whole_numbers() -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(Weights({"a": torch.zeros(1)}), lambda header: header.update(tensors=[["a", "float32", [1.7]]]))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(
            Weights({"a": torch.zeros(1), "b": torch.zeros(1)}),
            lambda header: header.update(tensors=[["a", "float32", [1]]] * 2),
        )


@pytest.mark.parametrize("order", [[1], {"a": 1}, None, 3])
def test_attributes_are_of_the_declared_type(order: Any) -> None:
    """One that is a list could not even be entered in the ledger."""
    with pytest.raises(PayloadError, match="damaged message"):
        damaged_part(Representations({"a": torch.zeros(1, 1)}), lambda header: header["attributes"].update(order=order))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_other_text_is_refused_or_read_but_never_breaks_the_receiver(data: st.DataObject) -> None:
    """One place of a valid message or header replaced by any JSON: PayloadError, or a payload that can be entered."""
    messages, parts = pack({"it": Payload({"w": Representations({"a": torch.zeros(2, 1)}, order="o"), "n": 1})})
    value = data.draw(JSON)
    content, header = json.loads(messages["it"]), json.loads(parts[0].header)
    target = data.draw(st.sampled_from([content, content["parts"], content["scalars"], header, header["attributes"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = value
    try:
        found = unpack(json.dumps(content), [Part(json.dumps(header), parts[0].buffers)], LIMITS)
    except PayloadError:
        return
    Ledger().enter(1, "c", "up", "fit", found)
    found.require_sound(LIMITS)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), SCALARS), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2)
)


# ---- limits


def test_messages_are_bounded_before_they_are_read() -> None:
    payload = Payload({"w": Weights({"a": torch.zeros(10), "b": torch.zeros(10)}), "v": Weights({"c": torch.ones(5)})})
    assert damaged(payload, lambda content: None, Limits(message_bytes=100, tensors=3)).artefacts["v"]["c"].sum() == 5
    with pytest.raises(PayloadError, match=r"message of 100 bytes, the limit is 99 \(limits.message_bytes\)"):
        damaged(payload, lambda content: None, Limits(message_bytes=99))
    with pytest.raises(PayloadError, match=r"message of 3 tensors, the limit is 2 \(limits.tensors\)"):
        damaged(payload, lambda content: None, Limits(tensors=2))


def test_scalars_that_are_sent_are_those_of_the_type() -> None:
    value: Scalar = 0.1 + 0.2
    assert crossed(Payload({"x": value})).scalars["x"] == value  # not a digit is lost
