"""Divergences of class scores and of similarities against plain loops in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.distillation import row_kl, score_kl, similarity_kl


def naive(student, teacher, tau):
    """sum_j p_j (log p_j - log q_j), row by row."""
    found = []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = ([math.exp(x / tau) for x in row] for row in (s, t))
        q, p = ([x / sum(row) for x in row] for row in (q, p))
        found.append(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture
def rows():
    torch.manual_seed(1)
    return [F.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (5, 5, 9)]


@pytest.mark.parametrize("tau", [0.1, 0.7, 3.0])
def test_scores_equal_loops(rows, tau):
    student, teacher, _ = rows
    assert torch.allclose(score_kl(student, teacher, tau), naive(student, teacher, tau), atol=1e-12)


@pytest.mark.parametrize("tau", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_similarities_equal_loops_and_their_gradient(rows, tau, chunk):
    student, teacher, anchors = rows
    student.requires_grad_()
    found = similarity_kl(student, teacher, anchors, tau, chunk=chunk)
    assert torch.allclose(found, naive(student @ anchors.T, teacher @ anchors.T, tau), atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    held = score_kl(student @ anchors.T, teacher @ anchors.T, tau)
    (expected,) = torch.autograd.grad(held.sum(), student)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_only_the_student_learns(rows):
    student, teacher, anchors = (value.requires_grad_() for value in rows)
    similarity_kl(student, teacher, anchors).sum().backward()
    score_kl(student, teacher).sum().backward()
    assert student.grad is not None
    assert teacher.grad is anchors.grad is None


def test_it_is_0_where_both_agree_and_positive_elsewhere(rows):
    student, teacher, anchors = rows
    for found in (score_kl(teacher, teacher), similarity_kl(teacher, teacher, anchors)):
        assert float(found.abs().max()) < 1e-12
    assert float(similarity_kl(student, teacher, anchors).min()) > 0


def test_the_order_of_anchors_does_not_matter_and_one_alone_says_nothing(rows):
    student, teacher, anchors = rows
    shuffled = anchors[torch.randperm(len(anchors), generator=torch.Generator().manual_seed(0))]
    found = similarity_kl(student, teacher, anchors, 0.2)
    assert torch.allclose(found, similarity_kl(student, teacher, shuffled, 0.2), atol=1e-12)
    assert float(similarity_kl(student, teacher, anchors[:1], 0.2).abs().max()) < 1e-12


def test_full_precision_inside_autocast(rows):
    student, teacher, anchors = (value.float() for value in rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = similarity_kl(student, teacher, anchors, 0.1)
    assert found.dtype == torch.float32
    assert torch.allclose(found, similarity_kl(student, teacher, anchors, 0.1))


def test_no_rows_and_the_choice_by_anchors(rows):
    student, teacher, anchors = rows
    assert similarity_kl(student[:0], teacher[:0], anchors).shape == (0,)
    assert torch.equal(row_kl(student, teacher, None, 0.5), score_kl(student, teacher, 0.5))
    assert torch.equal(row_kl(student, teacher, anchors, 0.5), similarity_kl(student, teacher, anchors, 0.5))
