"""Streams of updates into global models: exact, against a naive loop, and one after the other as released."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyfed.aggregation.averaging import Averages, Averaging, GlobalModel
from polyfed.aggregation.averagings.tensors import BySlot, ByType
from polyfed.aggregation.mean import WeightedMean
from polyfed.models.slots import Slot, TensorPlace

ROLES = ("attention", "mlp")


def global_model(*modalities: str) -> GlobalModel:
    places = {f"{m}.{role}": TensorPlace(Slot(m, role), role) for m in modalities for role in ROLES}
    places["count"] = TensorPlace(Slot("+".join(modalities), "head"), "count")
    return GlobalModel({name: torch.zeros(() if name == "count" else (3,)) for name in places}, places, modalities)


MODELS = {"image": global_model("image"), "text": global_model("text"), "paired": global_model("image", "text")}
Model = dict[str, Tensor]


def model(kind: str, stream: torch.Generator) -> Model:
    names = MODELS[kind].places
    return {
        name: torch.randint(0, 9, (), generator=stream) if name == "count" else torch.randn(3, generator=stream)
        for name in names
    }


def federation(seed: int = 0) -> tuple[dict[str, Model], list[tuple[str, Model, int]]]:
    stream = torch.Generator().manual_seed(seed)
    start = {kind: model(kind, stream) for kind in MODELS}
    kinds = ["image", "image", "text", "paired", "paired", "paired"]
    return start, [(kind, model(kind, stream), 10 * k + 5) for k, kind in enumerate(kinds)]


def models_of(start: dict[str, Model]) -> dict[str, GlobalModel]:
    return {kind: replace(MODELS[kind], weights=weights) for kind, weights in start.items()}


def exact(averaging: Averaging, start: dict[str, Model], clients: Iterable[tuple[str, Model, int]]) -> Averages:
    """As FedAvg averages."""
    means = {kind: WeightedMean() for kind in start}
    for kind, weights, n in clients:
        means[kind].add(weights, n)
    return averaging.of_means(models_of(start), means)


def naive(start: dict[str, Model], clients: list[tuple[str, Model, int]], averaging: ByType) -> dict[str, Model]:
    """W + sum over clients of coefficient x n_k / n_type x (W_k - W), in float64, client by client."""
    sizes = {kind: float(sum(n for other, _, n in clients if other == kind)) for kind in start}
    rule = averaging.rule(MODELS, sizes)
    found = {kind: {name: value.double() for name, value in weights.items()} for kind, weights in start.items()}
    for kind, held in MODELS.items():
        for name, place in held.places.items():
            for share in rule[kind, place.slot]:
                source = MODELS[share.source].keys[share.slot][place.key]
                for other, weights, n in clients:
                    if other == share.source:
                        part = share.coefficient * n / sizes[other]
                        found[kind][name] += part * (weights[source].double() - start[other][source].double())
    return found


def own_count(clients: list[tuple[str, Model, int]], kind: str) -> Tensor:
    """Counters are the rounded mean of the type's own."""
    own = [(weights["count"].double(), n) for other, weights, n in clients if other == kind]
    return (sum(value * n for value, n in own) / sum(n for _, n in own)).round()


@pytest.mark.parametrize(
    "averaging",
    [
        ByType(),
        BySlot(layers="attention"),
        BySlot(layers="attention", compensation=True),
        BySlot(layers="blocks", factor=100.0),
        BySlot(layers="blocks", range="all"),
        BySlot(layers="attention", denominator="model"),
    ],
)
def test_exact_equals_the_naive_sum_in_any_order(averaging: ByType) -> None:
    start, clients = federation()
    before = {kind: {name: value.clone() for name, value in weights.items()} for kind, weights in start.items()}
    expected = naive(start, clients, averaging)
    for order in (clients, clients[::-1]):
        found = exact(averaging, start, order)
        for kind, weights in expected.items():
            for name, value in weights.items():
                wanted = own_count(clients, kind) if name == "count" else value
                assert found[kind][name].dtype == start[kind][name].dtype
                assert torch.allclose(found[kind][name].double(), wanted, atol=1e-6), (kind, name)
    assert all(torch.equal(start[kind][name], before[kind][name]) for kind in start for name in start[kind])


def test_absent_types_stay_or_follow_the_others() -> None:
    start, clients = federation()
    paired = (client for client in clients if client[0] == "paired")
    found = exact(BySlot(layers="attention", compensation=True), start, paired)
    assert torch.equal(found["image"]["image.mlp"], start["image"]["image.mlp"])
    update = found["paired"]["image.attention"] - start["paired"]["image.attention"]
    assert torch.allclose(found["image"]["image.attention"] - start["image"]["image.attention"], update, atol=1e-6)


def test_nobody_at_all_leaves_everything() -> None:
    start, _ = federation()
    found = exact(BySlot(layers="attention", compensation=True), start, ())
    assert all(torch.equal(found[kind][name], start[kind][name]) for kind in start for name in start[kind])


def test_sequential_interpolation_keeps_a_share_of_the_old_model() -> None:
    """Three equal clients count 0.148, 0.222 and 0.333, and 0.296 of the old model survives (methods, 0.5)."""
    start = {"image": {"image.attention": torch.ones(1, dtype=torch.float64), **ones(torch.float64)}}
    shares = []
    for k in range(-1, 3):
        clients = [("image", _only(start, 1.0 if client == k else 0.0)["image"], 10) for client in range(3)]
        old = _only(start, 1.0 if k < 0 else 0.0)
        found = ByType(mean="sequential").of_updates(models_of(old), clients, {"image": 30.0})
        shares.append(float(found["image"]["image.attention"]))
    assert shares == pytest.approx([0.296, 0.148, 0.222, 0.333], abs=5e-4)
    assert sum(shares) == pytest.approx(1.0)


def ones(dtype: torch.dtype) -> Model:
    return {"image.mlp": torch.ones(1, dtype=dtype), "count": torch.ones((), dtype=torch.int64)}


def _only(like: dict[str, Model], value: float) -> dict[str, Model]:
    return {
        kind: {name: torch.full_like(tensor, value) for name, tensor in weights.items()}
        for kind, weights in like.items()
    }


def test_sequential_equals_a_naive_loop_and_depends_on_the_order() -> None:
    start, clients = federation()
    averaging = BySlot(layers="attention", compensation=True, mean="sequential")
    sizes = {kind: float(sum(n for other, _, n in clients if other == kind)) for kind in start}
    rule = averaging.rule(MODELS, sizes)

    def loop(order: list[tuple[str, Model, int]]) -> dict[str, Model]:
        running = {kind: {name: value.double() for name, value in model.items()} for kind, model in start.items()}
        for kind, weights, n in order:
            for target, held in MODELS.items():
                for name, place in held.places.items():
                    for share in (share for share in rule[target, place.slot] if share.source == kind):
                        towards = weights[MODELS[kind].keys[share.slot][place.key]].double()
                        running[target][name] += share.coefficient * n / sizes[kind] * (towards - running[target][name])
        return running

    def streamed(order: list[tuple[str, Model, int]]) -> dict[str, Model]:
        return averaging.of_updates(models_of(start), order, sizes)

    found, expected = streamed(clients), loop(clients)
    for kind, weights in found.items():
        for name in (name for name in weights if name != "count"):
            assert torch.allclose(weights[name].double(), expected[kind][name], atol=1e-6)
    assert not torch.allclose(found["paired"]["image.mlp"], streamed(clients[::-1])["paired"]["image.mlp"])
