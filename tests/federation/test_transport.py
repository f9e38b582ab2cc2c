"""The transport: what crosses in which form, what comes of it, what is refused, and that both sides agree."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from polyfed import Experiment, run
from polyfed.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Answer, Cohort, Patience, Reply, Request
from polyfed.federation.ledger import Ledger
from polyfed.federation.limits import Limits
from polyfed.federation.parts import Part
from polyfed.federation.payload import Artefact, Coded, Payload, Prototypes, Representations, Scores, Weights
from polyfed.federation.quantisation import dequantise, quantise
from polyfed.federation.schema import client_step
from polyfed.federation.transport import Transport
from polyfed.federation.wire import pack, tensor_bytes, unpack, wire_size
from polyfed.reporting.records import RunRecords
from polyfed.reporting.report import traffic_table

LIMITS = Limits()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(seed: int = 0) -> dict[str, Tensor]:
    """Weights of all sorts."""
    return {
        "conv": drawn(4, 3, 5, 5, seed=seed),
        "linear": drawn(40, 30, seed=seed + 1),
        "bias": drawn(40, seed=seed + 2),
        "steps": torch.tensor(7 + seed),
        "empty": torch.zeros(0, 3),
    }


def trained(before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The linear layer and the bias have moved, all else is as before."""
    moved = {"linear": before["linear"] + 0.01 * drawn(40, 30, seed=9), "bias": before["bias"] + 1}
    return {name: moved.get(name, value.clone()) for name, value in before.items()}


def crossed(payload: Payload) -> Payload:
    """The payload after its bytes went through another process."""
    messages, parts = pack({"it": payload}, checksums=True)
    copied = [Part(part.header, [memoryview(bytes(buffer)) for buffer in part.buffers]) for part in parts]
    return unpack(messages["it"], copied, LIMITS)


def received(transport: Transport, payload: Payload, request: Payload | None = None) -> Payload:
    """What comes of a payload on the other side."""
    return transport.widen(crossed(transport.narrow(payload, request)), request)


def of(payload: Payload, name: str = "weights") -> Artefact:
    return payload.artefacts[name]


def weights(tensors: dict[str, Tensor]) -> Payload:
    return Payload({"weights": Weights(tensors), "n": 3})


# ---- types


def test_representations_shrink_almost_four_times_framing_included() -> None:
    payload = Payload({"representations": Representations({"image": drawn(10_000, 256)}, order="o"), "n": 3})
    wire = Transport(dtype="int8").narrow(payload)
    assert tensor_bytes(of(wire, "representations")) == 10_000 * (256 + 4)
    assert wire_size(payload) / wire_size(wire) > 3.9
    codes, scales = quantise(of(payload, "representations")["image"])
    back = received(Transport(dtype="int8"), payload)
    assert type(back.fields["representations"]) is Representations
    assert of(back, "representations").attributes() == {"order": "o"}
    assert torch.equal(of(back, "representations")["image"], dequantise(codes, scales))
    assert back.scalars == {"n": 3}


@pytest.mark.parametrize("kind", [Artefact, Weights, Representations, Scores, Prototypes])
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
    kind: type[Artefact], chosen: dict[str, str], of_weights: float, of_rows: float, of_others: float
) -> None:
    item = kind({"a": drawn(10, 50)})
    expected = {Artefact: of_others, Weights: of_weights}.get(kind, of_rows)
    transport = Transport.model_validate(chosen)
    scales = 40 if expected == 1 else 0
    assert tensor_bytes(of(transport.narrow(Payload({"x": item})), "x")) == 500 * expected + scales
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
    assert Transport(dtype="int8").narrow(payload).fields["weights"] is payload.fields["weights"]


def test_what_requests_share_is_quantised_once() -> None:
    shared = model()
    narrow = Transport(dtype="int8").narrower()
    first, second = (narrow(weights(dict(shared))) for _ in range(2))
    assert all(value is of(second)[name] for name, value in of(first).items())


def test_an_artefact_under_two_names_stays_one() -> None:
    both = Representations({"image": drawn(5, 8)}, order="o")
    wire = Transport(dtype="int8").narrow(Payload({"a": both, "b": both}))
    assert wire.fields["a"] is wire.fields["b"]
    back = Transport(dtype="int8").widen(wire)
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


def test_the_error_is_what_was_left_out() -> None:
    before = model()
    after = trained(before)
    back = of(received(Transport(topk=0.25), weights(after), weights(before)))
    rest = (after["linear"] - before["linear"]).flatten().abs().sort().values[:900]
    assert float((back["linear"] - after["linear"]).norm()) == pytest.approx(float(rest.norm()), rel=1e-4)


