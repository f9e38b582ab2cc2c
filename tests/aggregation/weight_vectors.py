"""Weights and losses of clients in double precision, and what projects them."""

import torch
from hypothesis import strategies as st

from polyfed.aggregation.robust import chi_square_projection, kl_projection, released_chi_square_projection

PROJECTIONS = [chi_square_projection, kl_projection, released_chi_square_projection]

vectors = st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=1, max_size=20)
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any)
radii = st.floats(1e-4, 3)


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(size, seed, scale=1.0):
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours, naive, tolerance=1e-12):
    torch.testing.assert_close(ours, naive, rtol=0, atol=tolerance)
