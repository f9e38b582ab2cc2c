from __future__ import annotations

import pytest
import torch

from polyfed.tasks.overlap import dice, dice_of_constant, iou, mean_dice, overlaps


def naive(predicted: torch.Tensor, masks: torch.Tensor, number: int, classes: int) -> tuple[float, float]:
    """Dice and IoU of a class as sets of pixels."""
    values = list(enumerate(zip(predicted.flatten().tolist(), masks.flatten().tolist(), strict=True)))
    a = {place for place, (guess, true) in values if guess == number and 0 <= true < classes}
    b = {place for place, (_, true) in values if true == number}
    return (2 * len(a & b) / (len(a) + len(b)), len(a & b) / len(a | b)) if a | b else (float("nan"), float("nan"))


def some(classes: int, shape: tuple[int, ...] = (6, 4, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions, of which some are of no class, and masks, of which pixels are left out."""
    stream = torch.Generator().manual_seed(classes)
    masks = torch.randint(0, classes + 1, shape, generator=stream)
    return torch.randint(-1, classes, shape, generator=stream), masks.where(masks < classes, 255)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_dice_and_iou_are_the_formulas_by_picture_and_over_all(classes: int) -> None:
    predicted, masks = some(classes)
    counts = overlaps(predicted, masks, classes)
    assert counts.shape == (6, classes, 3)
    for number in range(classes):
        for row, (a, b) in enumerate(zip(predicted, masks, strict=True)):
            wanted = naive(a, b, number, classes)
            assert (float(dice(counts)[row, number]), float(iou(counts)[row, number])) == pytest.approx(
                wanted, nan_ok=True
            )
        whole = counts.sum(0)
        wanted = naive(predicted, masks, number, classes)
        assert (float(dice(whole)[number]), float(iou(whole)[number])) == pytest.approx(wanted)


@pytest.mark.parametrize("first", [0, 1])
def test_the_constant_mask_is_the_best_of_all_constant_ones(first: int) -> None:
    _, masks = some(4)
    counts = overlaps(masks, masks, 4).sum(0)
    each = []
    for number in range(4):
        constant = torch.full_like(masks, number)
        own = torch.tensor([naive(constant, masks, other, 4)[0] for other in range(first, 4)])
        each.append(float(own.nanmean()))
    assert float(dice_of_constant(counts, first)) == pytest.approx(max(each))


def test_a_class_that_is_nowhere_has_no_dice_and_one_only_predicted_has_0() -> None:
    masks = torch.zeros(2, 3, 3, dtype=torch.int64)
    counts = overlaps(masks.clone().fill_(1), masks, 3).sum(0)
    assert dice(counts).tolist() == pytest.approx([0, 0, float("nan")], nan_ok=True)
    assert iou(counts).tolist() == pytest.approx([0, 0, float("nan")], nan_ok=True)
    # a constant background is right everywhere, as the task has it
    assert float(dice_of_constant(counts, 1)) == 1


def test_an_empty_mask_scores_one_only_if_nothing_is_predicted() -> None:
    empty, full = torch.zeros(1, 3, 3, dtype=torch.bool), torch.ones(1, 3, 3, dtype=torch.bool)
    pairs = [(empty, empty), (full, empty), (empty, full), (full, full)]
    assert [float(mean_dice(a, b)) for a, b in pairs] == [100, 0, 0, 100]


def test_no_pictures_have_no_mean() -> None:
    none = torch.zeros(0, 2, 2, dtype=torch.bool)
    assert bool(mean_dice(none, none).isnan())
