"""Fusion of features, and models fused with what other encoders see: formula, batches, tables, modes, precision."""

from __future__ import annotations

import math
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
    PositionNorm,
    RowNumbers,
    SampleFeatures,
    features_of,
    match_positions,
    of_batch,
    of_rows,
)
from polyfed.models.model import Model
from polyfed.tasks import evaluating

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()


@pytest.fixture
def maps() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with norms that do something."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return module.double()


def linear(layer, rows):
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return [
        [b + sum(w * v for w, v in zip(line, row, strict=True)) for line, b in zip(weight, bias, strict=True)]
        for row in rows
    ]


def batch_norm(norm, rows):
    out = [list(row) for row in rows]
    for c, (scale, shift) in enumerate(zip(norm.weight.tolist(), norm.bias.tolist(), strict=True)):
        column = [row[c] for row in rows]
        mean = sum(column) / len(column) if norm.training else float(norm.running_mean[c])
        spread = sum((v - mean) ** 2 for v in column) / len(column) if norm.training else float(norm.running_var[c])
        for r, value in enumerate(column):
            out[r][c] = scale * (value - mean) / math.sqrt(spread + norm.eps) + shift
    return out


def branch(part, rows):
    inner = [[max(0.0, value) for value in row] for row in batch_norm(part.norm1, linear(part.down, rows))]
    return batch_norm(part.norm2, linear(part.up, inner))


def naive_stage(fusion, stage, x, local, received):
    """``x``, ``local``, ``received``: lists (samples) of lists (valid positions) of vectors."""
    means = [[sum(column) / len(column) for column in zip(*sample, strict=True)] for sample in x]
    overall = branch(fusion.pooled[-1 if stage and len(fusion.pooled) == 2 else 0], means)
    own = iter(branch(fusion.pointwise[stage], [row for sample in x for row in sample]))
    out = []
    for b, sample in enumerate(x):
        out.append([])
        for j in range(len(sample)):
            share = [1 / (1 + math.exp(-s - t)) for s, t in zip(overall[b], next(own), strict=True)]
            rows = zip(share, local[b][j], received[b][j], strict=True)
            out[-1].append([m * one + (1 - m) * other for m, one, other in rows])
    return out


def naive(fusion, local, received, mask):
    """Methods 3.4, valid positions only, in plain Python floats."""
    local, received = (
        [[row.tolist() for row in sample[valid]] for sample, valid in zip(x, mask, strict=True)]
        for x in (local, received)
    )
    added = [
        [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*pair, strict=True)]
        for pair in zip(local, received, strict=True)
    ]
    first = naive_stage(fusion, 0, added, local, received)
    return naive_stage(fusion, 1, first, local, received)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mask", [None, MASK])
def test_fusion_equals_the_formula_on_valid_positions(maps, mask, shared, training):
    fusion = shaken(GranularityFusion(8, shared_global_branch=shared)).train(training)
    valid = torch.ones(3, 4, dtype=torch.bool) if mask is None else mask
    expected = naive(fusion, *maps, valid)
    got = fusion(*maps, mask)
    assert got.isfinite().all()
    for row, rows in enumerate(expected):
        torch.testing.assert_close(got[row, valid[row]], torch.tensor(rows, dtype=torch.float64))


