"""Heads of classes, of one embedding and of several; decoders of masks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.models.decoders import GridDecoder, MaskHead, UNetDecoder
from polyfed.models.heads import FusedHead, NonNegativeHead, SimilarityHead
from polyfed.models.model import Model


def test_non_negative_head_uses_positive_weights_and_scale():
    head = NonNegativeHead(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
    # scale 128: 128 * (1 * 2 + 0 * 3) and 128 * (0.5 * 2 + 2 * 3)
    assert head(torch.tensor([[2.0, 3.0]])).tolist() == [[256.0, 896.0]]
    assert head.positive_weight.tolist() == [[1.0, 0.0], [0.5, 2.0]]


def test_every_weight_of_the_non_negative_head_can_learn_from_the_start():
    head = NonNegativeHead(16, 5, scale=1.0)
    F.cross_entropy(head(torch.randn(8, 16)), torch.arange(8) % 5).backward()
    assert (head.weight > 0).all()
    assert (head.weight.grad != 0).all()


def test_cosines_with_classes_are_in_full_precision_under_autocast():
    vectors, x = F.normalize(torch.randn(30, 64) + 2, dim=-1), torch.randn(8, 64) + 1
    head = SimilarityHead(vectors, 0.01)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(x)
        halves = SimilarityHead(vectors.bfloat16(), 0.01)(x.bfloat16())
    torch.testing.assert_close(scores, F.normalize(x, dim=-1) @ vectors.T / 0.01)
    torch.testing.assert_close(halves, F.normalize(x.bfloat16().float(), dim=-1) @ vectors.bfloat16().float().T / 0.01)


def normed(row):
    """Zero mean, unit variance, in float64."""
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / math.sqrt(variance + 1e-5) for x in row]


def naive(head, embeddings):
    """Logits by a loop over samples, from the formula."""
    weights = [(layer.weight.double().tolist(), layer.bias.double().tolist()) for layer in (head.hidden, head.output)]
    result = []
    for rows in zip(*(e.double().tolist() for e in embeddings), strict=True):
        parts = [normed(row) for row in rows]
        product = [math.prod(values) for values in zip(*parts, strict=True)]
        joined = [x for part in parts for x in part]
        h = {"product": product, "concat": joined, "both": joined + product}[head.fusion]
        if len(parts) == 1:
            h = parts[0]
        (w1, b1), (w2, b2) = weights
        z = [sum(a * x for a, x in zip(row, h, strict=True)) + b for row, b in zip(w1, b1, strict=True)]
        z = [0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in z]
        result.append([sum(a * x for a, x in zip(row, z, strict=True)) + b for row, b in zip(w2, b2, strict=True)])
    return torch.tensor(result)


@pytest.mark.parametrize("fusion", ["product", "concat", "both"])
@pytest.mark.parametrize("modalities", [1, 2, 3])
def test_logits_equal_a_loop_over_the_samples(fusion, modalities):
    torch.manual_seed(0)
    head = FusedHead(6, modalities, 4, fusion=fusion, hidden=5)
    embeddings = [torch.randn(3, 6) * (k + 1) for k in range(modalities)]
    logits = head(embeddings)
    assert logits.shape == (3, 4)
    assert head.answers == 4
    torch.testing.assert_close(logits, naive(head, embeddings).float(), rtol=1e-4, atol=1e-5)


def test_dropout_is_active_in_training_only():
    torch.manual_seed(3)
    head = FusedHead(16, 2, 3, fusion="both", hidden=16, dropout=0.5)
    pair = [torch.randn(4, 16), torch.randn(4, 16)]
    assert not torch.equal(head(pair), head(pair))
    head.eval()
    assert torch.equal(head(pair), head(pair))


def test_gradients_reach_every_embedding_and_every_weight():
    torch.manual_seed(4)
    head = FusedHead(6, 2, 3, fusion="both", hidden=4)
    pair = [torch.randn(5, 6, requires_grad=True) for _ in range(2)]
    nn.functional.cross_entropy(head(pair), torch.tensor([0, 1, 2, 0, 1])).backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in (*pair, *head.parameters()))


def test_what_a_model_exchanges_follows_changes_of_its_parts():
    model = Model({"image": nn.Linear(2, 2)}, {}, 2)
    for change in (
        lambda: None,
        lambda: model.encoders.update({"image": nn.Linear(2, 3)}),
        lambda: model.extras.update({"more": nn.PReLU()}),
    ):
        change()
        live = {name: id(value) for name, value in model.exchanged(live=True).items()}
        assert live == {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}


# ---- decoders of masks


def maps(*shapes: tuple[int, int], batch: int = 2, seed: int = 0) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, channels, side, side, generator=stream) for channels, side in shapes]


@pytest.mark.parametrize("widths", [(8,), (8, 6, 4), (512, 256, 128, 64)])
@pytest.mark.parametrize(("grid", "size"), [(2, 8), (4, 64), (14, 32), (8, 8), (3, 20), (16, 8)])
def test_a_grid_becomes_logits_of_the_masks_size(widths: tuple[int, ...], grid: int, size: int) -> None:
    assert GridDecoder(12, widths, size).eval()(maps((12, grid))).shape == (2, 1, size, size)


def test_grid_stages_double_but_never_beyond_the_masks() -> None:
    decoder = GridDecoder(4, (8, 8, 8, 8), 16).eval()
    sides: list[int] = []
    for stage in decoder.stages:
        stage.register_forward_hook(lambda module, inputs, output: sides.append(output.shape[-1]))
    decoder(maps((4, 4)))
    assert sides == [4, 8, 16, 16]


@pytest.mark.parametrize("widths", [(8,), (8, 6), (16, 8, 4, 4, 4, 4)])
@pytest.mark.parametrize(
    "shapes", [[(12, 4)], [(12, 4), (6, 8)], [(24, 2), (12, 4), (6, 8), (3, 16)], [(8, 3), (4, 7)]]
)
def test_a_pyramid_becomes_logits_of_the_masks_size(widths: tuple[int, ...], shapes: list[tuple[int, int]]) -> None:
    decoder = UNetDecoder([channels for channels, _ in shapes], widths, 32).eval()
    assert decoder(maps(*shapes)).shape == (2, 1, 32, 32)


@pytest.mark.parametrize("number", range(4))
def test_every_skip_matters(number: int) -> None:
    shapes = [(8, 2), (6, 4), (4, 8), (3, 16)]
    torch.manual_seed(0)
    decoder = UNetDecoder([channels for channels, _ in shapes], (8, 8, 8), 16).eval()
    given = maps(*shapes)
    before = decoder(given)
    given[number] = given[number] + 1
    assert not torch.allclose(decoder(given), before)


def test_all_parameters_learn() -> None:
    torch.manual_seed(1)
    for decoder in (GridDecoder(8, (8, 4), 16), UNetDecoder([8, 6, 4], (8, 4), 16)):
        decoder(maps(*[(8, 2), (6, 4), (4, 8)])).square().mean().backward()
        assert all(bool((value.grad != 0).any()) for value in decoder.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("widths", [(), (8, 0)])
def test_widths_must_be_some(widths: tuple[int, ...]) -> None:
    for build in (lambda: GridDecoder(4, widths, 8), lambda: UNetDecoder([4, 2], widths, 8)):
        with pytest.raises(ValueError, match="must be one or more numbers of channels"):
            build()


def test_widths_are_those_of_the_stages() -> None:
    convolutions = [stage[0] for stage in UNetDecoder([9, 7, 5, 3], (8, 6), 16).stages]
    assert [each.out_channels for each in convolutions] == [8, 6, 6]
    assert [each.in_channels for each in convolutions] == [9 + 7, 8 + 5, 6 + 3]
    grid = GridDecoder(9, (8, 6, 4), 16)
    assert [(a[0].out_channels, b[0].in_channels) for a, b in pairwise(grid.stages)] == [(8, 8), (6, 6)]


@pytest.mark.parametrize("summaries", [0, 1])
def test_a_mask_head_reads_a_grid_of_positions_behind_a_summary(summaries: int) -> None:
    torch.manual_seed(0)
    head = MaskHead(3, 3, (4,), 4, "image").eval()
    positions = torch.randn(2, summaries + 4, 3)
    logits = head(positions)
    assert logits.shape == (2, 3, 4, 4)
    grid = positions[:, summaries:].unflatten(1, (2, 2)).permute(0, 3, 1, 2)
    torch.testing.assert_close(logits, head.decoder([grid]))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in head.modules())
