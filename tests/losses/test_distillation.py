import math
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.distillation import DISTILLATIONS, Distillation


def by_loops(name, student, target, rows):
    student, values = student.detach(), []
    for k in rows:
        difference = (student[k] - target[k]).tolist()
        squared = sum(x * x for x in difference)
        dot = float(student[k] @ target[k])
        norms = math.sqrt(float(student[k] @ student[k]) * float(target[k] @ target[k]))
        found = {
            "l2": math.sqrt(squared),
            "mse": squared / len(difference),
            "l1": sum(abs(x) for x in difference) / len(difference),
            "cosine": 1 - dot / norms,
            "kl": divergence(target[k].tolist(), student[k].tolist()),
        }
        values.append(found[name])
    return sum(values) / len(values) if values else 0.0


def divergence(told, said):
    """KL(softmax(told) || softmax(said))."""
    told, said = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (told, said))
    return sum(p * math.log(p / q) for p, q in zip(told, said, strict=True))


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


@pytest.mark.parametrize("name", get_args(Distillation))
def test_descent_brings_the_student_to_the_target(both, name):
    student, target = both
    optimizer = torch.optim.Adam([student], 0.05)
    first = float(DISTILLATIONS["cosine"](*both, None).detach())
    for _ in range(150):
        optimizer.zero_grad()
        DISTILLATIONS[name](student, target, None).backward()
        optimizer.step()
    if name == "kl":  # a softmax does not feel the mean
        student, target = (side - side.mean(1, keepdim=True) for side in (student, target))
    assert float(DISTILLATIONS["cosine"](student, target, None).detach()) < 0.05 * first


def test_autocast_computes_in_fp32():
    student, target = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert DISTILLATIONS["cosine"](student, target, None).dtype == torch.float32
