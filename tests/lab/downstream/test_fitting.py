from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.lab.downstream.probe import Labelled, class_scores, macro_auroc, stratified


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(n: int, seed: int = 0, classes: int = 3) -> Labelled:
    labels = torch.arange(n) % classes
    return Labelled(F.one_hot(labels, 4).float() * 2 + torch.randn(n, 4, generator=stream(seed)), labels)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 1.0])
def test_a_share_of_every_class_and_one_at_least(share: float) -> None:
    labels = torch.tensor([0] * 100 + [1] * 10 + [4] * 3)[torch.randperm(113, generator=stream())]
    kept = stratified(labels, share, stream(1))
    assert kept.tolist() == sorted(set(kept.tolist()))
    counts = torch.bincount(labels[kept], minlength=5).tolist()
    assert counts == [max(1, round(share * n)) if n else 0 for n in (100, 10, 0, 0, 3)]


def test_shares_differ_by_draw_and_all_is_all() -> None:
    labels = torch.arange(60) % 2
    assert stratified(labels, 0.2, stream(1)).tolist() == stratified(labels, 0.2, stream(1)).tolist()
    assert stratified(labels, 0.2, stream(1)).tolist() != stratified(labels, 0.2, stream(2)).tolist()
    assert stratified(labels, 1.0, stream(3)).tolist() == list(range(60))


def test_it_learns_and_is_as_sure_as_the_validation_data_allow() -> None:
    train, validation, test = blobs(30), blobs(90, 2), blobs(300, 1)
    fixed, chosen = (class_scores(train, data, test.x, 3) for data in (None, validation))
    for scores in (fixed, chosen):
        assert (scores.argmax(1) == test.y).float().mean() > 0.75
        torch.testing.assert_close(scores.exp().sum(1), torch.ones(300, dtype=torch.float64))
    assert F.nll_loss(chosen, test.y) <= F.nll_loss(fixed, test.y)


def test_scores_do_not_depend_on_the_scale_of_features() -> None:
    train, test = blobs(30), blobs(50, 1)
    large = Labelled(1000 * train.x + 5, train.y)
    result, scaled = class_scores(train, None, test.x, 3), class_scores(large, None, 1000 * test.x + 5, 3)
    torch.testing.assert_close(result, scaled, atol=1e-3, rtol=1e-3)


def test_a_class_without_samples_is_never_predicted() -> None:
    scores = class_scores(blobs(20, classes=2), blobs(9), blobs(10, 1).x, 3)
    assert scores.shape == (10, 3)
    assert (scores.argmax(1) < 2).all()


def test_auroc_of_two_classes_and_of_more() -> None:
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8])
    labels = torch.tensor([0, 0, 1, 1])
    assert macro_auroc(torch.stack([torch.zeros(4), scores], 1), labels) == pytest.approx(75.0)
    three = torch.stack([-scores, scores, torch.zeros(4)], 1)  # the third does not occur
    assert macro_auroc(three, labels) == pytest.approx(75.0)
    assert math.isnan(macro_auroc(three, torch.zeros(4, dtype=torch.int64)))
