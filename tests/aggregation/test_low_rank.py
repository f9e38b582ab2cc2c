"""Averages of low-rank adapters against full changes W B A, by hand and for unequal ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from naive import averaged, global_models
from polyfed.aggregation.averaging import GlobalModel
from polyfed.aggregation.averagings import low_rank
from polyfed.core.errors import ConfigError

LAYERS = {"encoders.image.q": (6, 5), "encoders.text.v": (4, 7)}
COUNTS = (3.0, 1.0, 4.0)
RULES = (low_rank.Separate(), low_rank.Residual(), low_rank.Stacked(), low_rank.SingularValues(), low_rank.Padded())


def model(rank: int, seed: int, layers: tuple[str, ...] = tuple(LAYERS)) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {"encoders.image.project.weight": torch.randn(2, 6, generator=draw)}
    for layer in layers:
        out, inner = LAYERS[layer]
        tensors[f"{layer}.lora_A.default.weight"] = torch.randn(rank, inner, generator=draw)
        tensors[f"{layer}.lora_B.default.weight"] = torch.randn(out, rank, generator=draw)
    return tensors


def with_offsets(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, **{f"{layer}.base_layer.offset": torch.zeros(size) for layer, size in LAYERS.items()}}


def factors(tensors: Mapping[str, Tensor], layer: str) -> low_rank.Factors:
    return low_rank.Factors(tensors[f"{layer}.lora_A.default.weight"], tensors[f"{layer}.lora_B.default.weight"])


def mean_of(
    rule: low_rank.LowRankAveraging, old: Mapping[str, Mapping[str, Tensor]], sent: list[tuple[str, dict[str, Tensor]]]
):
    updates = [(type_name, tensors, count) for (type_name, tensors), count in zip(sent, COUNTS, strict=False)]
    return averaged(rule, global_models(old), updates)


def mean_change(sent: list[tuple[str, dict[str, Tensor]]], layer: str) -> Tensor:
    """The average of the full changes, term by term."""
    pairs = [
        (factors(tensors, layer), count)
        for (_, tensors), count in zip(sent, COUNTS, strict=False)
        if f"{layer}.lora_A.default.weight" in tensors
    ]
    total = sum(count for _, count in pairs)
    change = torch.zeros(LAYERS[layer])
    for own, count in pairs:
        for place in range(own.rank):
            change += count / total * torch.outer(own.b[:, place], own.a[place])
    return change


@pytest.mark.parametrize("rule", [low_rank.Residual(), low_rank.Stacked()])
@pytest.mark.parametrize("layer", LAYERS)
def test_exact_rules_equal_the_average_of_full_changes(rule: low_rank.LowRankAveraging, layer: str) -> None:
    old = {"both": with_offsets(model(3, 0))}
    sent = [("both", model(3, seed)) for seed in (1, 2, 3)]
    for round_number in (1, 2):  # offsets add up
        before = old["both"][f"{layer}.base_layer.offset"]
        old = mean_of(rule, old, sent)
        new = old["both"]
        full = new[f"{layer}.base_layer.offset"] + factors(new, layer).change
        torch.testing.assert_close(full, before + mean_change(sent, layer), atol=1e-6, rtol=1e-6)
        if round_number == 1 and isinstance(rule, low_rank.Stacked):
            assert not factors(new, layer).b.any()


def test_padded_factors_weigh_by_the_size_of_their_change() -> None:
    old = {"large": model(3, 0), "small": model(1, 9)}
    sent = [("large", model(3, 1)), ("small", model(1, 2))]
    new, layer = mean_of(low_rank.Padded(), old, sent), "encoders.text.v"
    big, little = (factors(tensors, layer) for _, tensors in sent)
    sizes = [count * float(own.change.norm()) for count, own in zip(COUNTS, (big, little), strict=False)]
    expected = (sizes[0] * big.a + sizes[1] * torch.cat([little.a, torch.zeros(2, 7)])) / sum(sizes)
    torch.testing.assert_close(factors(new["large"], layer).a, expected)
    torch.testing.assert_close(factors(new["small"], layer).a, expected[:1])


def test_clients_of_one_modality_average_what_they_have() -> None:
    old = {"both": model(2, 0), "image": model(2, 5, ("encoders.image.q",))}
    sent = [("both", model(2, 1)), ("image", model(2, 2, ("encoders.image.q",)))]
    new = mean_of(low_rank.SingularValues(), old, sent)
    torch.testing.assert_close(
        factors(new["image"], "encoders.image.q").change, factors(new["both"], "encoders.image.q").change
    )
    text = factors(sent[0][1], "encoders.text.v").change
    torch.testing.assert_close(factors(new["both"], "encoders.text.v").change, text, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_no_client_replied_or_counts(rule: low_rank.LowRankAveraging) -> None:
    old = {"both": with_offsets(model(2, 0))}
    for updates in ([], [("both", model(2, 1), 0.0)]):
        new = averaged(rule, global_models(old), updates)
        assert all(torch.equal(new["both"][name], value) for name, value in old["both"].items())


@pytest.mark.parametrize("rule", RULES)
def test_clients_that_exchange_factors_alone_have_those_averaged(rule: low_rank.LowRankAveraging) -> None:
    """Models with ``projection: own``, which train no layer behind the network."""

    def bare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if "project" not in name}

    old, sent = with_offsets(model(2, 0)), [model(2, seed) for seed in (1, 2)]
    new = mean_of(rule, {"both": bare(old)}, [("both", bare(tensors)) for tensors in sent])["both"]
    expected = mean_of(rule, {"both": old}, [("both", tensors) for tensors in sent])["both"]
    assert new.keys() == bare(expected).keys()
    assert all(torch.equal(value, expected[name]) for name, value in new.items())


def test_a_factor_that_is_not_sent_is_as_it_was() -> None:
    old, sent = {"both": model(2, 0)}, model(2, 1)
    part = {name: sent[name] for name in low_rank.without(sent, factor="a")}
    assert len(part) == len(sent) - len(LAYERS)
    new = mean_of(low_rank.Separate(), old, [("both", part)])["both"]
    for layer in LAYERS:
        torch.testing.assert_close(factors(new, layer).a, factors(old["both"], layer).a)
        torch.testing.assert_close(factors(new, layer).b, factors(sent, layer).b)


def test_the_nearest_factors_and_the_first_directions() -> None:
    own = low_rank.Factors(torch.randn(2, 5), torch.randn(6, 2))
    torch.testing.assert_close(low_rank.best_factors(own.change, 2).change, own.change, atol=1e-5, rtol=1e-5)
    longer = low_rank.leading(own, 4)
    assert longer.rank == 4
    torch.testing.assert_close(longer.change, own.change)
    assert low_rank.leading(own, 1).change.allclose(torch.outer(own.b[:, 0], own.a[0]))


def test_rules_are_refused_without_tensors_to_average() -> None:
    def outline(tensors: Mapping[str, Tensor]) -> dict[str, GlobalModel]:
        return {"both": GlobalModel(tensors, {}, ("image",), ("a-1",))}

    with pytest.raises(ConfigError, match="no client's model has low-rank adapters"):
        low_rank.Separate().require(outline({"encoders.image.project.weight": torch.zeros(2)}))
    with pytest.raises(ConfigError, match=r"clients a-1 do not exchange that; set adapter.offset: true"):
        low_rank.Stacked().require(outline(model(2, 0)))
    low_rank.Stacked().require(outline(with_offsets(model(2, 0))))
    with pytest.raises(ConfigError, match="leave it at exact"):
        low_rank.Padded(mean="sequential")
    assert set(low_rank.factor_names(model(2, 0))) == set(LAYERS)
