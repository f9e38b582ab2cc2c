import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from polyfed.optim.adamp import AdamP


class Naive:
    """AdamP of one tensor with Python branches, from the paper's Algorithm 2."""

    def __init__(self, weight, lr, wd=0.0, betas=(0.9, 0.999), eps=1e-8, delta=0.1, ratio=0.1):
        self.w, self.lr, self.wd, self.betas, self.eps = weight.clone(), lr, wd, betas, eps
        self.delta, self.ratio = delta, ratio
        self.m, self.v, self.t, self.kinds = torch.zeros_like(weight), torch.zeros_like(weight), 0, []

    def step(self, g):
        (b1, b2), self.t = self.betas, self.t + 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        q = (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        form = self.form(g)
        self.kinds.append(form)
        if form == "channel":
            for row in range(len(self.w)):
                q[row] -= (self.w[row] * q[row]).sum() / (self.w[row] ** 2).sum() * self.w[row]
        elif form == "layer":
            q = q - (self.w * q).sum() / (self.w**2).sum() * self.w
        self.w = (1 - self.lr * self.wd * (self.ratio if form else 1)) * self.w - self.lr * q

    def form(self, g):
        if self.w.ndim < 2:
            return None
        rows = [abs(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in zip(self.w, g, strict=True)]
        if max(rows) < self.delta / math.sqrt(self.w[0].numel()):
            return "channel"
        full = abs(F.cosine_similarity(self.w.flatten(), g.flatten(), dim=0))
        return "layer" if full < self.delta / math.sqrt(self.w.numel()) else None


def orthogonal(weight, gradient, how):
    """``gradient`` without its part along ``weight``: of each channel, of the layer, or not at all."""
    if how == "channel":
        w, g = weight.flatten(1), gradient.flatten(1)
        return (g - (w * g).sum(1, keepdim=True) / (w * w).sum(1, keepdim=True) * w).view_as(weight)
    if how == "layer":
        return gradient - (weight * gradient).sum() / (weight * weight).sum() * weight
    return gradient


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        *(((how, shape)) for how in ("channel", "layer", "none") for shape in ((4, 3), (3, 2, 2, 2))),
        ("none", (5,)),
        ("none", ()),
    ],
)
def test_equals_the_naive_form(how, shape, decay):
    torch.manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    ours = AdamP([weight], lr=0.05, weight_decay=decay)
    naive = Naive(weight.detach(), 0.05, decay)
    for _ in range(6):
        gradient = orthogonal(weight.detach(), torch.randn(shape, dtype=torch.float64), how)
        weight.grad = gradient
        ours.step()
        naive.step(gradient)
        torch.testing.assert_close(weight.detach(), naive.w)
    assert how in naive.kinds or (how == "none" and None in naive.kinds)


@pytest.mark.parametrize("spoil", ["weight", "gradient"])
def test_zero_rows_stay_finite(spoil):
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.grad = torch.randn(3, 4)
    (weight.data if spoil == "weight" else weight.grad)[1] = 0
    AdamP([weight], lr=0.1).step()
    assert torch.isfinite(weight).all()


def test_parameters_without_gradient_are_left_alone():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    AdamP([weight], lr=0.1, weight_decay=1.0).step()
    assert torch.equal(weight.detach(), torch.ones(2, 2))


def test_weights_of_different_types_share_an_optimiser():
    torch.manual_seed(8)
    values = [torch.randn(4, 3), torch.randn(3, 2, dtype=torch.float64), torch.randn(5)]
    together = [torch.nn.Parameter(value.clone()) for value in values]
    alone = [torch.nn.Parameter(value.clone()) for value in values]
    optimizers = [AdamP(together, lr=0.1), *(AdamP([weight], lr=0.1) for weight in alone)]
    for _ in range(3):
        for weight, other in zip(together, alone, strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.slow
def test_a_step_and_its_state_leave_the_compiler_unimported():
    code = """
import sys, torch
from polyfed.optim.adamp import AdamP
weight = torch.nn.Parameter(torch.ones(2, 3))
optimizer = AdamP([weight])
weight.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("how", ["channel", "layer", "none"])
def test_a_table_that_no_cache_holds_is_updated_as_a_small_one(how):
    torch.manual_seed(0)
    weight = torch.randn(700, 256)
    naive, parameter = Naive(weight, lr=0.1), torch.nn.Parameter(weight.clone())
    gradient = orthogonal(weight, torch.randn_like(weight), how)
    parameter.grad = gradient.clone()
    AdamP([parameter], lr=0.1).step()
    naive.step(gradient)
    torch.testing.assert_close(parameter.detach(), naive.w, atol=1e-5, rtol=1e-4)
