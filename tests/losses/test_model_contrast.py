import math

import pytest
import torch

from polyfed.losses.contrast import model_contrast


def by_loops(z, received, previous, tau):
    losses = []
    for own, g, p in zip(z.tolist(), received.tolist(), previous.tolist(), strict=True):
        towards, away = math.exp(cosine(own, g) / tau), math.exp(cosine(own, p) / tau)
        losses.append(-math.log(towards / (towards + away)))
    return sum(losses) / len(losses)


def cosine(a, b):
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.fixture
def three():
    torch.manual_seed(3)
    return tuple(3 * torch.randn(5, 4, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_it_equals_loops(three, tau):
    assert float(model_contrast(*three, tau)) == pytest.approx(by_loops(*three, tau))


def test_its_gradient_is_that_of_the_formula(three):
    z, received, previous = three
    assert torch.autograd.gradcheck(lambda z: model_contrast(z, received, previous), z.requires_grad_())


def test_lengths_do_not_matter(three):
    z, received, previous = three
    assert float(model_contrast(7 * z, received / 9, 2 * previous)) == pytest.approx(float(model_contrast(*three)))


def test_it_is_log_two_where_both_models_agree_and_stable_far_out():
    z = torch.eye(3)
    assert float(model_contrast(z, z, z)) == pytest.approx(math.log(2))
    assert float(model_contrast(z, -z, z, tau=1e-3)) == pytest.approx(2000.0)
    assert float(model_contrast(z, z, -z, tau=1e-3)) == 0.0


def test_only_z_gets_a_gradient():
    z, received, previous = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    model_contrast(z, received, previous).backward()
    assert z.grad is not None
    assert received.grad is None
    assert previous.grad is None


def test_half_precision_is_raised(three):
    z, received, previous = (value.bfloat16() for value in three)
    assert model_contrast(z, received, previous).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            model_contrast(z.float(), received.float(), previous.float()), model_contrast(z, received, previous)
        )
