import math

import pytest
import torch

from polyfed.models.towers import PIE


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(3, 4, generator=generator)
    local = torch.randn(3, 5, 6, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    return out, local, mask


def naive(pie: PIE, out: list[float], local: list[list[float]]) -> list[float]:
    """Methods 0.3, one sample, no padding, in plain Python floats."""
    w1, w2 = pie.w1.weight.tolist(), pie.w2.weight.tolist()[0]
    scores = [
        sum(
            b * math.tanh(sum(a * x for a, x in zip(row, position, strict=True))) for row, b in zip(w1, w2, strict=True)
        )
        for position in local
    ]
    total = sum(math.exp(score) for score in scores)
    attended = [
        sum(math.exp(score) / total * position[i] for score, position in zip(scores, local, strict=True))
        for i in range(len(local[0]))
    ]
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
