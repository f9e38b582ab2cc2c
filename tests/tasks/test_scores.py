"""Metrics: accuracy, overlap and recall against loops, and their intervals over test items."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch.nn import functional as F

from polyfed.core.distributions import share_interval
from polyfed.core.errors import DataError
from polyfed.tasks.metrics import (
    TaskScores,
    accuracies,
    balanced_accuracy,
    dice,
    dice_of_constant,
    drawn_means,
    iou,
    label_ranks,
    macro_f1,
    mean_by_item,
    mean_dice,
    overlaps,
    positives_per_query,
    predictions,
    ranks,
    recall_at,
    top,
)


def test_samples_of_one_item_are_drawn_together() -> None:
    draw = np.random.default_rng(0)
    hits = draw.random(30) < 0.4
    values, items = torch.tensor(hits).repeat_interleave(5).double() * 100, torch.arange(30).repeat_interleave(5)
    value = float(values.mean())
    together, apart = (
        TaskScores({"r": value}, {"r": [mean_by_item(values, numbers)]}).intervals()["r"]
        for numbers in (items, torch.arange(150))
    )
    own = TaskScores({"r": value}, {"r": [mean_by_item(values[::5], torch.arange(30))]}).intervals()["r"]
    assert together == pytest.approx(own)
    assert together[1] - together[0] > 2 * (apart[1] - apart[0])
    naive = [100 * hits[draw.integers(0, 30, 30)].mean() for _ in range(4000)]
    assert together == pytest.approx(np.quantile(naive, [0.025, 0.975]).tolist(), abs=3.5)


def test_both_directions_of_an_item_are_drawn_together() -> None:
    values = torch.tensor([100.0, 0.0] * 20)
    terms = [mean_by_item(values, torch.arange(40)), mean_by_item(100 - values, torch.arange(40))]
    low, high = TaskScores({"sum": 100.0}, {"sum": terms}).intervals()["sum"]

    assert low > 60  # drawn apart they would range from 56 to 144
    assert high < 140


@pytest.mark.parametrize(("value", "trials"), [(0.0, 10), (100.0, 4), (42.0, 50), (10.0, 200)])
def test_a_share_has_the_exact_interval(value: float, trials: int) -> None:
    exact = binomtest(round(value / 100 * trials), trials).proportion_ci(0.95)
    assert share_interval(value, trials) == pytest.approx((100 * exact.low, 100 * exact.high))


def test_items_that_are_all_alike_have_an_interval_all_the_same() -> None:
    scores = TaskScores({"r": 100.0}, {"r": [mean_by_item(torch.full((4,), 100.0), torch.arange(4))]})
    assert scores.intervals()["r"] == pytest.approx(share_interval(100.0, 4))
    assert TaskScores({"r": 1.0}).intervals() == {}


@pytest.mark.parametrize("items", [20, 100])
def test_coverage_over_items(items: int) -> None:
    draw, covered = np.random.default_rng(items), 0
    for _ in range(100):
        chances = draw.beta(2, 2, items).repeat(5)  # captions of an image are alike
        values = torch.tensor(draw.random(5 * items) < chances).double() * 100
        own = mean_by_item(values, torch.arange(items).repeat_interleave(5))
        low, high = TaskScores({"r": float(values.mean())}, {"r": [own]}).intervals()["r"]
        covered += low <= 50 <= high
    assert covered >= 88


def naive_scores(predicted: list[int], labels: list[int], classes: int) -> tuple[float, float]:
    recalls, f1s = [], []
    for c in range(classes):
        hits = sum(p == c and t == c for p, t in zip(predicted, labels, strict=True))
        if c in labels:
            recalls.append(hits / labels.count(c))
        if c in labels or c in predicted:
            f1s.append(2 * hits / (labels.count(c) + predicted.count(c)))
    return 100 * sum(recalls) / len(recalls), 100 * sum(f1s) / len(f1s)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_accuracy_and_f1_equal_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted, labels = (torch.randint(0, 6, (17,), generator=generator) for _ in range(2))
    recall, f1 = naive_scores(predicted.tolist(), labels.tolist(), 8)
    assert float(balanced_accuracy(predicted, labels, 8)) == pytest.approx(recall)
    assert float(macro_f1(predicted, labels, 8)) == pytest.approx(f1)


def test_ranks_count_ties_and_nan_against_the_model():
    nan = math.nan
    logits = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 0.0], [2.0, nan, 1.0], [nan, 1.0, 2.0], [nan, nan, nan]])
    labels = torch.tensor([0, 0, 0, 0, 0])
    actual = label_ranks(logits, labels)
    assert actual.tolist() == [0, 1, 1, 2, 2]
    predicted = predictions(logits, labels, actual)
    assert (predicted == labels).tolist() == (actual == 0).tolist()
    assert predicted[1] == 1


def test_one_class():
    logits, labels = torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)
    actual = label_ranks(logits, labels)
    assert predictions(logits, labels, actual).tolist() == [0, 0, 0]
    assert float(top(actual, 1)) == 100.0


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
def test_dice_and_iou_are_the_formulas_by_image_and_over_all(classes: int) -> None:
    predicted, masks = some(classes)
    counts = overlaps(predicted, masks, classes)
    assert counts.shape == (6, classes, 3)
    for number in range(classes):
        for row, (a, b) in enumerate(zip(predicted, masks, strict=True)):
            actual = float(dice(counts)[row, number]), float(iou(counts)[row, number])
            assert actual == pytest.approx(naive(a, b, number, classes), nan_ok=True)
        full = counts.sum(0)
        actual = float(dice(full)[number]), float(iou(full)[number])
        assert actual == pytest.approx(naive(predicted, masks, number, classes))


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


def test_an_empty_mask_scores_one_only_if_nothing_is_predicted_and_an_empty_set_has_no_mean() -> None:
    empty, full = torch.zeros(1, 3, 3, dtype=torch.bool), torch.ones(1, 3, 3, dtype=torch.bool)
    pairs = [(empty, empty), (full, empty), (empty, full), (full, full)]
    assert [float(mean_dice(a, b)) for a, b in pairs] == [100, 0, 0, 100]
    assert bool(mean_dice(empty[:0], empty[:0]).isnan())


def sorted_ranks(queries, gallery, query_items, gallery_items):
    """Ranks by sorting each query's scores, positives placed after all others of equal score."""
    actual = []
    for scores, item in zip((queries @ gallery.T).tolist(), query_items.tolist(), strict=True):
        entries = [(-s, g == item) for s, g in zip(scores, gallery_items.tolist(), strict=True)]
        actual.append(next(i for i, (_, positive) in enumerate(sorted(entries)) if positive))
    return torch.tensor(actual)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 20), m=st.integers(1, 40), levels=st.sampled_from([1, 2, 50]))
