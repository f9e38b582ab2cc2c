"""From positions to embeddings: means, PIE and projections."""

import math

import pytest
import torch
from encoder_cases import CONTEXT

from polyfed.data.view import InputSpec
from polyfed.models.encoders.from_config import FeatureProjection
from polyfed.models.towers import PIE, last_valid, lengths_of, masked_mean, reversed_valid, trimmed, valid_positions

TOKENS = torch.tensor([[5, 3, 7, 0, 0], [2, 0, 0, 0, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))


def test_masked_mean_equals_the_mean_of_each_valid_part_whatever_padding_holds(states):
    mask = valid_positions(TOKENS, 0)
    got = masked_mean(states, mask)
    for row, length in enumerate([3, 1, 5]):
        torch.testing.assert_close(got[row], states[row, :length].mean(0))
    assert (got[3] == 0).all()
    other = torch.where(mask.unsqueeze(-1), states, torch.full_like(states, 1e6))
    assert torch.equal(masked_mean(other, mask), got)


def test_last_valid_picks_the_last_token_of_each_row(states):
    lengths = lengths_of(valid_positions(TOKENS, 0))
    assert lengths.tolist() == [3, 1, 5, 1]
    got = last_valid(states, lengths)
    assert torch.equal(got, torch.stack([states[0, 2], states[1, 0], states[2, 4], states[3, 0]]))


def test_reversed_valid_turns_only_the_valid_part(states):
    lengths = torch.tensor([3, 1, 5, 1])
    got = reversed_valid(states, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(got[row, :length], states[row, :length].flip(0))
        assert torch.equal(got[row, length:], states[row, length:])
    assert torch.equal(reversed_valid(got, lengths), states)


@pytest.mark.parametrize(("rows", "width"), [(slice(0, 2), 3), (slice(1, 2), 1), (slice(3, 4), 1), (slice(0, 0), 1)])
def test_trimmed_drops_columns_of_padding_only(rows, width):
    assert torch.equal(trimmed(TOKENS[rows], 0), TOKENS[rows, :width])


def test_trimmed_leaves_other_devices_alone():
    assert trimmed(TOKENS.to("meta"), 0).shape == TOKENS.shape


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(3, 4, generator=generator)
    local = torch.randn(3, 5, 6, generator=generator)
    return out, local, torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()


def naive(pie: PIE, out: list[float], local: list[list[float]]) -> list[float]:
    """Methods 0.3, one sample, no padding, in plain Python floats."""
    w1, w2 = pie.w1.weight.tolist(), pie.w2.weight.tolist()[0]
    scores = []
    for position in local:
        hidden = [math.tanh(sum(a * x for a, x in zip(row, position, strict=True))) for row in w1]
        scores.append(math.exp(sum(b * value for b, value in zip(w2, hidden, strict=True))))
    weighted = [[score / sum(scores) * x for x in row] for score, row in zip(scores, local, strict=True)]
    attended = [sum(column) for column in zip(*weighted, strict=True)]
    summed = []
    for old, row, bias in zip(out, pie.fc.weight.tolist(), pie.fc.bias.tolist(), strict=True):
        summed.append(old + 1 / (1 + math.exp(-bias - sum(a * x for a, x in zip(row, attended, strict=True)))))
    mean = sum(summed) / len(summed)
    spread = math.sqrt(sum((value - mean) ** 2 for value in summed) / len(summed) + pie.norm.eps)
    return [(value - mean) / spread for value in summed]


def test_pie_equals_the_formula_with_masking_as_cutting(inputs):
    out, local, mask = inputs
    pie = PIE(6, 4)
    got = pie(out, local, mask)
    for row, length in enumerate([3, 1, 5]):
        expected = naive(pie, out[row].tolist(), local[row, :length].tolist())
        torch.testing.assert_close(got[row], torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_a_row_without_valid_positions_stays_finite(inputs):
    out, local, mask = inputs
    mask[1] = False
    result = PIE(6, 4)(out, local, mask)
    result.sum().backward()
    assert result.isfinite().all()


def test_hidden_width_defaults_to_half_and_projections_have_no_bias():
    pie = PIE(2048, 256)
    assert pie.w1.weight.shape == (1024, 2048)
    assert pie.w1.bias is None
    assert pie.w2.bias is None
    assert sum(p.numel() for p in pie.parameters()) == 2_623_232


def test_result_is_float32_friendly_under_autocast(inputs):
    out, local, mask = inputs
    pie = PIE(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        low = pie(out, local, mask)
    torch.testing.assert_close(low.float(), pie(out, local, mask), atol=0.05, rtol=0.05)


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
    torch.testing.assert_close(model(x), model(torch.nn.functional.pad(x, (0, 0, 0, 2))))
    if not pie:
        torch.testing.assert_close(model(x), model.project(model.standardise(x.mean(1))))
