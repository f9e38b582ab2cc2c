"""Losses of classes against plain loops: margins, separation, distances to prototypes."""

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.classification import (
    class_separation,
    distance_contrast,
    distances,
    margin_cross_entropy,
    prototype_distance,
)


def test_margin_equals_loops():
    torch.manual_seed(4)
    logits, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    losses = []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        z[y] -= 4
        losses.append(math.log(sum(map(math.exp, z))) - z[y])
    assert float(margin_cross_entropy(logits, labels, 4.0)) == pytest.approx(sum(losses) / 5)


def test_margin_zero_is_plain_cross_entropy_and_leaves_the_logits_alone():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    before = logits.clone()
    assert torch.equal(margin_cross_entropy(logits, labels, 0.0), F.cross_entropy(logits, labels))
    margin_cross_entropy(logits, labels, 4.0)
    assert torch.equal(logits, before)


def test_separation_by_hand():
    weight = torch.tensor([[1.0, -5.0], [1.0, 2.0]])
    # relu(W) relu(W)^T = [[1, 1], [1, 5]]
    expected = (math.log(2) + math.log(1 + math.exp(-4))) / 2
    assert float(class_separation(weight)) == pytest.approx(expected, rel=1e-5)


def test_separation_prefers_orthogonal_classes():
    assert class_separation(3 * torch.eye(3)) < class_separation(torch.full((3, 3), 3.0**0.5))


PRESENT = torch.tensor([True, False, True, True])
LABELS = torch.tensor([0, 1, 3, 3, 2, 1])


@pytest.fixture
def data():
    """Features [6, 5] and prototypes [4, 5]."""
    stream = torch.Generator().manual_seed(5)
    return torch.randn(6, 5, generator=stream).double(), torch.randn(4, 5, generator=stream).double()


def distance_by_loops(features, prototypes, kind):
    found = []
    for own, label in zip(features.tolist(), LABELS.tolist(), strict=True):
        if PRESENT[label]:
            to = prototypes[label].tolist()
            square = sum((a - b) ** 2 for a, b in zip(own, to, strict=True))
            dot = sum(a * b for a, b in zip(own, to, strict=True))
            cosine = dot / (math.hypot(*own) * math.hypot(*to))
            found.append({"l2": math.sqrt(square), "mse": square / len(own), "cosine": 1 - cosine}[kind])
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", ["l2", "mse", "cosine"])
def test_the_distance_equals_loops(data, kind):
    found = prototype_distance(*data, PRESENT, LABELS, kind)
    assert float(found) == pytest.approx(distance_by_loops(*data, kind))


def test_only_features_learn_and_only_those_with_a_prototype(data):
    features, prototypes = (values.requires_grad_() for values in data)
    prototype_distance(features, prototypes, PRESENT, LABELS).backward()
    assert prototypes.grad is None
    assert (features.grad.norm(dim=1) > 0).tolist() == [bool(PRESENT[label]) for label in LABELS]
    assert torch.autograd.gradcheck(
        lambda features: prototype_distance(features, prototypes, PRESENT, LABELS), data[0].requires_grad_()
    )


def test_what_stands_in_absent_rows_does_not_matter(data):
    features, prototypes = data
    spoilt = prototypes.clone()
    spoilt[1] = torch.nan
    expected = float(prototype_distance(features, prototypes, PRESENT, LABELS))
    features.requires_grad_()
    loss = prototype_distance(features, spoilt, PRESENT, LABELS)
    loss.backward()
    assert float(loss.detach()) == expected
    assert torch.isfinite(features.grad).all()


def test_without_any_prototype_it_is_zero(data):
    features = data[0].requires_grad_()
    loss = prototype_distance(features, data[1], torch.zeros(4, dtype=torch.bool), LABELS)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not features.grad.any()


def test_it_bounds_the_distance_of_the_class_mean(data):
    """Eq. 8 is d(mean of a class, its prototype)."""
    features, prototypes = data
    one_class = torch.zeros(6, dtype=torch.long)
    for kind in ("l2", "mse"):
        whole = prototype_distance(features, prototypes, PRESENT, one_class, kind)
        mean = prototype_distance(features.mean(0, keepdim=True), prototypes, PRESENT, one_class[:1], kind)
        assert float(mean) < float(whole)


def test_distances_equal_loops_and_small_ones_are_not_lost(data):
    features, prototypes = data
    found = distances(features, prototypes)
    for k, own in enumerate(features.tolist()):
        for c, to in enumerate(prototypes.tolist()):
            assert float(found[k, c]) == pytest.approx(math.dist(own, to))
    far = torch.full((1, 8), 1000.0)
    assert float(distances(far, far + 1e-3)) == pytest.approx(math.sqrt(8) * 1e-3, rel=0.05)


def test_the_gradient_of_no_distance_is_zero():
    here = torch.ones(1, 3, requires_grad=True)
    distances(here, torch.ones(1, 3)).sum().backward()
    assert not here.grad.any()


@pytest.mark.parametrize("margin", [0.0, 0.7, 50.0])
def test_the_contrast_equals_loops(data, margin):
    features, prototypes = data
    losses = []
    for own, label in zip(features.tolist(), LABELS.tolist(), strict=True):
        logits = [-math.dist(own, to) - (margin if c == label else 0) for c, to in enumerate(prototypes.tolist())]
        losses.append(-math.log(math.exp(logits[label]) / sum(map(math.exp, logits))))
    found = distance_contrast(features, prototypes, LABELS, margin)
    assert float(found) == pytest.approx(sum(losses) / len(losses))


def test_names_of_classes_and_places_in_space_do_not_matter(data):
    features, prototypes = data
    expected = float(distance_contrast(features, prototypes, LABELS, 0.7))
    order = torch.tensor([2, 0, 3, 1])  # new row k was row order[k]
    assert float(distance_contrast(features, prototypes[order], order.argsort()[LABELS], 0.7)) == pytest.approx(
        expected
    )
    assert float(distance_contrast(features + 3, prototypes + 3, LABELS, 0.7)) == pytest.approx(expected)
    assert float(distance_contrast(features, prototypes, LABELS, 0.8)) > expected


def test_a_single_class_teaches_nothing(data):
    loss = distance_contrast(data[0], data[1][:1].requires_grad_(), torch.zeros(6, dtype=torch.long), 1.0)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