def test_vectors_and_numbers_cross_whole_beside_the_largest_entries() -> None:
    before = model()
    after = trained(before) | {"steps": torch.tensor(99)}
    back = of(received(Transport(topk=0.01), weights(after), weights(before)))
    assert torch.equal(back["bias"], after["bias"])
    assert int(back["steps"]) == 99


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.5), ("float16", 1 / 3), ("int8", 0.2)])
def test_where_places_would_cost_more_than_they_save_all_entries_cross(dtype: str, least: float) -> None:
    before, after = weights({"w": drawn(40, 30)}), weights({"w": drawn(40, 30, seed=1)})
    dense = Transport.model_validate({"dtype": dtype}).narrow(after)
    size = tensor_bytes(of(dense))
    for share in (least - 0.01, least + 0.01, 1.0):
        wire = Transport.model_validate({"dtype": dtype, "topk": share}).narrow(after, before)
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
    assert Transport(topk=0.05).narrow(reply, request).fields == reply.fields


def test_requests_are_sent_whole() -> None:
    payload = weights(model())
    assert Transport(topk=0.1, unchanged="omit").narrower()(payload).fields == payload.fields


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
    wire = transport.narrow(weights(after), weights(before))
    assert tensor_bytes(of(wire)) == 4 * (40 * 30 + 40)
    back = of(received(transport, weights(after), weights(before)))
    assert list(back) == list(after)
    for name, value in after.items():
        assert torch.equal(bits(back[name]), bits(value))


def test_zero_and_minus_zero_are_not_the_same() -> None:
    request, reply = weights({"w": torch.zeros(3)}), weights({"w": torch.tensor([0.0, -0.0, 0.0])})
    back = of(received(Transport(unchanged="omit"), reply, request))["w"]
    assert torch.signbit(back).tolist() == [False, True, False]


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


