"""Projections against a generic solver and the conditions of optimality."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_vectors import close, normal, numbers, radii, vectors, weights

from polyfed.aggregation.robust import (
    chi_square,
    chi_square_projection,
    kl_divergence,
    kl_projection,
    released_chi_square_projection,
    simplex_projection,
)

RADII = [1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0]
BALLS = [(chi_square_projection, chi_square), (kl_projection, kl_divergence)]


def naive_chi_square(w):
    return sum((len(w) * x - 1) ** 2 for x in w) / (2 * len(w))


def naive_kl(w):
    return sum(x * math.log(len(w) * x) for x in w if x > 0)


def naive_simplex(v, total=1.0):
    """The threshold that leaves the total, by bisection."""
    low, high = min(v) - total, max(v)
    for _ in range(80):
        middle = (low + high) / 2
        left = sum(max(x - middle, 0) for x in v)
        low, high = (middle, high) if left > total else (low, middle)
    return [max(x - high, 0) for x in v]


def naive_ball(v, rho):
    """In the plane of sum 1, D = n ||w - 1/n||^2 / 2: a Euclidean ball around equal weights."""
    centred = v - v.mean()
    radius = math.sqrt(2 * rho / len(v))
    return 1 / len(v) + centred * min(1.0, radius / float(centred.norm().clamp(min=1e-300)))


def dykstra(v, rho, rounds=50_000):
    """Nearest point of the intersection by alternating projections with Dykstra's corrections."""
    point, first, second = v, torch.zeros_like(v), torch.zeros_like(v)
    for _ in range(rounds):
        inner = simplex_projection(point + first)
        first = point + first - inner
        outer = naive_ball(inner + second, rho)
        second = inner + second - outer
        if (point - outer).abs().max() < 1e-15 and (inner - outer).abs().max() < 1e-12:
            return outer
        point = outer
    raise AssertionError(f"no convergence for {v}, {rho}")


@given(vectors)
def test_divergences_equal_their_sums_term_by_term(values):
    w = simplex_projection(numbers(values))
    assert chi_square(w).item() == pytest.approx(naive_chi_square(w.tolist()), abs=1e-12)
    assert kl_divergence(w).item() == pytest.approx(naive_kl(w.tolist()), abs=1e-12)


@given(vectors, st.floats(0.1, 7))
def test_simplex_projection_equals_the_threshold_found_by_bisection(values, total):
    ours = simplex_projection(numbers(values), total)
    close(ours, numbers(naive_simplex(values, total)), 1e-12)
    assert ours.min() >= 0
    assert ours.sum().item() == pytest.approx(total, abs=1e-12)


def test_simplex_projection_of_numbers_of_any_size():
    close(simplex_projection(numbers([1e300, -1e300, 1e300])), numbers([0.5, 0.0, 0.5]))
    close(simplex_projection(numbers([1.7e308, -1.7e308])), numbers([1.0, 0.0]))
    close(simplex_projection(numbers([1e9 + 0.25, 1e9])), numbers([0.625, 0.375]))
    close(simplex_projection(torch.tensor([3, 3])), numbers([0.5, 0.5]))


@pytest.mark.parametrize("rho", RADII)
@pytest.mark.parametrize("n", [2, 3, 5, 11, 20])
def test_chi_square_projection_equals_a_generic_solver(n, rho):
    for scale in (0.03, 0.3, 1.0):
        v = 1 / n + normal(n, seed=n, scale=scale)
        close(chi_square_projection(v, rho), dykstra(v, rho), 1e-9)


@given(vectors, radii, st.sampled_from(BALLS))
def test_projections_are_feasible_idempotent_and_keep_the_order(values, rho, ball):
    project, divergence = ball
    v = numbers(values).exp()
    w = project(v, rho)
    assert divergence(w) <= rho  # to the last bit: the feasible end of the bracket is returned
    assert w.min() >= 0
    assert w.sum().item() == pytest.approx(1, abs=1e-13)
    close(project(w, rho), w, 1e-12)
    ordered = w[v.argsort()]
    assert (ordered.diff() >= 0).all()


@pytest.mark.parametrize(("project", "divergence"), BALLS)
@pytest.mark.parametrize("v", [[0.9, 0.1, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0], [1e-300, 1e300, 1.0, 0.0, 7.0]])
def test_radius_zero_gives_equal_weights_and_a_large_one_no_bound(project, divergence, v):
    v = numbers(v)
    close(project(v, 0.0), torch.full((5,), 0.2, dtype=torch.float64), 1e-15)
    free = simplex_projection(v) if project is chi_square_projection else v / v.sum()
    for rho in (2.0, 7.0, math.inf):
        close(project(v, rho), free, 1e-15)
    assert divergence(project(v, 1e-14)) <= 1e-14


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e8, 1e200])
def test_the_bisection_has_full_precision_at_any_spread(scale):
    v = numbers([3.0, 2.0, 1.0, 0.0]) * scale
    w = chi_square_projection(v, 0.01)
    expected = numbers([3.0, 2.0, 1.0, 0.0]) * (math.sqrt(2 * 0.01 / 4 / 5) if scale > 1 else 0.0)
    close(w - w.mean(), expected - expected.mean(), 1e-7 if scale == 1e-8 else 1e-13)
    logs = kl_projection(numbers([1e300, 1.0, 1e-300]), 0.01).log()
    assert (logs[0] - logs[1]).item() == pytest.approx((logs[1] - logs[2]).item(), rel=1e-12)


