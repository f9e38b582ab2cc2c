"""Distances and divergences of students and teachers, of rows and of relations, against plain loops."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from naive import kl
from polyfed.losses.distillation import (
    DISTILLATIONS,
    Distillation,
    relational_kl,
    score_kl,
    similarity_kl,
    squared_distance,
)


def by_loops(name, student, target, rows):
    student, values = student.detach(), []
    for k in rows:
        difference = (student[k] - target[k]).tolist()
        squared = sum(x * x for x in difference)
        dot = float(student[k] @ target[k])
        norms = math.sqrt(float(student[k] @ student[k]) * float(target[k] @ target[k]))
        actual = {
            "l2": math.sqrt(squared),
            "mse": squared / len(difference),
            "l1": sum(abs(x) for x in difference) / len(difference),
            "cosine": 1 - dot / norms,
        }
        values.append(actual[name])
    return sum(values) / len(values) if values else 0.0


@pytest.fixture
def both():
    torch.manual_seed(3)
    return torch.randn(4, 5, dtype=torch.float64).requires_grad_(), torch.randn(4, 5, dtype=torch.float64)


def test_every_name_has_a_distance():
    assert set(DISTILLATIONS) == set(get_args(Distillation))


@pytest.mark.parametrize("name", get_args(Distillation))
@pytest.mark.parametrize("valid", [None, [True, False, True, False], [False] * 4])
def test_equals_loops_over_valid_samples(both, name, valid):
    mask = None if valid is None else torch.tensor(valid)
    rows = [k for k in range(4) if valid is None or valid[k]]
    assert float(DISTILLATIONS[name](*both, mask).detach()) == pytest.approx(by_loops(name, *both, rows), abs=1e-12)


@pytest.mark.parametrize("name", get_args(Distillation))
def test_gradient_is_zero_and_finite_at_the_target(name):
    target = F.normalize(torch.randn(3, 4), dim=1)
    student = target.clone().requires_grad_()
    DISTILLATIONS[name](student, target, None).backward()
    assert float(student.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("name", get_args(Distillation))
def test_invalid_samples_neither_spoil_value_nor_gradient(both, name):
    student, target = both
    target = target.clone()
    target[1] = math.nan
    loss = DISTILLATIONS[name](student, target, torch.tensor([True, False, True, True]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad[[0, 2, 3]]).all()
    assert float(student.grad[1].abs().sum()) == 0.0


def squares_by_loops(z, anchors, reduction):
    squares = [[(a - b) ** 2 for a, b in zip(own, other, strict=True)] for own, other in zip(z, anchors, strict=True)]
    total = sum(sum(row) for row in squares)
    return total / {"sum": 1, "mean": len(squares), "element": sum(len(row) for row in squares)}[reduction]


@pytest.fixture
def unit_pair():
    torch.manual_seed(4)
    return torch.nn.functional.normalize(torch.randn(2, 5, 3, dtype=torch.float64), dim=-1).unbind(0)


@pytest.mark.parametrize("reduction", ["sum", "mean", "element"])
def test_squared_distance_equals_loops(unit_pair, reduction):
    z, anchors = unit_pair
    expected = squares_by_loops(z.tolist(), anchors.tolist(), reduction)
    assert float(squared_distance(z, anchors, reduction)) == pytest.approx(expected, rel=1e-12)
    assert expected > 0.1


def test_equal_ones_are_at_no_distance_and_have_no_gradient(unit_pair):
    z = unit_pair[0].clone().requires_grad_()
    loss = squared_distance(z, unit_pair[0])
    loss.backward()
    assert loss.item() == 0
    assert float(z.grad.abs().max()) == 0  # no NaN either, which a root would give


def kl_by_loops(student, teacher, tau):
    """sum_j p_j (log p_j - log q_j), row by row."""
    rows = zip(teacher.tolist(), student.tolist(), strict=True)
    return torch.tensor([kl(t, s, tau) for t, s in rows], dtype=torch.float64)


@pytest.fixture
def rows():
    torch.manual_seed(1)
    return [F.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (5, 5, 9)]


@pytest.mark.parametrize("tau", [0.1, 0.7, 3.0])
def test_scores_equal_loops(rows, tau):
    student, teacher, _ = rows
    assert torch.allclose(score_kl(student, teacher, tau), kl_by_loops(student, teacher, tau), atol=1e-12)


@pytest.mark.parametrize("tau", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_similarities_equal_loops_and_their_gradient(rows, tau, chunk):
    student, teacher, anchors = rows
    student.requires_grad_()
    actual = similarity_kl(student, teacher, anchors, tau, chunk=chunk)
    assert torch.allclose(actual, kl_by_loops(student @ anchors.T, teacher @ anchors.T, tau), atol=1e-12)
    (gradient,) = torch.autograd.grad(actual.sum(), student)
    (expected,) = torch.autograd.grad(score_kl(student @ anchors.T, teacher @ anchors.T, tau).sum(), student)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_no_rows_and_the_choice_by_anchors(rows):
    student, teacher, anchors = rows
    assert similarity_kl(student[:0], teacher[:0], anchors).shape == (0,)


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosines(one: Tensor, other: Tensor) -> Tensor:
    return F.normalize(one, dim=1) @ F.normalize(other, dim=1).T


def relational_by_loops(source: Tensor, target: Tensor, taught: Tensor, known: Tensor, tau: float) -> float:
    losses = []
    for s in range(len(source)):
        among = [t for t in range(len(target)) if known[s, t]]
        if len(among) < 2:
            continue
        own = [float(source[s] @ target[t] / (source[s].norm() * target[t].norm())) for t in among]
        losses.append(kl([float(taught[s, t]) for t in among], own, tau))
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("tau", [0.05, 0.1, 2.0])
@pytest.mark.parametrize("hidden", [0.0, 0.5, 0.8, 1.0])
def test_relational_kl_equals_loops(tau: float, hidden: float) -> None:
    source, target, taught = drawn(6, 1), drawn(6, 2), cosines(drawn(6, 3), drawn(6, 4))
    known = torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) >= hidden
    expected = relational_by_loops(source, target, taught, known, tau)
    assert float(relational_kl(source, target, taught, known, tau)) == pytest.approx(expected, abs=1e-10)


def test_three_samples_by_hand() -> None:
    """Only sample 0 separates the others, by cosine 1 and 0 against log 3 and 0 at temperature 1."""
    source = torch.tensor([[1.0, 0], [1.0, 0], [0.0, 1]])
    known = torch.tensor([[False, True, True], [False] * 3, [False] * 3])
    taught = torch.tensor([[0.0, math.log(3), 0.0]] * 3)
    e = math.e
    expected = 0.75 * math.log(0.75 / (e / (1 + e))) + 0.25 * math.log(0.25 * (1 + e))
    assert float(relational_kl(source, source, taught, known, 1.0)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("known", [torch.zeros(5, 5, dtype=torch.bool), torch.eye(5, dtype=torch.bool)])
def test_nothing_to_compare_is_a_loss_of_zero_without_gradient(known: Tensor) -> None:
    source = drawn(5, 1).requires_grad_()
    loss = relational_kl(source, source, torch.zeros(5, 5), known, 0.1)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert source.grad is not None
    assert not source.grad.any()
