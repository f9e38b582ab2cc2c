import math

import pytest
import torch
from torch import nn

from polyfed.models.fusion import GranularityFusion, PositionNorm, match_positions

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