def test_equals_a_sort_with_ties_against_the_model(seed, n, m, levels):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda rows: torch.randint(-levels, levels + 1, (rows, 3), generator=generator).float()  # noqa: E731
    queries, gallery = draw(n), draw(m)
    gallery_items = torch.randint(0, max(1, m // 2), (m,), generator=generator)
    query_items = gallery_items[torch.randint(0, m, (n,), generator=generator)]
    expected = sorted_ranks(queries, gallery, query_items, gallery_items)
    assert ranks(queries, gallery, query_items, gallery_items).equal(expected)


def test_block_size_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    queries, gallery = torch.randn(300, 8, generator=generator), torch.randn(400, 8, generator=generator)
    items = torch.arange(400) % 300
    full = ranks(queries, gallery, torch.arange(300), items, block_scores=1 << 30)
    for block in (1, 64 * 448, 150 * 448):
        assert ranks(queries, gallery, torch.arange(300), items, block_scores=block).equal(full)


def test_five_captions_hit_by_any_of_them():
    images = torch.eye(3)
    texts = torch.cat([F.normalize(torch.ones(4, 3), dim=1), images[:1], images[2:], images[1:2]])
    text_items = torch.tensor([0, 0, 0, 0, 0, 1, 2])
    # the captions of 1 and 2 are swapped, four captions of 0 lie in the middle of all, and zeros tie
    assert ranks(images, texts, torch.arange(3), text_items).tolist() == [0, 6, 6]
    assert ranks(texts, images, text_items, torch.arange(3)).tolist() == [2, 2, 2, 2, 0, 2, 2]


def test_nan_never_helps():
    nan = torch.full((1, 2), math.nan)
    gallery = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    items, query = torch.arange(3), torch.tensor([[1.0, 0.0]])
    assert ranks(nan, gallery, torch.tensor([0]), items).tolist() == [2]
    assert ranks(query, torch.cat([nan, gallery[1:]]), torch.tensor([0]), items).tolist() == [2]
    assert ranks(query, torch.cat([gallery[:2], nan]), torch.tensor([0]), items).tolist() == [1]
    # one positive is NaN, the other is the best
    assert ranks(query, torch.cat([nan, gallery]), torch.tensor([0]), torch.tensor([0, 0, 1, 2])).tolist() == [0]


def test_half_precision_is_scored_in_full():
    z = F.normalize(torch.randn(60, 16, generator=torch.Generator().manual_seed(3)), dim=1)
    items = torch.arange(60)
    half = z.bfloat16()
    assert ranks(half, half, items, items).equal(ranks(half.float(), half.float(), items, items))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ranks(z, z, items, items).equal(torch.zeros(60, dtype=torch.int64))


def test_a_query_without_positive_is_an_error_that_names_it():
    z = torch.eye(3)
    with pytest.raises(DataError, match=r"query 1 \(item 7\) has no positive"):
        ranks(z, z, torch.tensor([0, 7, 2]), torch.arange(3))


def test_no_queries():
    empty = ranks(torch.empty(0, 4), torch.eye(4), torch.empty(0, dtype=torch.int64), torch.arange(4))
    assert empty.tolist() == []
    assert math.isnan(recall_at(empty, (1,))[1])
    assert math.isnan(positives_per_query(empty, torch.arange(4)))


@pytest.mark.parametrize("support", [(9, 1), (40, 1, 1), (5, 5), (3, 0, 7, 0, 0, 1, 1, 1, 1, 4, 2), (6,)])
def test_what_a_constant_reaches_is_the_best_of_all_constants(support: tuple[int, ...]) -> None:
    labels = torch.arange(len(support)).repeat_interleave(torch.tensor(support))
    actual, reached = [], {}
    for answer in range(len(support)):  # the classes in any order behind it
        logits = torch.rand(len(support), generator=torch.Generator().manual_seed(answer)).expand(len(labels), -1)
        logits = logits.index_fill(1, torch.tensor([answer]), 2.0)
        ranks = label_ranks(logits, labels)
        reached = accuracies(ranks, predictions(logits, labels, ranks), labels, len(support))
        actual.append(reached)
    for name in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert reached[f"{name}_of_constant"] == pytest.approx(max(one[name] for one in actual))
    five = sum(sorted(support)[-5:]) / sum(support)
    assert reached.get("top5_of_constant", 100 * five) == pytest.approx(100 * five)


def test_draws_without_any_item_of_a_class_are_drawn_again() -> None:
    counts = torch.zeros(2, 2, 10, dtype=torch.float64)
    counts[0, :, 3] = torch.tensor([40.0, 1.0])  # one image in ten has the class
    counts[1] = torch.tensor([1.0, 2.0])[:, None]
    assert bool(drawn_means(counts, 500).isfinite().all())
    rare = torch.zeros(40, 2, 40, dtype=torch.float64)  # so many that every draw lacks one: it is left out of the mean
    classes = torch.arange(40)
    rare[classes, 0, classes], rare[classes, 1, classes] = classes.double() / 20, 1.0
    low, high = TaskScores({"dice": 39.0}, {"dice": list(rare)}).intervals()["dice"]
    assert 20 < low < 39 < high < 60
