from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.lab.downstream.probe import macro_auroc
from polyfed.lab.downstream.probes.classification import Labelled, class_scores, stratified
from polyfed.lab.downstream.probes.segmentation import DecoderFit, fit_decoder


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
    found, scaled = class_scores(train, None, test.x, 3), class_scores(large, None, 1000 * test.x + 5, 3)
    torch.testing.assert_close(found, scaled, atol=1e-3, rtol=1e-3)


def test_a_class_that_nobody_had_is_never_predicted() -> None:
    few = blobs(20, classes=2)
    scores = class_scores(few, blobs(9), blobs(10, 1).x, 3)
    assert scores.shape == (10, 3)
    assert (scores.argmax(1) < 2).all()


def test_auroc_of_two_classes_and_of_more() -> None:
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8])
    labels = torch.tensor([0, 0, 1, 1])
    assert macro_auroc(torch.stack([torch.zeros(4), scores], 1), labels) == pytest.approx(75.0)
    three = torch.stack([-scores, scores, torch.zeros(4)], 1)  # the third does not occur
    assert macro_auroc(three, labels) == pytest.approx(75.0)
    assert math.isnan(macro_auroc(three, torch.zeros(4, dtype=torch.int64)))


class Pictures:
    """Pictures whose maps and masks are one number."""

    def maps(self, index: Tensor) -> Tensor:
        return torch.zeros(len(index), 1)

    def truth(self, index: Tensor) -> Tensor:
        return torch.zeros(len(index))


@pytest.mark.parametrize(
    ("values", "epochs", "kept"), [([3.0, 1.0, math.nan, 0.5, 0.7, 0.5], 6, 4), ([2.0, 1.0], 2, 2)]
)
def test_stopping_keeps_the_lowest_and_waits_its_patience(values: list[float], epochs: int, kept: int) -> None:
    layer, seen = nn.Linear(1, 1), [0]
    told: Iterator[float] = iter(values + [9.0] * 9)

    def validation() -> float:
        seen[0] += 1
        nn.init.constant_(layer.weight, seen[0])
        return next(told)

    def fitted(watch: object, most: int) -> None:
        fit = DecoderFit(lr=1e-9, weight_decay=0.0, epochs=most, patience=2, batch_size=2)
        fit_decoder(layer, Pictures(), torch.arange(2), watch, lambda x, _: x.sum(), fit, stream())  # type: ignore[arg-type]

    fitted(validation, max(epochs, len(values)))
    assert (seen[0], round(layer.weight.item())) == (epochs, kept)
    fitted(None, 3)
    assert round(layer.weight.item()) == kept  # without validation the last state stays
