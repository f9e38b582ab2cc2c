from __future__ import annotations

import pytest
import torch

from polyfed.tasks.dice import dice, mean_dice


def naive(predicted: torch.Tensor, mask: torch.Tensor) -> float:
    a = {place for place, value in enumerate(predicted.flatten().tolist()) if value}
    b = {place for place, value in enumerate(mask.flatten().tolist()) if value}
    return (1.0 if not a else 0.0) if not b else 2 * len(a & b) / (len(a) + len(b))


def test_dice_is_the_formula_picture_by_picture() -> None:
    stream = torch.Generator().manual_seed(0)
    predicted, masks = (torch.rand(2, 20, 4, 5, generator=stream) < 0.3).unbind(0)
    found = dice(predicted, masks)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([naive(a, b) for a, b in zip(predicted, masks, strict=True)])
    assert float(mean_dice(predicted, masks)) == pytest.approx(100 * float(found.mean()))


def test_an_empty_mask_scores_one_only_if_nothing_is_predicted() -> None:
    empty, some = torch.zeros(1, 3, 3, dtype=torch.bool), torch.zeros(1, 3, 3, dtype=torch.bool)
    some[0, 1, 1] = True
    assert dice(empty, empty).item() == 1
    assert dice(some, empty).item() == 0
    assert dice(empty, some).item() == 0
    assert dice(some, some).item() == 1


def test_it_is_the_mean_over_pictures_not_pixels() -> None:
    predicted, masks = torch.zeros(2, 1, 100, dtype=torch.bool), torch.zeros(2, 1, 100, dtype=torch.bool)
    predicted[0], masks[0] = True, True  # a large mask, all right
    masks[1, 0, 0] = True  # a small one, missed
    assert float(mean_dice(predicted, masks)) == 50.0


def test_no_pictures_have_no_mean() -> None:
    none = torch.zeros(0, 2, 2, dtype=torch.bool)
    assert bool(mean_dice(none, none).isnan())
