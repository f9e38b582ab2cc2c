import pytest
import torch
from encoder_cases import CONTEXT

from polyfed.data.view import InputSpec
from polyfed.models.encoders.projection import FeatureProjection


@pytest.mark.parametrize("hidden", [None, 7])
@pytest.mark.parametrize("standardise", ["none", "batch", "layer"])
def test_features_become_embeddings(standardise, hidden):
    model = FeatureProjection(standardise=standardise, hidden=hidden).build(5, InputSpec((9,)), CONTEXT)
    embedding = model(torch.randn(4, 9))
    assert embedding.shape == (4, 5)
    embedding.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_linear_projection_is_linear():
    model = FeatureProjection(standardise="none").build(5, InputSpec((9,)), CONTEXT).eval()
    x = torch.randn(4, 9)
    layer = model.project[-1]
    torch.testing.assert_close(model(x), x @ layer.weight.T + layer.bias)


def test_batch_standardisation_undoes_scale_and_shift():
    model = FeatureProjection(standardise="batch").build(5, InputSpec((9,)), CONTEXT)
    x = torch.randn(64, 9)
    torch.testing.assert_close(model(x), model(100 * x + 7), atol=1e-3, rtol=1e-3)


def test_batch_standardisation_of_one_sample_uses_what_it_has_seen():
    model = FeatureProjection(standardise="batch").build(5, InputSpec((9,)), CONTEXT)
    for _ in range(3):
        model(torch.randn(16, 9) * 3 + 1)
    x = torch.randn(1, 9)
    before = model.standardise.running_mean.clone()
    one = model(x)
    assert torch.equal(before, model.standardise.running_mean)
    torch.testing.assert_close(one, model.eval()(x))


@pytest.mark.parametrize("pie", [False, True])
def test_positions_of_zeros_are_padding(pie):
    model = FeatureProjection(pie=pie).build(5, InputSpec((6, 9)), CONTEXT).eval()
    x = torch.randn(2, 4, 9)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 2))
    torch.testing.assert_close(model(x), model(padded))
    if not pie:
        torch.testing.assert_close(model(x), model.project(model.standardise(x.mean(1))))