OPTIONS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
        "weights": st.sampled_from([None, "float32", "float16", "int8"]),
        "topk": st.sampled_from([None, 0.01, 0.3, 1.0]),
        "unchanged": st.sampled_from(["send", "omit"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(options=OPTIONS, rows=st.integers(0, 6), width=st.integers(0, 6), seed=st.integers(0, 100))
def test_by_reference_and_by_bytes_are_the_same_bits(options: dict[str, Any], rows: int, width: int, seed: int) -> None:
    transport = Transport.model_validate(options)
    old = {"a": drawn(rows, width, seed=seed), "b": drawn(3, seed=seed), "n": torch.tensor(3), "f": drawn(2, 2)}
    new = {"a": drawn(rows, width, seed=seed + 1), "b": drawn(3, seed=seed), "n": torch.tensor(4), "f": drawn(2, 2)}
    request = transport.widen(transport.narrow(weights(old)))
    wire = transport.narrow(weights(new), request)
    here, there = transport.widen(wire, request), transport.widen(crossed(wire), request)
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


# ---- the exchange


@client_step(weights=Weights)
def fit(algorithm: object, client: object, weights: Weights) -> Reply:
    """What clients are asked for; the engine below performs it."""
    raise NotImplementedError


class Adding:
    """Clients that add a little to one entry of what they receive."""

    def __init__(self, transport: Transport, spoil: Callable[[Payload], Payload] = lambda wire: wire) -> None:
        self.transport, self.spoil = transport, spoil

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for number, request in enumerate(requests):
            request = replace(request, payload=crossed(request.payload))
            content = self.transport.widen(request.payload)
            new = {name: value.clone() for name, value in of(content).items()}
            new["linear"][number, 0] += 0.5
            wire = self.transport.narrow(Payload({"weights": Weights(new)}), content)
            yield Answer(request.client, crossed(self.spoil(wire)))


def cohort_of(engine: Adding, **options: Any) -> Cohort:
    clients = tuple(ClientInfo(name, "g", ("image",), "classification", 10, "arch") for name in "abc")
    defaults: dict[str, Any] = {"transport": engine.transport, "ledger": Ledger(), "round": 1}
    return Cohort(clients, engine.exchange, **defaults | options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_server_rebuilds_against_what_clients_received(dtype: str) -> None:
    """Not against what it sent: with a lossy way down these differ."""
    transport = Transport.model_validate({"weights": dtype, "topk": 0.01, "unchanged": "omit"})
    sent = model()
    cohort = cohort_of(Adding(transport))
    theirs = of(transport.widen(transport.narrow(weights(sent))))
    for number, reply in enumerate(cohort.ask(fit, weights=Weights(sent))):
        moved = reply.weights["linear"] - theirs["linear"]
        assert float(moved[number, 0]) == pytest.approx(0.5, abs=1e-3)
        moved[number, 0] = 0
        assert not moved.any()
        assert all(torch.equal(reply.weights[name], theirs[name]) for name in sent if name != "linear")


def test_the_ledger_has_both_sizes() -> None:
    transport = Transport(weights="int8", topk=0.01, unchanged="omit")
    cohort = cohort_of(Adding(transport))
    list(cohort.ask(fit, weights=Weights(model())))
    lines = [line for line in cohort.ledger.records if line["client"] == "a"]
    whole = sum(value.nbytes for value in model().values())
    data = {(line["direction"], line["kind"]): (line["bytes"], line["full"], line["dtype"]) for line in lines}
    quantised = 300 + 1200 + 4 * (4 + 40) + 4 * 40 + 8
    assert data["down", "weights"] == (quantised, whole, "float32+int64+int8")
    assert data["up", "weights"] == (12 * (4 + 1) + 4, whole, "float32+int32+int64+int8")
    content = Payload({"weights": Weights(model())})
    for way in ("down", "up"):
        found = [line for line in lines if line["direction"] == way]
        assert sum(line["full"] for line in found) == wire_size(content)
    plain = Ledger()
    plain.enter(1, "a", "down", "fit", content)
    assert all(line["full"] == line["bytes"] for line in plain.records)


def test_a_damaged_reply_excludes_its_sender_and_has_crossed() -> None:
    def spoil(wire: Payload) -> Payload:
        coded = of(wire)
        assert isinstance(coded, Coded)
        tensors = {name: value + 5000 if name.endswith(":at") else value for name, value in coded.items()}
        return Payload({"weights": replace(coded, tensors=tensors)})

    dropped: list[str] = []
    engine = Adding(Transport(topk=0.01), spoil)
    cohort = cohort_of(
        engine, patience=lambda step: Patience(0), excluded=lambda client, reason, details: dropped.append(reason)
    )
    assert not list(cohort.ask(fit, weights=Weights(model())))
    assert len(dropped) == 3
    assert "places in tensor" in dropped[0]
    entered = [line for line in cohort.ledger.records if (line["direction"], line["kind"]) == ("up", "weights")]
    assert len(entered) == 3
    assert all(line["bytes"] == line["full"] > 0 for line in entered)


# ---- damaged and hostile messages

ZERO = torch.zeros(0)
EIGHT = torch.ones(2, 3, dtype=torch.int8)
AT = torch.tensor([1, 4], dtype=torch.int32)


def read(tensors: dict[str, Tensor], limits: Limits = LIMITS, **attributes: str) -> Payload:
    """What a server with all options makes of a reply; it had sent ``w``, [2, 3], and ``n``, a number."""
    request = weights({"w": torch.zeros(2, 3), "n": torch.tensor(3)})
    transport = Transport(dtype="float16", topk=0.1, unchanged="omit")
    coded = Coded(tensors, **{"of": "weights"} | attributes)
    return transport.widen(Payload({"weights": coded}), request, limits)


def test_what_is_damaged_below_is_read_when_it_is_not() -> None:
    scales = torch.tensor([1.0, 0.0])
    assert of(read({"w:codes": EIGHT, "w:scales": scales}))["w"].tolist() == [[1.0] * 3, [0.0] * 3]
    back = of(read({"w:base": ZERO, "w:at": AT, "w:add": torch.tensor([1.0, 2.0])}))
    assert back["w"].tolist() == [[0, 1, 0], [0, 2, 0]]
    assert int(of(read({"n:base": ZERO}))["n"]) == 3


@pytest.mark.parametrize(
    "tensors",
    [
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, math.nan])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, math.inf])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, -1.0])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0])},
        {"w:codes": EIGHT, "w:scales": torch.tensor(1.0)},
        {"w:codes": EIGHT, "w:scales": torch.tensor([[1.0], [1.0]])},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1.0, 1.0], dtype=torch.float64)},
        {"w:codes": EIGHT, "w:scales": torch.tensor([1, 1])},
        {"w:codes": EIGHT.float(), "w:scales": torch.ones(2)},
        {"w:codes": torch.tensor(1, dtype=torch.int8), "w:scales": torch.tensor(1.0)},
        {"w:codes": EIGHT},
        {"w:scales": torch.ones(2)},
        {"w": EIGHT},
        {"w:": EIGHT},
        {":whole:more": EIGHT},
        {"w:whole": EIGHT, "w:base": ZERO},
        {"w:zero": ZERO},
        {"w:base": ZERO, "w:zero": ZERO, "w:at": AT, "w:add": torch.ones(2)},
        {"other:base": ZERO},
        {"other:zero": ZERO, "other:at": AT, "other:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": AT},
        {"w:at": AT, "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": AT, "w:add": torch.ones(3)},
        {"w:base": ZERO, "w:at": AT, "w:add": torch.ones(2, 1)},
        {"w:base": ZERO, "w:at": AT, "w:add": torch.ones(2, dtype=torch.int64)},
        {"w:base": ZERO, "w:at": AT.long(), "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": AT.view(1, 2), "w:add": torch.ones(1, 2)},
        {"w:base": ZERO, "w:at": torch.tensor([4, 1], dtype=torch.int32), "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": torch.tensor([4, 4], dtype=torch.int32), "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": torch.tensor([-1, 4], dtype=torch.int32), "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": torch.tensor([4, 6], dtype=torch.int32), "w:add": torch.ones(2)},
        {"w:base": ZERO, "w:at": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32), "w:add": torch.ones(2)},
        {"n:base": ZERO, "n:at": torch.tensor([0], dtype=torch.int32), "n:add": torch.ones(1)},
        {"w:base": ZERO, "w:at": AT, "w:codes": torch.ones(1, 3, dtype=torch.int8), "w:scales": torch.ones(1)},
        {"w:base": ZERO, "w:at": AT, "w:codes": torch.ones(1, 2, dtype=torch.int8), "w:scales": -torch.ones(1)},
    ],
)
def test_what_is_damaged_is_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(PayloadError):
        read(tensors)


