"""The running log-sum-exp and its companion sums, against torch on all logits at once."""

import math

import pytest
import torch

from polyfed.losses.log_sum_exp import BoundedLogSumExp, RunningEntropy, RunningLogSumExp, RunningSoftmaxMean


def logits(scale=1.0, *, rows=5, columns=17):
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def in_bits(x):
    return x / math.log(2)


def test_the_sum_of_tiles_is_that_of_all_logits():
    x = logits(30.0)
    natural, binary = RunningLogSumExp(x[:, 0], "e"), RunningLogSumExp(x[:, 0], 2)
    for tile in x.split(4, dim=1):
        natural.add(tile.clone())
        binary.add(in_bits(tile), in_bits(tile.amax(1)))
    torch.testing.assert_close(natural.result(), x.logsumexp(1))
    torch.testing.assert_close(binary.result() * math.log(2), x.logsumexp(1))


def test_bounded_logits_need_no_peak():
    x, running = logits(3.0), BoundedLogSumExp(torch.empty(5), 2)
    for tile in x.split(4, dim=1):
        running.add(in_bits(tile))
    torch.testing.assert_close(running.result() * math.log(2), x.logsumexp(1))


def test_powers_are_relative_to_the_peak():
    assert RunningLogSumExp(torch.empty(1), 2).add(torch.tensor([[3.0, 1.0]])).tolist() == [[1.0, 0.25]]


def test_a_row_that_has_seen_nothing_sums_to_nothing():
    running = RunningLogSumExp(torch.empty(1), "e")
    running.add(torch.full((1, 3), -math.inf))
    assert running.result().tolist() == [-math.inf]


def test_the_weighted_mean_is_that_of_the_softmax():
    x, vectors = logits(30.0), torch.randn(17, 3, generator=torch.Generator().manual_seed(1))
    running = RunningSoftmaxMean(torch.empty(5, 3), "e")
    for tile, part in zip(x.split(4, dim=1), vectors.split(4), strict=True):
        running.add_weighted(tile.clone(), part)
    torch.testing.assert_close(running.mean(0.5), x.softmax(1) @ vectors / 0.5)
    torch.testing.assert_close(running.result(), x.logsumexp(1))


@pytest.mark.parametrize("scratch", [0, 20, 100])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_entropy_is_that_of_the_softmax(scale, scratch):
    x, running = logits(scale), RunningEntropy(torch.empty(5), torch.empty(scratch))
    for tile in x.split(4, dim=1):
        running.add(in_bits(tile))
    expected = torch.special.entr(x.softmax(1)).sum(1)
    torch.testing.assert_close(running.entropy() * math.log(2), expected, rtol=1e-4, atol=1e-5)