@given(vectors, radii, st.integers(0, 2**31))
def test_kl_projection_is_optimal(values, rho, seed):
    # least KL(p || v): log(w / v) = a - b log w with b >= 0, and b = 0 unless the ball binds
    v = numbers(values).exp()
    v = v / v.sum()
    w = kl_projection(v, rho)
    slope, at = (w / v).log(), kl_divergence(w).item()
    if at < rho - 1e-9:
        close(w, v, 1e-12)
    other = (w.log() + 0.1 * normal(len(v), seed)).softmax(0)
    if kl_divergence(other) <= rho:
        assert torch.xlogy(other, other / v).sum() >= (w * slope).sum() - 1e-12
    spread = w.log() - w.log().mean()
    assert (slope * spread).sum() <= 1e-12  # b >= 0
    if (steep := float(spread.square().sum())) > 1e-6:
        close(slope - slope.mean(), spread * float((slope * spread).sum()) / steep, 1e-9)


@given(weights, st.floats(0, 3), st.floats(1e-3, 1e3))
def test_kl_projection_does_not_see_the_scale(counts, rho, scale):
    v = numbers(counts)
    close(kl_projection(v * scale, rho), kl_projection(v, rho), 1e-11)


@pytest.mark.parametrize("rho", [0.7, 0.8])
def test_kl_projection_keeps_zeros_where_the_ball_has_room_for_them(rho):
    v = numbers([8.0, 1.0, 0.0, 0.0])
    w = kl_projection(v, rho)  # log(4 / 2) = 0.693
    assert (w[2:] == 0).all()
    assert kl_divergence(w).item() == pytest.approx(rho, abs=1e-12)
    assert 0.5 < w[0] < 8 / 9


@pytest.mark.parametrize("rho", [0.05, 0.3, 0.6])
def test_kl_projection_raises_zeros_as_the_limit_of_small_weights_does(rho):
    w = kl_projection(numbers([8.0, 1.0, 0.0, 0.0]), rho)
    assert w[0] == w[1] > w[2] == w[3] > 0
    assert kl_divergence(w).item() == pytest.approx(rho, abs=1e-12)
    gaps = [(kl_projection(numbers([8.0, 1.0, e, e]), rho) - w).abs().max().item() for e in (1e-10, 1e-100, 1e-300)]
    assert gaps[2] < 4e-3
    assert 3 * gaps[2] == pytest.approx(gaps[1], rel=0.1)  # it vanishes as 1 / log(1 / e)


def released_bound(v, rho):
    """The multiplier up to which the public code searches, from its formula."""
    return (len(v) * float(v.max()) / math.sqrt(2 * rho + 1) - 1) / len(v)


@given(vectors, radii)
def test_released_routine_equals_a_bisection_of_the_multiplier_in_its_bracket(values, rho):
    v = numbers(values)
    low, high = 0.0, max(0.0, released_bound(v, rho))
    for _ in range(60 if high else 0):
        middle = (low + high) / 2
        total = 1 + middle * len(v)
        fits = naive_chi_square([x / total for x in naive_simplex(values, total)]) <= rho
        low, high = (low, middle) if fits else (middle, high)
    total = 1 + high * len(v)
    close(released_chi_square_projection(v, rho), numbers(naive_simplex(values, total)) / total, 1e-9)


@pytest.mark.parametrize("rho", [1e-4, 1e-3, 1e-2])
def test_released_routine_leaves_small_balls_as_documented(rho):
    # methods.md 4.3: five clients, D = 0.06 - 0.07 in place of rho
    w = released_chi_square_projection(numbers([0.85, 0.15, 0.0, 0.0, 0.0]), rho)
    assert 0.06 < chi_square(w) < 0.1
    assert chi_square(w) > 6 * rho
    draws = [normal(5, seed, scale=3.0).softmax(0) for seed in range(60)]
    found = numbers([chi_square(released_chi_square_projection(v, rho)).item() for v in draws])
    assert found.max() <= (2 * rho + 1) / 8
    assert ((found > 0.06) & (found < 0.13)).sum() > 30


def test_released_routine_agrees_in_larger_balls():
    draws = [normal(5, seed, scale=3.0).softmax(0) for seed in range(30)]
    for rho in (1 / 6, 0.3, 1.0):
        for v in [*draws, numbers([0.5, 0.5, 0.0, 0.0]), numbers([1.0, 0.0])]:
            close(released_chi_square_projection(v, rho), chi_square_projection(v, rho), 1e-9)
    for v in (numbers([1.0, 0.0, 0.0, 0.0, 0.0]), numbers([0.85, 0.15, 0.0, 0.0, 0.0])):
        close(released_chi_square_projection(v, 0.1), chi_square_projection(v, 0.1), 1e-9)
    # not everywhere from 0.1: with half the clients at one weight the bracket is worst, and 1/6 is needed
    assert chi_square(released_chi_square_projection(numbers([0.5, 0.5, 0.0, 0.0]), 0.1)) == pytest.approx(0.15)
