"""Contrasts against plain loops: with what others see (CreamFL, MOON, FedMKD), InfoNCE and soft contrast."""

import math

import pytest
import torch
from torch.nn import functional as F

from naive import Largest, cosine, dot, softmax
from polyfed.losses.contrast import inter_modal, intra_modal, model_contrast, queue_contrast
from polyfed.losses.info_nce import InfoNCE, info_nce
from polyfed.losses.soft_contrastive import SoftContrastive, soft_contrastive


def inter_by_loops(u, anchors, positive, tau, items, include_self):
    losses = []
    for row, k in zip(u, positive.tolist(), strict=True):
        own = row @ anchors[k] / tau
        terms = [
            row @ anchors[j] / tau
            for j in range(len(anchors))
            if (include_self if j == k else items is None or items[j] != items[k])
        ]
        losses.append(torch.stack(terms).logsumexp(0) - own if terms else own * 0)
    return torch.stack(losses).mean()


@pytest.fixture
def public():
    torch.manual_seed(2)
    u = F.normalize(torch.randn(5, 6, dtype=torch.float64), dim=1).requires_grad_()
    return u, F.normalize(torch.randn(23, 6, dtype=torch.float64), dim=1), torch.tensor([3, 22, 0, 9, 9])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("siblings", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 23, 100])
def test_inter_modal_equals_loops(public, include_self, siblings, chunk):
    items = torch.arange(23) // 4 if siblings else None
    ours = inter_modal(*public, 0.5, items=items, include_self=include_self, chunk=chunk)
    naive = inter_by_loops(*public, 0.5, items, include_self)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, public[0]), torch.autograd.grad(naive, public[0]))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("siblings", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_distinct_anchors_with_counts_equal_loops_over_all_samples(public, include_self, siblings, chunk):
    u, anchors, positive = public
    positions = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 6, 6, 6, 6, 6, 7])
    distinct, counts = anchors[:8], torch.bincount(positions).double()
    items = torch.arange(8) if siblings else None
    ours = inter_modal(
        u, distinct, positions[positive], 0.5, items=items, include_self=include_self, counts=counts, chunk=chunk
    )
    naive = inter_by_loops(u, distinct[positions], positive, 0.5, positions if siblings else None, include_self)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, u), torch.autograd.grad(naive, u))
    with torch.no_grad():
        assert float(
            inter_modal(u, distinct, positions[positive], 0.5, items=items, include_self=include_self, counts=counts)
        ) == pytest.approx(float(naive))


@pytest.mark.parametrize("tau", [1.0, 0.01, 0.001])
def test_inter_modal_survives_cold_temperatures(public, tau):
    u = public[0].detach().float().requires_grad_()
    loss = inter_modal(u, public[1].float(), public[2], tau, chunk=5)
    loss.backward()
    torch.testing.assert_close(loss.double(), inter_modal(*public, tau), rtol=1e-4, atol=1e-4)
    assert torch.isfinite(u.grad).all()


def test_a_row_without_negatives_counts_as_zero(public):
    u, anchors, positive = public
    loss = inter_modal(u, anchors, positive, items=torch.zeros(23, dtype=torch.long), include_self=False)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(u.grad.abs().sum()) == 0.0


def test_inter_modal_never_holds_batch_times_public():
    torch.manual_seed(0)
    u, anchors = torch.randn(64, 2).requires_grad_(), torch.randn(2000, 2)
    with Largest() as seen:
        inter_modal(u, anchors, torch.arange(64), items=torch.arange(2000) // 5, chunk=100).backward()
    assert seen.elements <= max(64 * 100, 2000 * 2)


def test_intra_modal_equals_loops(public):
    u, anchors, _ = public
    consensus, previous = anchors[:5], anchors[5:10]
    losses = []
    for row, g, p in zip(u, consensus, previous, strict=True):
        up, down = torch.exp(row @ g / 0.5), torch.exp(row @ p / 0.5)
        losses.append(-torch.log(up / (up + down)))
    naive = torch.stack(losses).mean()
    ours = intra_modal(u, consensus, previous, 0.5)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, u), torch.autograd.grad(naive, u))


def model_contrast_by_loops(z, received, previous, tau):
    shares = [
        softmax([cosine(own, g) / tau, cosine(own, p) / tau])
        for own, g, p in zip(z.tolist(), received.tolist(), previous.tolist(), strict=True)
    ]
    return sum(-math.log(towards) for towards, _ in shares) / len(shares)


