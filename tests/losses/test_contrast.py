"""Contrasts with what others see, against plain loops: CreamFL, MOON, FedMKD."""

import math

import pytest
import torch
from torch.nn import functional as F

from naive import Largest, cosine
from polyfed.losses.contrast import inter_modal, intra_modal, model_contrast, queue_contrast


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
    anchors = F.normalize(torch.randn(23, 6, dtype=torch.float64), dim=1)
    return u, anchors, torch.tensor([3, 22, 0, 9, 9])


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
    places = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 6, 6, 6, 6, 6, 7])
    distinct, counts = anchors[:8], torch.bincount(places).double()
    items = torch.arange(8) if siblings else None
    ours = inter_modal(
        u, distinct, places[positive], 0.5, items=items, include_self=include_self, counts=counts, chunk=chunk
    )
    naive = inter_by_loops(u, distinct[places], positive, 0.5, places if siblings else None, include_self)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, u), torch.autograd.grad(naive, u))
    with torch.no_grad():
        assert float(
            inter_modal(u, distinct, places[positive], 0.5, items=items, include_self=include_self, counts=counts)
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
    losses = []
    for own, g, p in zip(z.tolist(), received.tolist(), previous.tolist(), strict=True):
        towards, away = math.exp(cosine(own, g) / tau), math.exp(cosine(own, p) / tau)
        losses.append(-math.log(towards / (towards + away)))
    return sum(losses) / len(losses)


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
        own, rest = None, 0.0
        candidates = [
            *zip(targets.tolist(), items.tolist(), strict=True),
            *zip(queue.tolist(), queued.tolist(), strict=True),
        ]
        for j, (target, item) in enumerate(candidates):
            logit = sum(a * b for a, b in zip(row, target, strict=True)) / tau
            if j == k:
                own = logit
            elif item != items.tolist()[k]:
                rest += math.exp(logit)
        losses.append(math.log(math.exp(own) + rest) - own)
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


def test_without_a_queue_the_batch_is_left_and_one_item_is_no_contrast(rows):
    student, targets, queue = rows
    none = torch.zeros(0, dtype=torch.int64)
    found = queue_contrast(student, targets, queue[:0], torch.arange(4), none, 0.1)
    assert float(found) == pytest.approx(
        queue_by_loops(student, targets, queue[:0], torch.arange(4), none, 0.1), abs=1e-12
    )
    assert float(queue_contrast(student, targets, queue[:0], torch.zeros(4, dtype=torch.int64), none)) == 0.0
