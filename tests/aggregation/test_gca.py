"""Logits against Eq. 4 in float64, and Eq. 4-6 end to end."""

import math

import pytest
import torch

from polyfed.aggregation.weighting import Evidence
from polyfed.aggregation.weightings.gca import GCA


def scores(local, other, **fields):
    return GCA(**fields).log_weights(Evidence(local, "own", {"other": other}, 1, 1))


def test_excluding_self_keeps_precision_where_the_positive_dominates():
    # log(sum - own term) would lose all digits here: the positive is e^50 times the rest
    z = torch.eye(6)
    expected = 50 - math.log(5)
    assert scores(z, z, tau=1 / 50).tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_two_orthogonal_anchors_by_hand():
    # a lower cosine to the partner can still score higher: methods.md 10.4, item 4
    anchors = torch.eye(2)
    with_self = [
        float(scores(torch.tensor([row, [0.0, 1.0]]), anchors, include_self=True)[0])
        for row in ([0.9, -0.436], [1.0, 0.0])
    ]
    assert with_self == pytest.approx([-0.233, -0.313], abs=1e-3)


def test_one_sample_with_self_scores_zero():
    one = torch.ones(1, 4) / 2
    ours = scores(one, one, include_self=True)
    assert ours.tolist() == pytest.approx([0.0], abs=1e-6)


