import math

import pytest
import torch

from polyfed.losses import adversarial


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 2 * torch.randn(5, dtype=torch.float64), 2 * torch.randn(3, dtype=torch.float64)


@pytest.fixture
def parts():
    torch.manual_seed(1)
    leaves = torch.randn(5, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    return adversarial.Discriminator(6), *leaves


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_loops(real, fake):
    """E[log D(real) + log(1 - D(fake))], each over its own samples."""
    noted = sum(math.log(sigmoid(x)) for x in real.tolist()) / len(real)
    return noted + sum(math.log(1 - sigmoid(x)) for x in fake.tolist()) / len(fake)


def grads(module):
    return [p.grad for p in module.parameters()]


def test_logit_losses_equal_loops(logits):
    real, fake = logits
    assert float(adversarial.separation(real, fake)) == pytest.approx(-by_loops(real, fake))
    assert float(adversarial.minimax(real, fake)) == pytest.approx(by_loops(real, fake))
    expected = -sum(math.log(sigmoid(x)) for x in fake.tolist()) / len(fake)
    assert float(adversarial.non_saturating(real, fake)) == pytest.approx(expected)


def test_losses_of_representations_are_those_of_their_logits(parts):
    discriminator, real, fake = parts
    noted = discriminator(real).detach(), discriminator(fake).detach()
    assert adversarial.discriminator_loss(*parts).item() == pytest.approx(-by_loops(*noted), rel=1e-5)
    assert adversarial.encoder_loss(*parts).item() == pytest.approx(by_loops(*noted), rel=1e-5)
    assert torch.equal(adversarial.encoder_loss(*parts, "non_saturating"), adversarial.non_saturating(*noted))


def test_the_discriminator_loss_trains_the_discriminator_only(parts):
    discriminator, real, fake = parts
    adversarial.discriminator_loss(*parts).backward()
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads(discriminator))
    assert real.grad is None
    assert fake.grad is None


@pytest.mark.parametrize("form", adversarial.ENCODER_FORMS)
def test_an_encoder_loss_trains_the_encoder_only(parts, form):
    discriminator, real, fake = parts
    adversarial.encoder_loss(*parts, form).backward()
    assert grads(discriminator) == [None] * 6
    assert all(p.requires_grad for p in discriminator.parameters())
    assert real.grad is None
    assert (fake.grad != 0).any(1).all()


@pytest.mark.parametrize("form", adversarial.ENCODER_FORMS)
def test_its_gradient_is_that_through_the_whole_discriminator(parts, form):
    discriminator, real, fake = parts
    (got,) = torch.autograd.grad(adversarial.encoder_loss(*parts, form), fake)
    loss = adversarial.ENCODER_FORMS[form](discriminator(real), discriminator(fake))
    (expected,) = torch.autograd.grad(loss, fake)
    torch.testing.assert_close(got, expected)


def test_far_out_losses_stay_finite():
    far = torch.tensor([1e4, -1e4])
    assert float(adversarial.separation(far, far)) == pytest.approx(1e4)
    assert all(loss(far, far).isfinite() for loss in adversarial.ENCODER_FORMS.values())


def test_a_double_sigmoid_confines_the_losses():
    torch.manual_seed(2)
    discriminator = adversarial.Discriminator(6, double_sigmoid=True)
    with torch.no_grad():
        discriminator.layers[-1].weight.mul_(200)
    noted = discriminator(20 * torch.randn(500, 6)).detach()
    real = torch.stack([adversarial.separation(one, torch.full((1,), -1e9)) for one in noted.split(1)])
    fake = torch.stack([adversarial.separation(torch.full((1,), 1e9), one) for one in noted.split(1)])
    ends = {"real": (math.log(1 + math.exp(-1)), math.log(2)), "fake": (math.log(2), math.log(1 + math.e))}
    for values, (low, high) in zip((real, fake), ends.values(), strict=True):
        assert float(values.min()) == pytest.approx(low, abs=1e-3)
        assert float(values.max()) == pytest.approx(high, abs=1e-3)
    assert [round(end, 3) for pair in ends.values() for end in pair] == [0.313, 0.693, 0.693, 1.313]


@pytest.mark.parametrize(("real", "fake", "variant"), [(0, 2, "real"), (2, 0, "fake")])
def test_an_empty_mean_is_refused(real, fake, variant):
    discriminator = adversarial.Discriminator(6)
    with pytest.raises(ValueError, match=f"without {variant} representations"):
        adversarial.discriminator_loss(discriminator, torch.zeros(real, 6), torch.zeros(fake, 6))


def test_frozen_leaves_a_module_as_it_was_after_an_error(parts):
    discriminator = parts[0]
    before = dict(discriminator.named_parameters())
    with pytest.raises(RuntimeError):
        adversarial.frozen_output(discriminator, torch.zeros(2, 7))
    after = dict(discriminator.named_parameters())
    assert all(after[name] is value and value.requires_grad for name, value in before.items())


def test_alternating_works_under_autocast(parts):
    discriminator, _, fakes = parts
    with torch.autocast("cpu", torch.bfloat16):
        encoder = adversarial.encoder_loss(*parts)
        apart = adversarial.discriminator_loss(*parts)  # after a frozen call, weights still get gradients
    apart.backward()
    assert all(grad is not None for grad in grads(discriminator))
    assert fakes.grad is None
    before = [grad.clone() for grad in grads(discriminator)]
    encoder.backward()
    assert all(torch.equal(old, new) for old, new in zip(before, grads(discriminator), strict=True))
    assert fakes.grad is not None


# ---- the discriminator


def mlp_by_loops(discriminator: adversarial.Discriminator, x: list[float], slope: float) -> float:
    layers = [layer for layer in discriminator.layers if isinstance(layer, torch.nn.Linear)]
    for number, layer in enumerate(layers):
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        x = [bias + sum(a * b for a, b in zip(row, x, strict=True)) for row, bias in rows]
        if number < len(layers) - 1:
            x = [value if value > 0 else slope * value for value in x]
    (logit,) = x
    return logit


@pytest.mark.parametrize(("hidden", "slope"), [((128, 64), 0.2), ((5,), 0.01), ((), 0.2)])
def test_logits_equal_the_formula(hidden, slope):
    discriminator = adversarial.Discriminator(6, hidden, slope).double()
    x = 3 * torch.randn(4, 6, dtype=torch.float64)
    expected = torch.tensor([mlp_by_loops(discriminator, row, slope) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(discriminator(x), expected)
    assert (expected < 0).any() or (expected > 1).any()  # logits, no probabilities


def test_with_a_double_sigmoid_it_gives_probabilities():
    plain, doubled = adversarial.Discriminator(6), adversarial.Discriminator(6, double_sigmoid=True)
    doubled.load_state_dict(plain.state_dict())
    x = 3 * torch.randn(4, 6)
    expected = torch.tensor([1 / (1 + math.exp(-value)) for value in plain(x).tolist()])
    torch.testing.assert_close(doubled(x), expected)


def test_no_samples_give_no_logits():
    assert adversarial.Discriminator(6)(torch.zeros(0, 6)).shape == (0,)