@pytest.mark.parametrize(
    "attributes",
    [
        {"of": "gradients"},
        {"of": ""},
        {"of": "coded"},
        {"of": "coded", "about": '{"of": "weights", "about": "{}"}'},
        {"about": ""},
        {"about": "[]"},
        {"about": '{"order": "abc"}'},
        {"about": "[" * 100_000},
        {"of": "representations"},
        {"of": "representations", "about": '{"order": 5}'},
        {"of": "representations", "about": '{"order": "o", "tensors": 1}'},
    ],
)
def test_what_stands_for_nothing_known_is_refused(attributes: dict[str, str]) -> None:
    with pytest.raises(PayloadError):
        read({"w:whole": torch.ones(2, 3)}, **attributes)
    Ledger().enter(1, "c", "up", "fit", Payload({"weights": Coded({}, **attributes)}))


def test_nothing_refers_to_a_request_where_that_is_not_agreed() -> None:
    coded = Payload({"weights": Coded({"w:base": ZERO}, of="weights")})
    with pytest.raises(PayloadError, match="'w' refers to one that was not sent"):
        Transport().widen(coded, weights({"w": torch.zeros(2, 3)}))


@pytest.mark.parametrize(
    "tensors",
    [
        {"w:codes": torch.zeros(10, 10, dtype=torch.int8), "w:scales": torch.zeros(10)},
        {"w:whole": torch.zeros(105, dtype=torch.float16)},
        {f"w{k}:whole": torch.zeros(20) for k in range(6)},
    ],
)
def test_what_unpacks_beyond_the_limit_is_refused(tensors: dict[str, Tensor]) -> None:
    read(tensors, Limits(message_bytes=480))
    with pytest.raises(PayloadError, match=r"unpacks to \d+ bytes, the limit is 415 \(limits.message_bytes\)"):
        read(tensors, Limits(message_bytes=415))


def test_a_shape_that_torch_cannot_bear_is_refused() -> None:
    part = pack({"it": weights({"a": torch.zeros(0)})})[1][0]
    header = json.loads(part.header)
    header["tensors"][0][2] = [0, 1 << 39, 1 << 39]
    message = pack({"it": weights({"a": torch.zeros(0)})})[0]["it"]
    with pytest.raises(PayloadError, match="damaged message"):
        unpack(message, [Part(json.dumps(header), part.buffers)], LIMITS)


