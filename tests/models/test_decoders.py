from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from polyfed.models.decoders import GridDecoder, MaskHead, UNetDecoder


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
