import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.soft_contrastive import SoftContrastive, soft_contrastive


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
def pairs():
    torch.manual_seed(0)
    u, v = (F.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2))
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (9.0, 7.0))
    return u, v, b, a


@pytest.mark.parametrize("items", [None, [0, 0, 1, 2, 2, 2, 3]])
def test_value_and_gradients_equal_the_pair_by_pair_form(pairs, items):
    ids = None if items is None else torch.tensor(items)
    ours = soft_contrastive(*pairs, ids)
    naive = pair_by_pair(*pairs, items)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(torch.autograd.grad(ours, pairs), torch.autograd.grad(naive, pairs))


def test_mean_is_the_sum_over_the_number_of_terms(pairs):
    torch.testing.assert_close(soft_contrastive(*pairs, reduction="mean") * 2 * 49, soft_contrastive(*pairs))


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