@pytest.fixture
def three():
    torch.manual_seed(3)
    return tuple(3 * torch.randn(5, 4, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_model_contrast_equals_loops(three, tau):
    assert float(model_contrast(*three, tau)) == pytest.approx(model_contrast_by_loops(*three, tau))


def test_it_is_log_two_where_both_models_agree_and_stable_far_out():
    z = torch.eye(3)
    assert float(model_contrast(z, z, z)) == pytest.approx(math.log(2))
    assert float(model_contrast(z, -z, z, tau=1e-3)) == pytest.approx(2000.0)
    assert float(model_contrast(z, z, -z, tau=1e-3)) == 0.0


def queue_by_loops(student, targets, queue, items, queued, tau):
    losses = []
    for k, row in enumerate(student.tolist()):
        candidates = [*targets.tolist(), *queue.tolist()]
        seen = [k, *(j for j, item in enumerate([*items.tolist(), *queued.tolist()]) if item != items[k])]
        losses.append(-math.log(softmax([dot(row, candidates[j]) / tau for j in seen])[0]))
    return sum(losses) / len(losses)


@pytest.fixture
def rows():
    torch.manual_seed(2)
    return [F.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (4, 4, 7)]


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("items", [[0, 1, 2, 3], [0, 0, 1, 2]])
def test_queue_contrast_equals_loops(rows, tau, items):
    items, queued = torch.tensor(items), torch.tensor([9, 0, 8, 7, 2, 6, 5])
    expected = queue_by_loops(*rows, items, queued, tau)
    assert float(queue_contrast(*rows, items, queued, tau)) == pytest.approx(expected, abs=1e-12)


def test_without_a_queue_the_batch_is_left_and_one_item_has_no_contrast(rows):
    student, targets, queue = rows
    none = torch.zeros(0, dtype=torch.int64)
    assert float(queue_contrast(student, targets, queue[:0], torch.arange(4), none, 0.1)) == pytest.approx(
        queue_by_loops(student, targets, queue[:0], torch.arange(4), none, 0.1), abs=1e-12
    )
    assert float(queue_contrast(student, targets, queue[:0], torch.zeros(4, dtype=torch.int64), none)) == 0.0


def by_loops(u, v, scale, items=None, weight=0.5):
    n, total = len(u), 0.0
    for left, right, share in ((u, v, weight), (v, u, 1 - weight)):
        for i in range(n):
            seen = [j for j in range(n) if j == i or items is None or items[i] != items[j]]
            logits = {j: scale * float(left[i] @ right[j]) for j in seen}
            total += share * (math.log(sum(math.exp(x) for x in logits.values())) - logits[i])
    return total / n


@pytest.fixture
def pairs():
    torch.manual_seed(1)
    return tuple(F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1) for _ in range(2))


@pytest.mark.parametrize("items", [None, [0, 0, 1, 1, 1, 2], [5] * 6])
def test_info_nce_equals_loops(pairs, items):
    ids = None if items is None else torch.tensor(items)
    assert float(info_nce(*pairs, 4.0, ids)) == pytest.approx(by_loops(*pairs, 4.0, items), abs=1e-9)


@pytest.mark.parametrize("weight", [0.0, 0.75, 1.0])
def test_directions_are_weighted(pairs, weight):
    expected = by_loops(*pairs, 4.0, weight=weight)
    assert float(info_nce(*pairs, 4.0, weight=weight)) == pytest.approx(expected, abs=1e-9)
    assert float(info_nce(*reversed(pairs), 4.0, weight=1 - weight)) == pytest.approx(expected, abs=1e-9)
    loss = InfoNCE(0.25, weight=weight, reduction="sum")
    assert float(loss(*pairs).detach()) == pytest.approx(2 * expected, abs=1e-5)


def test_starts_at_the_temperature_and_may_be_fixed():
    assert float(InfoNCE(0.07).scale) == pytest.approx(14.2857, abs=1e-3)
    assert list(InfoNCE(learnable=False).parameters()) == []
    assert "log_scale" in InfoNCE(learnable=False).state_dict()


@pytest.mark.parametrize(("stored", "expected"), [(9.0, 100.0), (-3.0, 1.0)])
def test_scale_is_brought_back_into_range_and_can_leave_the_bound(pairs, stored, expected):
    loss = InfoNCE()
    loss.log_scale.data.fill_(stored)
    u, v = (side.float() for side in pairs)
    loss(u, v).backward()
    assert float(loss.scale.detach()) == pytest.approx(expected, rel=1e-5)
    assert loss.log_scale.grad is not None
    assert float(loss.log_scale.grad) != 0.0


def pair_by_pair(u, v, shift, scale, items=None):
    """The sum over both directions, one pair at a time, from methods.md 0.2."""
    total = torch.zeros((), dtype=torch.float64)
    for left, right in ((u, v), (v, u)):
        for i in range(len(left)):
            for j in range(len(right)):
                if items is not None and i != j and items[i] == items[j]:
                    continue
                s = shift - scale * ((left[i] - right[j]).square().sum() + 1e-6).sqrt()
                m = 1 if i == j else -1
                total = total + torch.logaddexp(s, -s) - m * s
    return total


@pytest.fixture
def four():
    torch.manual_seed(0)
    u, v = (F.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2))
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (9.0, 7.0))
    return u, v, b, a


@pytest.mark.parametrize("items", [None, [0, 0, 1, 2, 2, 2, 3]])
def test_value_and_gradients_equal_the_pair_by_pair_form(four, items):
    ours = soft_contrastive(*four, None if items is None else torch.tensor(items))
    naive = pair_by_pair(*four, items)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, four), torch.autograd.grad(naive, four))


def test_mean_is_the_sum_over_the_number_of_terms(four):
    torch.testing.assert_close(soft_contrastive(*four, reduction="mean") * 2 * 49, soft_contrastive(*four))


def test_extreme_scores_stay_finite():
    u = torch.tensor([[100.0, 0.0], [-100.0, 0.0]], requires_grad=True)
    loss = SoftContrastive()(u, -u.detach())
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(u.grad).all()


def test_coinciding_representations_have_a_finite_gradient():
    z = torch.ones(3, 4, requires_grad=True)
    SoftContrastive()(z, z.detach()).backward()
    assert torch.isfinite(z.grad).all()
