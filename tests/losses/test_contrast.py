import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.losses.contrast import inter_modal, intra_modal


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


def test_inter_modal_is_the_cross_entropy_against_the_public_set(public):
    u, anchors, positive = public
    torch.testing.assert_close(inter_modal(u, anchors, positive), F.cross_entropy(u @ anchors.T, positive))


def test_inter_modal_gradient_reaches_u_only(public):
    u, anchors, positive = public
    anchors = anchors.clone().requires_grad_()
    inter_modal(u, anchors, positive).backward()
    assert anchors.grad is None
    assert u.grad.abs().sum() > 0


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


def test_inter_modal_autocast_computes_in_fp32(public):
    u, anchors = public[0].detach().float(), public[1].float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = inter_modal(u, anchors, public[2])
    assert torch.equal(inside, inter_modal(u, anchors, public[2]))


def test_nan_is_not_hidden(public):
    u = public[0].detach().clone()
    u[1] = math.nan
    assert torch.isnan(inter_modal(u, *public[1:]))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


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


def test_intra_modal_is_log_two_where_both_are_equal_and_stable_far_out():
    z = torch.eye(3)
    assert float(intra_modal(z, z, z)) == pytest.approx(math.log(2))
    assert float(intra_modal(z, -z, z, tau=1e-3)) == pytest.approx(2000.0)
    assert float(intra_modal(z, z, -z, tau=1e-3)) == 0.0


def test_intra_modal_gradient_reaches_u_only():
    u, g, p = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    intra_modal(u, g, p).backward()
    assert u.grad is not None
    assert g.grad is None
    assert p.grad is None