def test_numbers_of_parameters_are_those_of_the_paper():
    own, shared = GranularityFusion(256), GranularityFusion(256, shared_global_branch=True)
    assert [sum(p.numel() for p in part.parameters()) for part in (*own.pooled, *own.pointwise)] == [33_728] * 4
    assert sum(p.numel() for p in own.parameters()) == 134_912
    assert sum(p.numel() for p in shared.parameters()) == 101_184
    assert len({value.data_ptr() for value in shared.state_dict().values()}) == len(shared.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_vectors_are_maps_of_length_one(maps, training):
    fusion = shaken(GranularityFusion(8)).train(training)
    local, received = (x[:, 0] for x in maps)
    one = fusion(local.unsqueeze(1), received.unsqueeze(1))
    valid = torch.ones(3, 1, dtype=torch.bool)
    assert torch.equal(fusion(local, received), one.squeeze(1))
    assert torch.equal(fusion.embedding(local, received), one.squeeze(1))
    torch.testing.assert_close(fusion(local.unsqueeze(1), received.unsqueeze(1), valid), one)


@pytest.mark.parametrize("training", [True, False])
def test_amount_and_content_of_padding_do_not_matter(maps, training):
    modules = [shaken(GranularityFusion(8)).train(training) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    expected = modules[0].embedding(*maps, MASK)
    longer = [nn.functional.pad(x.masked_fill(~MASK.unsqueeze(-1), 9.0), (0, 0, 0, 3), value=-5.0) for x in maps]
    torch.testing.assert_close(modules[1].embedding(*longer, nn.functional.pad(MASK, (0, 3))), expected)
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict())


def test_a_row_without_positions_neither_breaks_nor_moves_the_others(maps):
    fusion = shaken(GranularityFusion(8)).train()
    alone = fusion.embedding(*(x[[0, 2]] for x in maps), MASK[[0, 2]])
    mask = MASK.clone()
    mask[1] = False
    got = fusion.embedding(*maps, mask)
    torch.testing.assert_close(got[[0, 2]], alone)
    assert (got[1] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [None, 1, 3])
def test_one_training_sample_uses_what_the_norms_have_seen(length, masked):
    shape = (1, 8) if length is None else (1, length, 8)
    local, received = torch.randn(shape), torch.randn(shape)
    mask = torch.arange(length).unsqueeze(0) < 1 if masked and length else None
    fusion = GranularityFusion(8)
    fusion(torch.randn(16, 8) * 3 + 1, torch.randn(16, 8))
    before = {name: value.clone() for name, value in fusion.state_dict().items()}
    got = fusion(local, received, mask)
    assert got.isfinite().all()
    touched = {name for name, value in fusion.state_dict().items() if not torch.equal(value, before[name])}
    several = length == 3 and not masked
    assert {name.split(".")[0] for name in touched} == ({"pointwise"} if several else set())
    if not several:
        valid = slice(None) if mask is None else mask
        torch.testing.assert_close(got[valid], fusion.eval()(local, received, mask)[valid])


def test_no_samples_give_no_features():
    assert GranularityFusion(8)(torch.zeros(0, 8), torch.zeros(0, 8)).shape == (0, 8)


def test_norms_over_valid_positions_are_those_of_pytorch_on_what_is_valid(maps):
    own, reference = PositionNorm(8).double(), nn.BatchNorm1d(8).double()
    for x in maps:
        torch.testing.assert_close(own(x, MASK)[MASK], reference(x[MASK]))
    torch.testing.assert_close(own.state_dict(), reference.state_dict())
    torch.testing.assert_close(own.eval()(x)[MASK], reference.eval()(x[MASK]))


def test_norms_are_differentiable_over_valid_positions(maps):
    norm = shaken(PositionNorm(8))
    assert torch.autograd.gradcheck(lambda x: norm(x, MASK), maps[0].requires_grad_())


def test_nan_shows(maps):
    local, received = maps
    local[0, 0, 0] = math.nan
    assert GranularityFusion(8).double()(local, received).isnan().any()


@pytest.mark.parametrize("mask", [None, MASK])
def test_fusion_is_close_under_autocast(maps, mask):
    fusion, copy = GranularityFusion(8), GranularityFusion(8)
    copy.load_state_dict(fusion.state_dict())
    local, received = (x.float().requires_grad_() for x in maps)
    with torch.autocast("cpu", torch.bfloat16):
        low = fusion.embedding(local, received, mask)
    torch.testing.assert_close(low.float(), copy.embedding(local, received, mask), atol=0.05, rtol=0.1)
    low.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in fusion.parameters())
    assert all(value.dtype == torch.float32 for value in fusion.state_dict().values() if value.is_floating_point())


@pytest.mark.usefixtures("unchecked_shapes")
def test_features_that_do_not_fit_are_refused(maps):
    fusion = GranularityFusion(8).double()
    with pytest.raises(ValueError, match=r"\[3, 4, 8\] and received ones \[3, 1, 8\].*match_positions"):
        fusion(maps[0], maps[1][:, :1])
    with pytest.raises(ValueError, match=r"mask \[3, 4\] for features \[3, 8\]"):
        fusion(maps[0][:, 0], maps[1][:, 0], MASK)
    with pytest.raises(ValueError, match=r"mask \[3, 3\]"):
        fusion(*maps, MASK[:, :3])


def pooled_by_loops(rows, length):
    n = len(rows)
    runs = [rows[k * n // length : math.ceil((k + 1) * n / length)] for k in range(length)]
    return torch.stack([torch.stack(run).mean(0) for run in runs])


@pytest.mark.parametrize(("count", "length"), [(4, 4), (7, 3), (3, 7), (5, 1), (1, 5), (6, 4), (9, 3)])
def test_sequences_are_pooled_adaptively(count, length):
    g = torch.randn(2, count, 5, dtype=torch.float64)
    own, pytorch = match_positions(g, None, length), nn.functional.adaptive_avg_pool1d(g.transpose(1, 2), length)
    torch.testing.assert_close(own, torch.stack([pooled_by_loops(list(sample), length) for sample in g]))
    torch.testing.assert_close(own, pytorch.transpose(1, 2))


@pytest.mark.parametrize(("side", "wanted"), [(2, 7), (7, 2), (4, 3), (7, 1), (3, 3)])
def test_images_are_pooled_over_both_axes(side, wanted):
    g = torch.randn(2, side * side, 5, dtype=torch.float64)
    grid = g.transpose(1, 2).unflatten(2, (side, side))
    expected = nn.functional.adaptive_avg_pool2d(grid, wanted).flatten(2).transpose(1, 2)
    torch.testing.assert_close(match_positions(g, None, wanted**2), expected)


def test_only_valid_positions_are_matched_with_valid_positions():
    g = torch.randn(5, 6, 4, dtype=torch.float64)
    received = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 1], [0] * 6, [1] * 6]).bool()
    wanted = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    got = match_positions(g, received, 4, wanted)
    for row in range(3):
        expected = pooled_by_loops(list(g[row, received[row]]), int(wanted[row].sum()))
        torch.testing.assert_close(got[row, wanted[row]], expected)
    assert (got[~wanted] == 0).all()
    assert (got[3] == 0).all()
    every = torch.ones(5, 4, dtype=torch.bool)
    assert torch.equal(match_positions(g, received, 4), match_positions(g, received, 4, every))
    assert torch.equal(match_positions(g, None, 4, wanted), match_positions(g, torch.ones_like(received), 4, wanted))
    torch.testing.assert_close(match_positions(g, received, 6, received)[received], g[received])


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="mask of 4 positions for a map of 5"):
        match_positions(torch.zeros(3, 6, 2), None, 5, MASK)


# ---- models fused with what other encoders see


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
