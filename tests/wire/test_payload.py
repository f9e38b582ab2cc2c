"""Payloads: what they refuse and weigh; the type in which they cross, alone, in exchanges and in runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossings import LIMITS, bits, crossed, drawn, model, of, received, sample, weights
from hypothesis import given
from hypothesis import strategies as st

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.settings import parse_settings
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort
from polyfed.federation.filters import Reply
from polyfed.reporting.run_tables import traffic_table
from polyfed.runs.records import RunRecords
from polyfed.wire.framing import pack, tensor_bytes, wire_size
from polyfed.wire.ledger import Channel, Ledger
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Logits, Payload, Representations, TensorBundle, Weights
from polyfed.wire.schema import client_step
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
    for back in (Transport().encode(payload), Transport().decode(payload)):
        assert list(back.fields) == list(payload.fields)
        assert all(back.fields[name] is value for name, value in payload.fields.items())


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


# ---- the transport


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


# ---- the transport in exchanges and in runs


# ---- the exchange


@client_step(weights=Weights)
def fit(algorithm: object, client: object, weights: Weights) -> Reply:
    """A step that the engine below performs."""
    raise NotImplementedError


class Adding:
    """Clients that add a little to one entry of what they receive."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for number, request in enumerate(requests):
            request = replace(request, payload=crossed(request.payload))
            new = {name: value.clone() for name, value in of(self.transport.decode(request.payload)).items()}
            new["linear"][number, 0] += 0.5
            yield Answer(request.client, crossed(self.transport.encode(Payload({"weights": Weights(new)}))))


def cohort_of(engine: Adding, **options: Any) -> Cohort:
    clients = tuple(ClientInfo(name, "g", ("image",), "classification", 10, 5, "arch") for name in "abc")
    return Cohort(clients, 1, Channel(engine.exchange, engine.transport, Ledger()), **options)


def test_the_ledger_has_both_sizes() -> None:
    cohort = cohort_of(Adding(Transport(weights="float16")))
    list(cohort.ask(fit, weights=Weights(model())))
    lines = [line for line in cohort.channel.ledger.records if line["client"] == "a"]
    whole = sum(value.nbytes for value in model().values())
    data = {(line["direction"], line["kind"]): (line["bytes"], line["full"], line["dtype"]) for line in lines}
    halved = 2 * (300 + 1200 + 40) + 8
    assert data["down", "weights"] == data["up", "weights"] == (halved, whole, "float16+int64")
    content = Payload({"weights": Weights(model())})
    for way in ("down", "up"):
        result = [line for line in lines if line["direction"] == way]
        assert sum(line["full"] for line in result) == wire_size(content)
    plain = Ledger()
    plain.enter(1, "a", "down", "fit", content)
    assert all(line["full"] == line["bytes"] for line in plain.records)


# ---- runs


def digest(folder: Path, *files: str) -> dict[str, str]:
    names = files or ("metrics.jsonl", "ledger.jsonl", "models/last/model.safetensors")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def finished(tiny: dict[str, Any], folder: Path, **settings: Any) -> RunRecords:
    """A run of FedAvg."""
    return run(Experiment.parse(tiny | {"run": tiny["run"] | settings}), folder).records


@pytest.fixture(scope="module")
def runs() -> dict[str, RunRecords]:
    """Runs that several tests look at, by name."""
    return {}


@pytest.fixture
def whole(tiny: dict[str, Any], runs: dict[str, RunRecords], tmp_path: Path) -> RunRecords:
    """All as it is."""
    return runs.setdefault("whole", runs.get("whole") or finished(tiny, tmp_path / "whole"))


@pytest.fixture
def short(tiny: dict[str, Any], runs: dict[str, RunRecords], tmp_path: Path) -> RunRecords:
    """With all options."""
    return runs.setdefault(
        "short", runs.get("short") or finished(tiny, tmp_path / "short", exchange={"transport": ALL})
    )


ALL = {"dtype": "float16", "weights": "bfloat16"}


def engines() -> list[Any]:
    yield_slow = [{"name": "ray", "workers": 2}, {"name": "flower", "nodes": 2}]
    return [{"name": "local", "serialize": True}, *[pytest.param(one, marks=pytest.mark.slow) for one in yield_slow]]


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: str(engine["name"]))
def test_all_options_give_the_same_bits_on_every_engine(
    tiny: dict[str, Any], tmp_path: Path, short: RunRecords, engine: dict[str, Any]
) -> None:
    if engine["name"] != "local":
        pytest.importorskip("ray", reason="ray is not installed")
        pytest.importorskip("flwr", reason="flwr is not installed")
    other = finished(tiny, tmp_path / "other", exchange={"transport": ALL}, engine=engine)
    assert digest(short.folder) == digest(other.folder)
    assert not short.excluded()


def test_the_report_shows_the_saved_bytes(whole: RunRecords, short: RunRecords) -> None:
    assert list(traffic_table(whole).notes) == ["Replies: 0 clipped, 0 excluded."]
    mib = [f"{size / 2**20:,.2f}" for size in (short.total_bytes(), whole.total_bytes())]
    assert f"{mib[0]} MiB instead of {mib[1]} MiB (fp32, uncompressed)." in traffic_table(short).notes
    assert short.total_bytes() < 0.65 * whole.total_bytes()  # framing stays
    assert (short.folder / "report.md").read_text().count(" MiB instead of ") == 1
