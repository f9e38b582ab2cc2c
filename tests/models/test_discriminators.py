import math

import pytest
import torch

from polyfed.losses.adversarial import Discriminator


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def naive(discriminator: Discriminator, x: list[float], slope: float) -> float:
    layers = [layer for layer in discriminator.layers if isinstance(layer, torch.nn.Linear)]
    for number, layer in enumerate(layers):
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        x = [bias + sum(a * b for a, b in zip(row, x, strict=True)) for row, bias in rows]
        if number < len(layers) - 1:
            x = [value if value > 0 else slope * value for value in x]
    (logit,) = x
    return logit


def test_it_has_the_parameters_of_the_paper():
    assert sum(p.numel() for p in Discriminator(256).parameters()) == 41_217


@pytest.mark.parametrize(("hidden", "slope"), [((128, 64), 0.2), ((5,), 0.01), ((), 0.2)])
def test_logits_equal_the_formula(hidden, slope):
    discriminator = Discriminator(6, hidden, slope).double()
    x = 3 * torch.randn(4, 6, dtype=torch.float64)
    expected = torch.tensor([naive(discriminator, row, slope) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(discriminator(x), expected)
    assert (expected < 0).any() or (expected > 1).any()  # logits, no probabilities


def test_with_a_double_sigmoid_it_gives_probabilities():
    plain, doubled = Discriminator(6), Discriminator(6, double_sigmoid=True)
    doubled.load_state_dict(plain.state_dict())
    x = 3 * torch.randn(4, 6)
    expected = torch.tensor([1 / (1 + math.exp(-value)) for value in plain(x).tolist()])
    torch.testing.assert_close(doubled(x), expected)


def test_no_samples_give_no_logits():
    assert Discriminator(6)(torch.zeros(0, 6)).shape == (0,)


def test_it_is_close_under_autocast():
    discriminator, x = Discriminator(16), torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        low = discriminator(x)
    torch.testing.assert_close(low.float(), discriminator(x), atol=0.02, rtol=0.05)
