"""Logits against Eq. 4 in float64, and Eq. 4-6 end to end."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from naive import Largest
from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.tiles import TileSize
from polyfed.aggregation.weightings.gca import contrastive_scores
from polyfed.core.errors import ConfigError, PayloadError

SMALL = TileSize(4, 5)


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


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
@pytest.mark.parametrize("size", [2, 3, 5, 10, 23])
def test_equals_eq4_whether_or_not_blocks_divide_the_public_set(size, include_self):
    local, other = unit(size, 6), unit(size, 6, seed=1)
    ours = contrastive_scores(local, other, include_self=include_self, blocks=SMALL)
    close(ours, naive_scores(local, other, include_self=include_self))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 30),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.1, 0.02]),
    st.integers(0, 9),
)
def test_any_block_size_and_temperature(size, rows, columns, tau, seed):
    local, other = unit(size, 4, seed=seed), unit(size, 4, seed=seed + 100)
    ours = contrastive_scores(local, other, tau=tau, blocks=TileSize(rows, columns))
    close(ours, naive_scores(local, other, tau), 1e-5 / min(tau, 1))


def test_default_blocks_at_a_size_beyond_one_tile():
    local, other = unit(1300, 8), unit(1300, 8, seed=1)
    close(contrastive_scores(local, other), naive_scores(local, other))


@pytest.mark.parametrize("tau", [1e-3, 1e-4])
def test_cold_temperatures_neither_overflow_nor_vanish(tau):
    local, other = unit(9, 4), unit(9, 4, seed=1)
    ours = contrastive_scores(local, other, tau=tau, blocks=SMALL)
    torch.testing.assert_close(ours.double(), naive_scores(local, other, tau), rtol=1e-5, atol=1e-3)


def test_vectors_of_any_norm():
    local, other = 30 * unit(9, 4), 20 * unit(9, 4, seed=1)
    ours = contrastive_scores(local, other, blocks=SMALL)
    torch.testing.assert_close(ours.double(), naive_scores(local, other), rtol=1e-5, atol=1e-3)


def test_excluding_self_keeps_precision_where_the_positive_dominates():
    # log(sum - own term) would lose all digits here: the positive is e^50 times the rest
    z = torch.eye(6)
    expected = 50 - math.log(5)
    assert contrastive_scores(z, z, tau=1 / 50).tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_two_orthogonal_anchors_by_hand():
    # a lower cosine to the partner can still score higher: methods.md 10.4, item 4
    anchors = torch.eye(2)
    with_self = [
        float(contrastive_scores(torch.tensor([row, [0.0, 1.0]]), anchors, include_self=True)[0])
        for row in ([0.9, -0.436], [1.0, 0.0])
    ]
    assert with_self == pytest.approx([-0.233, -0.313], abs=1e-3)


@pytest.mark.parametrize("valid", [[True] * 7, [False] * 7, [True, False, True, True, False, False, True]])
def test_rows_not_sent_score_minus_infinity_and_are_not_looked_at(valid):
    mask = torch.tensor(valid)
    local, other = unit(7, 4), unit(7, 4, seed=1)
    spoiled = local.masked_fill(~mask[:, None], math.nan)
    expected = naive_scores(local, other).masked_fill(~mask, -math.inf)
    close(contrastive_scores(spoiled, other, valid=mask, blocks=SMALL), expected)


def test_half_precision_uploads_are_scored_in_fp32():
    local, other = unit(9, 4).half(), unit(9, 4, seed=1)
    ours = contrastive_scores(local, other)
    assert ours.dtype == torch.float32
    close(ours, naive_scores(local, other))


def test_permuting_public_samples_permutes_scores():
    local, other, order = unit(11, 4), unit(11, 4, seed=1), torch.randperm(11)
    torch.testing.assert_close(
        contrastive_scores(local[order], other[order], blocks=SMALL),
        contrastive_scores(local, other, blocks=SMALL)[order],
    )


def test_never_holds_public_times_public():
    local, other = unit(1100, 4), unit(1100, 4, seed=1)
    with Largest() as seen:
        contrastive_scores(local, other)
    assert seen.elements <= 256 * 1024


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"other": torch.zeros(4, 4)}, PayloadError, "same public set"),
        ({"tau": 0.0}, ConfigError, "tau is 0"),
        ({"tau": math.nan}, ConfigError, "tau is nan"),
        ({"local": torch.ones(1, 4), "other": torch.ones(1, 4)}, ConfigError, "1 sample"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_requests_are_refused(change, error, match):
    with pytest.raises(error, match=match):
        contrastive_scores(**({"local": torch.zeros(5, 4), "other": torch.zeros(5, 4)} | change))


def test_one_sample_with_self_scores_zero():
    one = torch.ones(1, 4) / 2
    ours = contrastive_scores(one, one, include_self=True)
    assert ours.tolist() == pytest.approx([0.0], abs=1e-6)


# ---- Eq. 4-6 end to end, for one modality after the other


def stream(sent, other, tau=1.0):
    ensemble = Ensemble(*other.shape)
    for vectors, valid in sent:
        ensemble.add(vectors, contrastive_scores(vectors, other, tau=tau, valid=valid, blocks=SMALL))
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


def test_clients_without_a_modality_are_simply_absent():
    image, text = unit(8, 4, seed=50), unit(8, 4, seed=51)
    every = torch.ones(8, dtype=torch.bool)
    clients = [
        {"a": unit(8, 4, seed=0)},
        {"b": unit(8, 4, seed=1)},
        {"a": unit(8, 4, seed=2), "b": unit(8, 4, seed=3)},
    ]
    for modality, other in (("a", text), ("b", image)):
        sent = [(client[modality], every) for client in clients if modality in client]
        assert len(sent) == 2
        close(stream(sent, other).result().values, naive_ensemble(sent, other))


def test_permuting_clients_permutes_weights_and_keeps_the_ensemble():
    other, every = unit(9, 4, seed=9), torch.ones(9, dtype=torch.bool)
    sent, order = [(unit(9, 4, seed=c), every) for c in range(4)], [2, 0, 3, 1]
    first, second = stream(sent, other, 0.1), stream([sent[c] for c in order], other, 0.1)
    torch.testing.assert_close(first.result().values, second.result().values, rtol=0, atol=1e-6)
    torch.testing.assert_close(first.weights()[order], second.weights())


def test_equal_clients_weigh_equally_and_a_wrong_sample_weighs_less():
    anchors = F.normalize(torch.eye(12, 12) + 0.05 * unit(12, 12), dim=1)
    right, every = F.normalize(anchors + 0.1 * unit(12, 12, seed=1), dim=1), torch.ones(12, dtype=torch.bool)
    torch.testing.assert_close(stream([(right, every)] * 3, anchors).weights(), torch.full((3, 12), 1 / 3))
    wrong = right.clone()
    wrong[4] = right[7]
    weights = stream([(right, every), (wrong, every), (right, every)], anchors).weights()
    assert weights[1, 4] < 0.8 * weights[0, 4]
    torch.testing.assert_close(weights[:, 7], torch.full((3,), 1 / 3))


def test_one_client_is_the_ensemble():
    vectors, other = unit(6, 4), unit(6, 4, seed=1)
    torch.testing.assert_close(stream([(vectors, None)], other).result().values, vectors)
