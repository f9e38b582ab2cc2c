"""Projections against a generic solver and the conditions of optimality; the weight update of FedAID."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.aggregation.robust import (
    chi_square,
    chi_square_projection,
    mirror_step,
    mirror_step_of,
    nearest_in_simplex,
    released_chi_square_projection,
)

vectors = st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=1, max_size=20)
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any)
radii = st.floats(1e-4, 3)


def numbers(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(size, seed, scale=1.0):
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(ours, naive, tolerance=1e-12):
    torch.testing.assert_close(ours, naive, rtol=0, atol=tolerance)


# ---- projections


def naive_chi_square(w):
    return sum((len(w) * x - 1) ** 2 for x in w) / (2 * len(w))


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
        inner = nearest_in_simplex(point + first)
        first = point + first - inner
        outer = naive_ball(inner + second, rho)
        second = inner + second - outer
        if (point - outer).abs().max() < 1e-15 and (inner - outer).abs().max() < 1e-12:
            return outer
        point = outer
    raise AssertionError(f"no convergence for {v}, {rho}")


@given(vectors)
def test_the_simplex_by_bisection_and_the_divergence_term_by_term(values):
    w = nearest_in_simplex(numbers(values))
    close(w, numbers(naive_simplex(values)), 1e-12)
    assert w.min() >= 0
    assert w.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert chi_square(w).item() == pytest.approx(naive_chi_square(w.tolist()), abs=1e-12)


def test_simplex_projection_of_numbers_of_any_size():
    close(nearest_in_simplex(numbers([1e300, -1e300, 1e300])), numbers([0.5, 0.0, 0.5]))
    close(nearest_in_simplex(numbers([1.7e308, -1.7e308])), numbers([1.0, 0.0]))
    close(nearest_in_simplex(numbers([1e9 + 0.25, 1e9])), numbers([0.625, 0.375]))


@pytest.mark.parametrize("rho", [1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("n", [2, 3, 5, 11, 20])
def test_chi_square_projection_equals_a_generic_solver(n, rho):
    for scale in (0.03, 0.3, 1.0):
        v = 1 / n + normal(n, seed=n, scale=scale)
        close(chi_square_projection(v, rho), dykstra(v, rho), 1e-9)


@given(vectors, radii)
def test_projections_are_feasible_idempotent_and_keep_the_order(values, rho):
    v = numbers(values).exp()
    w = chi_square_projection(v, rho)
    assert chi_square(w) <= rho  # to the last bit: the feasible end of the bracket is returned
    assert w.min() >= 0
    assert w.sum().item() == pytest.approx(1, abs=1e-13)
    close(chi_square_projection(w, rho), w, 1e-12)
    assert (w[v.argsort()].diff() >= 0).all()


@pytest.mark.parametrize("v", [[0.9, 0.1, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0], [1e-300, 1e300, 1.0, 0.0, 7.0]])
def test_radius_zero_gives_equal_weights_and_a_large_one_no_bound(v):
    v = numbers(v)
    close(chi_square_projection(v, 0.0), torch.full((5,), 0.2, dtype=torch.float64), 1e-15)
    for rho in (2.0, 7.0, math.inf):
        close(chi_square_projection(v, rho), nearest_in_simplex(v), 1e-15)
    assert chi_square(chi_square_projection(v, 1e-14)) <= 1e-14


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e8, 1e200])
def test_the_bisection_has_full_precision_at_any_spread(scale):
    w = chi_square_projection(numbers([3.0, 2.0, 1.0, 0.0]) * scale, 0.01)
    expected = numbers([3.0, 2.0, 1.0, 0.0]) * (math.sqrt(2 * 0.01 / 4 / 5) if scale > 1 else 0.0)
    close(w - w.mean(), expected - expected.mean(), 1e-7 if scale == 1e-8 else 1e-13)


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
    result = numbers([chi_square(released_chi_square_projection(v, rho)).item() for v in draws])
    assert result.max() <= (2 * rho + 1) / 8
    assert ((result > 0.06) & (result < 0.13)).sum() > 30


def test_released_routine_agrees_in_larger_balls():
    draws = [normal(5, seed, scale=3.0).softmax(0) for seed in range(30)]
    for rho in (1 / 6, 0.3, 1.0):
        for v in [*draws, numbers([0.5, 0.5, 0.0, 0.0]), numbers([1.0, 0.0])]:
            close(released_chi_square_projection(v, rho), chi_square_projection(v, rho), 1e-9)
    for v in (numbers([1.0, 0.0, 0.0, 0.0, 0.0]), numbers([0.85, 0.15, 0.0, 0.0, 0.0])):
        close(released_chi_square_projection(v, 0.1), chi_square_projection(v, 0.1), 1e-9)
    # not everywhere from 0.1: with half the clients at one weight the bracket is worst, and 1/6 is needed
    assert chi_square(released_chi_square_projection(numbers([0.5, 0.5, 0.0, 0.0]), 0.1)) == pytest.approx(0.15)


# ---- the weight update, and what it and the projections refuse


DIVERGENCES = ["chi_square", "none", "released"]


@pytest.mark.slow
@given(weights, st.data(), st.floats(0, 5), radii)
def test_step_without_a_ball_equals_the_formula(counts, data, gamma, rho):
    losses = data.draw(st.lists(st.floats(-4, 4), min_size=len(counts), max_size=len(counts)))
    products = [n * math.exp(gamma * x) for n, x in zip(counts, losses, strict=True)]
    expected = numbers(products) / sum(products)
    close(mirror_step(numbers(counts), numbers(losses), gamma, rho, "none"), expected)
    close(mirror_step(numbers(counts), numbers(losses), gamma, rho), chi_square_projection(expected, rho))
    released = released_chi_square_projection(expected, rho)
    close(mirror_step(numbers(counts), numbers(losses), gamma, rho, "released"), released)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("loss", [-1e308, -3.0, 0.0, 1e308])
def test_one_client_keeps_everything(divergence, loss):
    assert mirror_step(numbers([0.3]), numbers([loss]), 2.0, 0.01, divergence).tolist() == [1.0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("shift", [-1e6, 0.0, 1e6])
def test_losses_of_any_size_and_a_shift_of_all_of_them(divergence, shift):
    w, v = numbers([1.0, 2.0, 1.0]), numbers([0.25, 0.5, 1.0])
    close(mirror_step(w, v + shift, 1.0, 0.05, divergence), mirror_step(w, v, 1.0, 0.05, divergence), 1e-9)
    for huge in (1e4, 1e300, 1.7e308):
        free = mirror_step(w, numbers([-huge, huge, 0.0]), 3.0, 1.0, divergence)
        assert free.isfinite().all()
        assert free.sum().item() == pytest.approx(1, abs=1e-13)
        assert free[1] > free[2] >= free[0]
    assert mirror_step(w, numbers([0.0, 1e5, 0.0]), 1.0, 9.0, divergence).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_client_without_weight_does_not_set_the_scale(divergence):
    w = mirror_step(numbers([0.0, 1.0, 1.0]), numbers([1e308, -1e308, -1e308]), 2.0, 9.0, divergence)
    assert w.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("divergence", ["chi_square", "none"])
def test_gamma_zero_only_projects_and_more_of_it_favours_high_losses(divergence):
    w, v = numbers([0.4, 0.3, 0.2, 0.1]), numbers([0.1, 0.2, 0.3, 0.9])
    close(mirror_step(w, v, 0.0, 1.0, divergence), w)
    robust = [float((mirror_step(w, v, gamma, 1.0, divergence) * v).sum()) for gamma in (0.0, 0.5, 2.0, 5.0)]
    assert robust == sorted(robust)
    assert robust[-1] > robust[0] + 0.1


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("as_mask", [True, False])
def test_present_clients_share_what_they_hold_together(divergence, as_mask):
    w, v = numbers([0.1, 0.2, 0.3, 0.4]), numbers([2.0, 0.5, 1.0])
    mask = torch.tensor([True, False, True, True])
    result = mirror_step_of(w, mask if as_mask else torch.tensor([0, 2, 3]), v, 1.0, 0.05, divergence)
    assert result[1] == 0.2
    close(result[mask], 0.8 * mirror_step(w[mask] / 0.8, v, 1.0, 0.05, divergence))
    assert result.sum().item() == pytest.approx(1, abs=1e-13)


def test_indices_set_the_order_of_the_losses():
    w, v = numbers([0.1, 0.2, 0.3, 0.4]), numbers([2.0, 0.5, 1.0])
    shuffled = mirror_step_of(w, torch.tensor([3, 0, 2]), v[[2, 0, 1]], 1.0, 0.05)
    close(shuffled, mirror_step_of(w, torch.tensor([0, 2, 3]), v, 1.0, 0.05))
    everybody = mirror_step_of(w, torch.ones(4, dtype=torch.bool), normal(4, 1), 1.0, 0.05)
    close(everybody, mirror_step(w, normal(4, 1), 1.0, 0.05))


def test_nothing_moves_where_no_client_is_present_or_the_present_hold_nothing():
    w = numbers([0.0, 0.5, 0.0, 0.5])
    assert torch.equal(mirror_step_of(w, torch.zeros(4, dtype=torch.bool), torch.empty(0), 1.0, 1.0), w)
    assert torch.equal(mirror_step_of(w, torch.tensor([0, 2]), torch.ones(2), 1.0, 1.0), w)
    assert torch.equal(mirror_step_of(w, torch.tensor([1]), torch.ones(1), 1.0, 1.0), w)


def test_arguments_are_left_alone_and_carry_no_gradient():
    w, v = torch.full((3,), 1 / 3, dtype=torch.float64), numbers([1.0, 2.0, 3.0]).requires_grad_()
    before = w.clone()
    assert not mirror_step(w, v, 1.0, 0.1).requires_grad
    mirror_step_of(w, torch.tensor([0, 1]), v[:2], 1.0, 0.1)
    assert torch.equal(w, before)
    assert mirror_step(w.bfloat16(), v.float(), 1.0, 0.1).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_by_its_index(bad):
    ones, broken = torch.ones(3), torch.tensor([0.5, 0.5, bad])
    for project in [chi_square_projection, released_chi_square_projection]:
        with pytest.raises(ValueError, match=r"v\[2\] is -?(nan|inf)"):
            project(broken, 1.0)
    with pytest.raises(ValueError, match=r"v\[2\] is"):
        mirror_step(ones, broken, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"w\[2\] is"):
        mirror_step(broken, ones, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"v\[2\] is"):
        mirror_step_of(numbers([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 1, 2]), broken, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chi_square_projection(torch.empty(0), 1.0), r"shape \(0,\)"),
        (lambda: chi_square_projection(torch.ones(2, 2), 1.0), r"shape \(2, 2\)"),
        (lambda: chi_square_projection(torch.ones(2), -0.1), "rho is -0.1"),
        (lambda: chi_square_projection(torch.ones(2), math.nan), "rho is nan"),
        (lambda: mirror_step(torch.tensor([1.0, -1.0]), torch.ones(2), 1.0, 1.0), r"w\[1\] is -1.0"),
        (lambda: released_chi_square_projection(torch.ones(2), 0.0), "rho is 0"),
        (lambda: mirror_step(torch.ones(2), torch.ones(3), 1.0, 1.0), "2 weights and 3 losses"),
        (lambda: mirror_step(torch.zeros(2), torch.ones(2), 1.0, 1.0), "w is 0 for all 2 clients"),
        (lambda: mirror_step(torch.ones(2), torch.ones(2), -1.0, 1.0), "gamma is -1.0"),
        (lambda: mirror_step(torch.ones(2), torch.ones(2), 1.0, 1.0, "l2"), "divergence is 'l2'; valid: chi_square"),
        (lambda: mirror_step_of(torch.ones(2), torch.tensor([True]), torch.ones(1), 1.0, 1.0), "mask must be of 2"),
        (lambda: mirror_step_of(torch.ones(2), torch.tensor([2]), torch.ones(1), 1.0, 1.0), "client 2; valid: 0 to 1"),
        (lambda: mirror_step_of(torch.ones(2), torch.tensor([0, 0]), torch.ones(2), 1.0, 1.0), "twice"),
        (lambda: mirror_step_of(torch.ones(2), torch.tensor([0]), torch.ones(2), 1.0, 1.0), "1 clients are present"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
