"""Losses on distances to prototypes against plain loops; classes without one, gradients, half precision."""

import math

import pytest
import torch

from polyfed.losses.classification import distance_contrast, distances, prototype_distance

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


def test_the_gradient_of_the_contrast_is_that_of_the_formula(data):
    features, prototypes = data
    assert torch.autograd.gradcheck(
        lambda prototypes: distance_contrast(features, prototypes, LABELS, 0.7), prototypes.requires_grad_()
    )


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


def test_inside_autocast_they_are_in_full_precision(data):
    features, prototypes = (values.float() for values in data)
    halves = features.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pull = prototype_distance(halves, prototypes, PRESENT, LABELS)
        contrast = distance_contrast(halves, prototypes, LABELS, 0.7)
    assert pull.dtype == contrast.dtype == torch.float32
    assert float(pull) == pytest.approx(
        float(prototype_distance(halves.float(), prototypes, PRESENT, LABELS)), rel=1e-6
    )
    assert float(contrast) == pytest.approx(float(distance_contrast(halves.float(), prototypes, LABELS, 0.7)), rel=1e-6)
