"""Eight-bit integers, against loops written from the formulas, and their error bounds."""

from __future__ import annotations

import math

import pytest
import torch
from crossings import drawn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyfed.wire.transport import dequantise, quantise

SLACK = 1 + 2**-15  # of fp32: the scale, the quotient and the product are rounded


def naive(values: Tensor) -> tuple[list[list[int]], list[float]]:
    """Python numbers (64 bits), row by row, entry by entry."""
    codes, scales = [], []
    for row in values.flatten(1).tolist():
        scale = float(torch.tensor(max(abs(value) for value in row) / 127, dtype=torch.float32))
        scales.append(scale)
        codes.append([round(value / scale) if scale else 0 for value in row])
    return codes, scales


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 5), (3, 2, 4), (2, 3, 2, 2)])
def test_codes_and_scales_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    values = drawn(*shape)
    codes, scales = quantise(values)
    expected_codes, expected_scales = naive(values)
    assert codes.shape == values.shape
    assert codes.flatten(1).tolist() == expected_codes
    assert scales.tolist() == pytest.approx(expected_scales, rel=1e-7)
    back = dequantise(codes, scales).flatten(1)
    for i, row in enumerate(expected_codes):
        assert back[i].tolist() == pytest.approx([code * expected_scales[i] for code in row], rel=1e-6)


@given(rows=st.integers(1, 5), width=st.integers(1, 40), power=st.integers(-110, 120), seed=st.integers(0, 10**6))
def test_no_entry_is_off_by_more_than_the_bound(rows: int, width: int, power: int, seed: int) -> None:
    values = drawn(rows, width, seed=seed).clamp(-8, 8) * 2.0**power
    off = (dequantise(*quantise(values)).double() - values.double()).abs().amax(1)
    assert bool((off <= values.double().abs().amax(1) / 254 * SLACK).all())


def test_the_bound_is_reached() -> None:
    values = torch.tensor([[127.0, 0.4999, 10.4999]])
    off = (dequantise(*quantise(values)) - values).abs().amax()
    assert float(off) > 0.999 * 127 / 254


def test_zeros_and_whole_numbers_are_exact() -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [127.0, -127.0, 3.0], [0.0, -254.0, 2.0]])
    codes, scales = quantise(values)
    assert scales.tolist() == [0.0, 1.0, 2.0]
    assert codes.tolist() == [[0, 0, 0], [127, -127, 3], [0, -127, 1]]
    assert torch.equal(dequantise(codes, scales), values)
    # ties go to even codes, and rows too small for a scale become zero
    assert quantise(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    codes, scales = quantise(torch.tensor([[1e-40, -1e-40], [1e-30, 5e-31]]))
    assert float(scales[0]) == 0
    assert codes.tolist() == [[0, 0], [127, 64]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(value: float) -> None:
    values = drawn(3, 4)
    expected = quantise(values)
    values[1, 2] = value
    codes, scales = quantise(values)
    assert torch.isfinite(scales).tolist() == [True, False, True]
    assert torch.equal(codes[[0, 2]], expected[0][[0, 2]])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 5)])
def test_nothing_stays_nothing(shape: tuple[int, ...]) -> None:
    codes, scales = quantise(torch.zeros(shape))
    assert codes.shape == shape
    assert scales.tolist() == [0.0] * shape[0]
    assert dequantise(codes, scales).shape == shape


def test_strides_do_not_matter() -> None:
    values = drawn(8, 6)
    for found, expected in zip(quantise(values.T), quantise(values.T.contiguous()), strict=True):
        assert torch.equal(found, expected)