ROLES = ["whole", "codes", "scales", "base", "zero", "at", "add", "", "more"]
TYPES = [torch.int8, torch.float32, torch.int32, torch.float16, torch.int64, torch.bool]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_other_layout_is_refused_or_read_but_never_breaks_the_receiver(data: st.DataObject) -> None:
    """Roles, types, shapes and bytes at will: PayloadError, or tensors that are no larger than they may be."""
    sets = [("codes", "scales"), ("base", "at", "add"), ("zero", "at", "codes", "scales"), ("whole",), ("base",)]
    roles = data.draw(st.sampled_from(sets) | st.lists(st.sampled_from(ROLES), max_size=4, unique=True))
    name, tensors = data.draw(st.sampled_from(["w", "n", "x"])), {}
    for role in roles:
        natural = {"codes": torch.int8, "at": torch.int32}.get(role, torch.float32)
        dtype = data.draw(st.sampled_from([natural, natural, *TYPES]))
        shape = data.draw(st.sampled_from([[2, 3], [2], [1, 2], [1], [0], [], [0, 3]]))
        stream = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        most = data.draw(st.sampled_from([2, 7, 256]))
        raw = torch.randint(most, shape, generator=stream)
        floats = torch.tensor([0.5, -1.0, math.nan, math.inf, 3e38, 0.0, 1.0])[raw % 7]
        tensors[f"{name}:{role}"] = (floats if dtype.is_floating_point else raw).to(dtype)
    wire = Payload({"weights": Coded(tensors, of=data.draw(st.sampled_from(["weights", "rows", "tensors"])))})
    Ledger().enter(1, "c", "up", "fit", wire)
    try:
        found = read(tensors)
        found.require_sound(LIMITS)
    except PayloadError:
        return
    assert sum(value.nbytes for value in of(found).values()) <= 24 + 4 * sum(v.numel() for v in tensors.values()) * 2


# ---- runs


def digest(folder: Path, *files: str) -> dict[str, str]:
    names = files or ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def finished(tiny: dict[str, Any], folder: Path, **settings: Any) -> RunRecords:
    """A run of FedAvg in which the text encoder's embedding is frozen."""
    text = {"name": "bag", "width": 8, "freeze_embedding": True, "view": {"name": "tokens", "length": 16}}
    for party in (tiny["server"], tiny["clients"]["paired"]):
        party["model"] = party["model"] | {"encoders": party["model"]["encoders"] | {"text": text}}
    return run(Experiment.parse(tiny | {"run": tiny["run"] | settings}), folder).records


ALL = {"dtype": "float16", "weights": "int8", "topk": 0.05, "unchanged": "omit"}


def engines() -> list[Any]:
    yield_slow = [{"name": "ray", "workers": 2}, {"name": "flower", "nodes": 2}]
    return [{"name": "local", "serialize": True}, *[pytest.param(one, marks=pytest.mark.slow) for one in yield_slow]]


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: str(engine["name"]))
def test_all_options_give_the_same_bits_on_every_engine(
    tiny: dict[str, Any], tmp_path: Path, engine: dict[str, Any]
) -> None:
    if engine["name"] != "local":
        pytest.importorskip("ray", reason="ray is not installed")
        pytest.importorskip("flwr", reason="flwr is not installed")
    plain = finished(tiny, tmp_path / "plain", transport=ALL)
    other = finished(tiny, tmp_path / "other", transport=ALL, engine=engine)
    assert digest(plain.folder) == digest(other.folder)
    assert not plain.excluded()


def test_leaving_out_what_did_not_change_changes_no_bit(tiny: dict[str, Any], tmp_path: Path) -> None:
    whole = finished(tiny, tmp_path / "whole")
    short = finished(tiny, tmp_path / "short", transport={"unchanged": "omit"})
    assert digest(whole.folder, "metrics.jsonl", "models/last/model.safetensors") == digest(
        short.folder, "metrics.jsonl", "models/last/model.safetensors"
    )
    assert short.total_bytes("down") == whole.total_bytes("down")
    assert short.total_bytes("up") < whole.total_bytes("up")
    assert short.full_bytes() == whole.full_bytes() == whole.total_bytes()


def test_the_report_says_what_was_saved(tiny: dict[str, Any], tmp_path: Path) -> None:
    whole = finished(tiny, tmp_path / "whole")
    short = finished(tiny, tmp_path / "short", transport=ALL)
    assert traffic_table(whole).notes == ()
    mib = [f"{size / 2**20:,.2f}" for size in (short.total_bytes(), whole.total_bytes())]
    assert traffic_table(short).notes == (f"{mib[0]} MiB instead of {mib[1]} MiB (fp32, everything whole).",)
    assert short.total_bytes() < 0.6 * whole.total_bytes()
    assert (short.folder / "report.md").read_text().count(" MiB instead of ") == 1
