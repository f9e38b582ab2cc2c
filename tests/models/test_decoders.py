from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from polyfed.models.decoders import GridDecoder, MaskHead


def random_map(channels: int, side: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("widths", [(8,), (8, 6, 4), (512, 256, 128, 64)])
@pytest.mark.parametrize(("grid", "size"), [(2, 8), (4, 64), (14, 32), (8, 8), (3, 20), (16, 8)])
def test_a_grid_becomes_logits_of_the_masks_size(widths: tuple[int, ...], grid: int, size: int) -> None:
    decoder = GridDecoder(12, widths, size).eval()
    assert decoder(random_map(12, grid)).shape == (2, 1, size, size)


def test_grid_stages_double_but_never_beyond_the_masks() -> None:
    decoder = GridDecoder(4, (8, 8, 8, 8), 16).eval()
    sides: list[int] = []
    for stage in decoder.stages:
        stage.register_forward_hook(lambda module, inputs, output: sides.append(output.shape[-1]))
    decoder(random_map(4, 4))
    assert sides == [4, 8, 16, 16]


def test_all_parameters_learn() -> None:
    torch.manual_seed(1)
    decoder = GridDecoder(8, (8, 4), 16)
    decoder(random_map(8, 2)).square().mean().backward()
    assert all(bool((value.grad != 0).any()) for value in decoder.parameters())  # type: ignore[union-attr]


def test_pictures_do_not_depend_on_each_other_in_evaluation() -> None:
    decoder, given = GridDecoder(4, (4,), 8).eval(), random_map(4, 4, batch=3)
    torch.testing.assert_close(decoder(given)[1:2], decoder(given[1:2]))


@pytest.mark.parametrize("widths", [(), (8, 0)])
def test_widths_must_be_some(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be one or more numbers of channels"):
        GridDecoder(4, widths, 8)


def test_widths_are_those_of_the_stages() -> None:
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
    torch.testing.assert_close(logits, head.decoder(grid))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in head.modules())
