"""Logits against Eq. 4 in float64, and Eq. 4-6 end to end."""

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.weighting import Evidence
from polyfed.aggregation.weightings.gca import GCA


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def scores(local, other, **fields):
    return GCA(**fields).log_weights(Evidence(local, "own", {"other": other}, 1, 1))


def naive_scores(local, other, tau=1.0, include_self=False):
    """Eq. 4, term by term, in float64."""
    logits = (local.double() @ other.double().T / tau).tolist()
    scores = []
    for k, row in enumerate(logits):
        terms = [x for j, x in enumerate(row) if include_self or j != k]
        top = max(terms)
        scores.append(row[k] - top - math.log(sum(math.exp(x - top) for x in terms)))
    return torch.tensor(scores, dtype=torch.float64)


def naive_ensemble(sent, other, tau=1.0):
    """Eq. 4-6 in float64; ``sent`` is a list of (vectors, valid)."""
    scores = [naive_scores(u.nan_to_num(), other, tau).masked_fill(~valid, -math.inf) for u, valid in sent]
    alpha = torch.stack(scores).softmax(0)
    return sum(a[:, None] * u.nan_to_num().double() for a, (u, _) in zip(alpha, sent, strict=True))


def close(ours, naive, tolerance=1e-5):
    torch.testing.assert_close(ours.double(), naive, rtol=0, atol=tolerance)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize(("size", "norm", "tau"), [(2, 1, 1), (23, 1, 0.1), (130, 1, 1), (9, 30, 1), (9, 1, 1e-4)])
def test_equals_eq4(size, norm, tau, include_self):
    local, other = norm * unit(size, 6), norm * unit(size, 6, seed=1)
    ours = scores(local, other, tau=tau, include_self=include_self)
    expected = naive_scores(local, other, tau, include_self)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5 * norm**2 / tau)


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


# ---- Eq. 4-6 end to end, for one modality after the other


def stream(sent, other, tau=1.0):
    ensemble = Ensemble(*other.shape)
    for vectors, valid in sent:
        ensemble.add(vectors, scores(vectors, other, tau=tau).masked_fill(~valid, -math.inf), valid)
    return ensemble


@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_ensemble_equals_eq4_to_6_with_rows_missing(clients, tau):
    other = unit(13, 6, seed=99)
    sent = []
    for c in range(clients):
        valid = torch.rand(13, generator=torch.Generator().manual_seed(c)) > 0.3
        valid[0] = True
        sent.append((unit(13, 6, seed=c).masked_fill(~valid[:, None], math.nan), valid))
    found = stream(sent, other, tau).result()
    close(found.values[found.valid], naive_ensemble(sent, other, tau)[found.valid])
    assert torch.equal(found.valid, torch.stack([valid for _, valid in sent]).any(0))
