"""Models fused with what other encoders see: formula, rows and batches, tables, absent modalities, modes, precision."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from item_tables import Table
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.models.fusion import (
    Fused,
    FusionGuidance,
    GranularityFusion,
    RowNumbers,
    SampleFeatures,
    features_of,
    match_positions,
    of_batch,
    of_rows,
)
from polyfed.models.model import Model
from polyfed.tasks import evaluating

Parts = tuple[Model, Model, Samples, Samples]


class Flat(nn.Module):
    """No features by position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += len(x)
        out: Tensor = self.layer(x.flatten(1))
        return out


class Steps(nn.Module):
    """Features of a sequence, of which zeros are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def positions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x.unsqueeze(2)), x != 0

    def forward(self, x: Tensor) -> Tensor:
        values, mask = self.positions(x)
        return (values * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


ROWS = {"a": torch.tensor([4, 4, 1, 0, 1]), "b": torch.tensor([7, 2, 9, 0, 5])}  # siblings share a row of "a"


def samples_of(inputs: Mapping[str, Tensor]) -> Samples:
    tables = {name: Table(values) for name, values in inputs.items()}
    rows = {name: ROWS[name] for name in inputs}
    return Samples(tables, rows, torch.tensor([2, 2, 1, 0, 1]), {"label": torch.arange(5)}, ["x", "y", "z"], {})


@pytest.fixture
def parts() -> Parts:
    """Own model and that of others, and the samples in the views of both; of "a" theirs are wider."""
    torch.manual_seed(0)
    sequences = torch.randn(10, 6) * (torch.arange(6) < torch.arange(1, 11)[:, None].clamp(max=6))
    own = Model({"a": Flat(3), "b": Steps()}, {}, 4)
    others = Model({"a": Flat(5), "b": Steps()}, {}, 4).requires_grad_(False).eval()
    mine = samples_of({"a": torch.randn(5, 3), "b": sequences})
    return own, others, mine, samples_of({"a": torch.randn(5, 5), "b": sequences[:, :4]})


def fused_of(parts: Parts, *, known: bool = True, **options: bool) -> tuple[Fused, FusionGuidance]:
    own, others, _, theirs = parts
    guidance = FusionGuidance(others, theirs, options.get("maps", False), 2, {})
    if known:
        guidance.compute()
    partner, _ = of_batch(guidance, parts[2].batch(torch.tensor([0, 3, 4])))
    return Fused(own, GranularityFusion(4).eval(), partner, **options), guidance


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_vectors_are_fused_sample_by_sample(parts: Parts, unit: bool, known: bool) -> None:
    own, others, mine, theirs = parts
    fused, _ = fused_of(parts, known=known, unit=unit)
    batch = mine.batch(torch.tensor([0, 3, 4]))
    for name, x in batch.inputs.items():
        actual, represented = fused.embed(name, x), fused.represent(name, x)
        for place, k in enumerate((0, 3, 4)):
            local = own.encoders[name](mine.inputs[name](ROWS[name][k : k + 1]))
            received = others.encoders[name](theirs.inputs[name](ROWS[name][k : k + 1]))
            if unit:
                local, received = local / local.norm(), received / received.norm()
            expected = fused.fusion(local, received)[0]
            torch.testing.assert_close(actual[place], expected)
            torch.testing.assert_close(represented[place], expected / expected.norm())
    assert not torch.allclose(actual, own.embed("b", batch.inputs["b"]))


@pytest.mark.parametrize("unit", [True, False])
def test_maps_are_fused_by_position(parts: Parts, unit: bool) -> None:
    own, others, mine, theirs = parts
    parts = own, others, mine.only(["b"]), theirs.only(["b"])
    fused, guidance = fused_of(parts, maps=True, unit=unit)
    assert guidance.tables["b"].values.shape == (5, 4, 4)
    actual = fused.embed("b", mine.batch(torch.tensor([0, 3, 4])).inputs["b"])
    for place, k in enumerate((0, 3, 4)):
        row = ROWS["b"][k : k + 1]
        local, mask = own.encoders["b"].positions(mine.inputs["b"](row))
        received, there = others.encoders["b"].positions(theirs.inputs["b"](row))
        if unit:
            local, received = F.normalize(local, dim=2), F.normalize(received, dim=2)
        full = fused.fusion(local, match_positions(received, there, 6, mask), mask)[0]
        torch.testing.assert_close(actual[place], full[mask[0]].mean(0))


def test_without_renormalisation_representations_are_the_embeddings(parts: Parts) -> None:
    fused, _ = fused_of(parts, renormalise=False)
    x = parts[2].batch(torch.tensor([0, 3, 4])).inputs["a"]
    assert torch.equal(fused.represent("a", x), fused.embed("a", x))
    assert not torch.allclose(fused.embed("a", x).norm(dim=1), torch.ones(3), atol=1e-3)


def test_modalities_that_the_others_lack_go_unfused(parts: Parts) -> None:
    own, others, mine, theirs = parts
    fused, guidance = fused_of((own, others, mine, theirs.only(["a"])))
    x = mine.batch(torch.tensor([0, 3, 4])).inputs
    assert torch.equal(fused.embed("b", x["b"]), own.embed("b", x["b"]))
    assert not torch.allclose(fused.embed("a", x["a"]), own.embed("a", x["a"]))
    partner, numbered = of_rows(guidance, mine)
    value, other = partner("b", numbered.inputs["b"](ROWS["b"]))
    assert torch.equal(value, mine.inputs["b"](ROWS["b"]))
    assert other is None


@pytest.mark.parametrize("maps", [False, True])
def test_every_distinct_row_is_encoded_once_and_found_again(parts: Parts, maps: bool) -> None:
    _, others, _, theirs = parts
    names = ["b"] if maps else ["a", "b"]
    guidance, fresh = (FusionGuidance(others, theirs.only(names), maps, 2, {}) for _ in range(2))
    others.encoders["a"].calls = 0
    guidance.compute()
    assert others.encoders["a"].calls == (0 if maps else 3)
    index = torch.tensor([3, 1, 0, 4, 2, 0])
    for name in names:
        kept, now = guidance.of_samples(name, index), fresh.of_samples(name, index)
        torch.testing.assert_close(kept.values, now.values)
        assert (kept.mask is None) == (now.mask is None) == (not maps)
        if kept.mask is not None:
            assert torch.equal(kept.mask, now.mask)
        assert not kept.values.requires_grad


def test_rows_of_an_evaluation_equal_batches_of_training(parts: Parts) -> None:
    own, _, mine, _ = parts
    _, guidance = fused_of(parts)
    partner, numbered = of_rows(guidance, mine)
    assert len(numbered) == len(mine)
    assert numbered.targets is mine.targets
    assert [len(values) for values in numbered.inputs.values()] == [5, 10]
    index, fusion = torch.tensor([4, 0, 2]), GranularityFusion(4).eval()
    of_places, here = of_batch(guidance, mine.batch(index))
    by_row, by_batch = Fused(own, fusion, partner), Fused(own, fusion, of_places)
    there = numbered.batch(index)
    for name in ("a", "b"):
        assert torch.equal(there.inputs[name], ROWS[name][index])
        torch.testing.assert_close(by_row.embed(name, there.inputs[name]), by_batch.embed(name, here.inputs[name]))
    assert torch.equal(RowNumbers(3)(torch.tensor([2, 0]), torch.Generator()), torch.tensor([2, 0]))


class OfGpu(Tensor):
    """Row numbers as a GPU has them: no table of the host takes them before they are fetched."""

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def test_rows_that_a_gpu_names_are_fetched_before_they_are_loaded(parts: Parts, monkeypatch) -> None:
    _, others, mine, theirs = parts
    unknown, taken = FusionGuidance(others, theirs, False, 2, {}), []
    monkeypatch.setattr(Table, "__call__", lambda table, rows, generator=None: taken.append(rows) or table.values[rows])
    partner, numbered = of_rows(unknown, mine)
    partner("a", numbered.inputs["a"](ROWS["a"]).as_subclass(OfGpu))
    assert {type(rows) for rows in taken} == {Tensor}


def test_gradient_reaches_own_encoders_and_fusion_alone(parts: Parts) -> None:
    own, others, mine, _ = parts
    fused, _ = fused_of(parts, known=False)
    fused.represent("a", mine.batch(torch.tensor([0, 3, 4])).inputs["a"]).square()[:, 0].sum().backward()
    assert own.encoders["a"].layer.weight.grad.abs().sum() > 0
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in fused.fusion.parameters())
    assert all(value.grad is None for value in (*others.parameters(), *own.encoders["b"].parameters()))


def test_evaluation_changes_model_and_fusion_but_not_the_others(parts: Parts) -> None:
    own, others, _, _ = parts
    fused, _ = fused_of(parts)
    fused.train()
    others.eval()
    with evaluating(fused):
        assert not own.training
        assert not fused.fusion.training
    assert own.training
    assert fused.fusion.training
    assert not others.training
    assert {name.split(".")[0] for name, _ in fused.named_parameters()} == {"model", "fusion"}
    assert fused.device == own.device


def test_encoders_without_positions_are_named(parts: Parts) -> None:
    own, _, mine, _ = parts
    with pytest.raises(ConfigError, match=r"fusion.level is maps, but the encoder of 'a' \(Flat\) .*level=vectors"):
        features_of(own, "a", mine.batch(torch.arange(2)).inputs["a"], maps=True)


def test_a_final_norm_belongs_to_maps_too(parts: Parts) -> None:
    own, _, mine, _ = parts
    normed = Model(dict(own.encoders), {}, 4, final_norm=nn.LayerNorm(4))
    x = mine.batch(torch.arange(3)).inputs["b"]
    values, mask = features_of(normed, "b", x, maps=True)
    torch.testing.assert_close(values, F.layer_norm(own.encoders["b"].positions(x)[0], (4,)))
    assert mask is not None
    torch.testing.assert_close(features_of(normed, "b", x, maps=False).values, normed.embed("b", x))


def test_units_and_choices(parts: Parts) -> None:
    actual = SampleFeatures(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), None)
    torch.testing.assert_close(actual.unit().values, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert SampleFeatures(actual.values.bfloat16()).unit().values.dtype == torch.float32
    masked = SampleFeatures(torch.randn(3, 2, 4), torch.tensor([[True, False], [True, True], [False, True]]))
    chosen = masked.at(torch.tensor([2, 0]))
    assert chosen.mask is not None
    assert torch.equal(chosen.mask, masked.mask[[2, 0]])
    assert torch.equal(chosen.values, masked.values[[2, 0]])
