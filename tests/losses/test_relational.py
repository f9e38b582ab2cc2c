"""Relational distillation against naive loops and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.relational import relational_kl


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosines(one: Tensor, other: Tensor) -> Tensor:
    return F.normalize(one, dim=1) @ F.normalize(other, dim=1).T


def everybody(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool)


def others(count: int) -> Tensor:
    return ~torch.eye(count, dtype=torch.bool)


def by_loops(source: Tensor, target: Tensor, taught: Tensor, known: Tensor, tau: float) -> float:
    losses = []
    for s in range(len(source)):
        among = [t for t in range(len(target)) if known[s, t]]
        if len(among) < 2:
            continue
        own = [float(source[s] @ target[t] / (source[s].norm() * target[t].norm())) / tau for t in among]
        said = [float(taught[s, t]) / tau for t in among]
        q, p = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (own, said))
        losses.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("tau", [0.05, 0.1, 2.0])
@pytest.mark.parametrize("hidden", [0.0, 0.5, 0.8, 1.0])
def test_equals_loops(tau: float, hidden: float) -> None:
    source, target, taught = rows(6, 1), rows(6, 2), cosines(rows(6, 3), rows(6, 4))
    known = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) >= hidden
    expected = by_loops(source, target, taught, known, tau)
    assert float(relational_kl(source, target, taught, known, tau)) == pytest.approx(expected, abs=1e-10)


def test_three_samples_by_hand() -> None:
    """Only sample 0 tells the others apart, by cosine 1 and 0 against log 3 and 0 at temperature 1."""
    source = torch.tensor([[1.0, 0], [1.0, 0], [0.0, 1]])
    known = torch.tensor([[False, True, True], [False] * 3, [False] * 3])
    taught = torch.tensor([[0.0, math.log(3), 0.0]] * 3)
    e = math.e
    expected = 0.75 * math.log(0.75 / (e / (1 + e))) + 0.25 * math.log(0.25 * (1 + e))
    assert float(relational_kl(source, source, taught, known, 1.0)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("known", [torch.zeros(5, 5, dtype=torch.bool), torch.eye(5, dtype=torch.bool)])
def test_nothing_to_compare_is_a_loss_of_zero_without_gradient(known: Tensor) -> None:
    source = rows(5, 1).requires_grad_()
    loss = relational_kl(source, source, torch.zeros(5, 5), known, 0.1)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert source.grad is not None
    assert not source.grad.any()


def test_full_precision_inside_autocast() -> None:
    source, taught = rows(6, 1).float(), cosines(rows(6, 3), rows(6, 4)).float()
    expected = relational_kl(source, source, taught, everybody(6), 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(relational_kl(source, source, taught, everybody(6), 0.1), expected)
