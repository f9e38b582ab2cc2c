"""The weight update of FedAID, and what it and the projections refuse."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_vectors import PROJECTIONS, close, normal, numbers, radii, weights

from polyfed.aggregation.robust import (
    chi_square_projection,
    kl_projection,
    mirror_step,
    mirror_step_of,
    released_chi_square_projection,
    simplex_projection,
)

DIVERGENCES = ["chi_square", "kl", "none", "released"]


@pytest.mark.slow
@given(weights, st.data(), st.floats(0, 5), radii)
def test_step_without_a_ball_equals_the_formula(counts, data, gamma, rho):
    losses = data.draw(st.lists(st.floats(-4, 4), min_size=len(counts), max_size=len(counts)))
    products = [n * math.exp(gamma * x) for n, x in zip(counts, losses, strict=True)]
    expected = numbers(products) / sum(products)
    free = mirror_step(numbers(counts), numbers(losses), gamma, rho, "none")
    close(free, expected)
    close(mirror_step(numbers(counts), numbers(losses), gamma, rho), chi_square_projection(expected, rho))
    close(mirror_step(numbers(counts), numbers(losses), gamma, rho, "kl"), kl_projection(expected, rho), 1e-9)
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


def test_underflow_is_no_zero_to_the_kl_ball():
    # e^-2000 is 0 in float64, yet the projection is that of the exact weights: equal steps of the logarithm
    logs = mirror_step(torch.ones(3), numbers([0.0, 1000.0, 2000.0]), 1.0, 0.05, "kl").log()
    assert (logs[2] - logs[1]).item() == pytest.approx((logs[1] - logs[0]).item(), rel=1e-9)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_client_without_weight_does_not_set_the_scale(divergence):
    w = mirror_step(numbers([0.0, 1.0, 1.0]), numbers([1e308, -1e308, -1e308]), 2.0, 9.0, divergence)
    assert w.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("divergence", ["chi_square", "kl", "none"])
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
    present = mask if as_mask else torch.tensor([0, 2, 3])
    found = mirror_step_of(w, present, v, 1.0, 0.05, divergence)
    assert found[1] == 0.2
    close(found[mask], 0.8 * mirror_step(w[mask] / 0.8, v, 1.0, 0.05, divergence))
    assert found.sum().item() == pytest.approx(1, abs=1e-13)


def test_indices_set_the_order_of_the_losses():
    w, v = numbers([0.1, 0.2, 0.3, 0.4]), numbers([2.0, 0.5, 1.0])
    shuffled = mirror_step_of(w, torch.tensor([3, 0, 2]), v[[2, 0, 1]], 1.0, 0.05)
    close(shuffled, mirror_step_of(w, torch.tensor([0, 2, 3]), v, 1.0, 0.05))
    everybody = mirror_step_of(w, torch.ones(4, dtype=torch.bool), normal(4, 1), 1.0, 0.05)
    close(everybody, mirror_step(w, normal(4, 1), 1.0, 0.05))


def test_nothing_moves_where_nobody_is_present_or_the_present_hold_nothing():
    w = numbers([0.0, 0.5, 0.0, 0.5])
    assert torch.equal(mirror_step_of(w, torch.zeros(4, dtype=torch.bool), torch.empty(0), 1.0, 1.0), w)
    assert torch.equal(mirror_step_of(w, torch.tensor([0, 2]), torch.ones(2), 1.0, 1.0), w)
    assert torch.equal(mirror_step_of(w, torch.tensor([1]), torch.ones(1), 1.0, 1.0), w)


def test_arguments_are_left_alone_and_carry_no_gradient():
    w, v = torch.full((3,), 1 / 3, dtype=torch.float64), numbers([1.0, 2.0, 3.0]).requires_grad_()
    before = w.clone()
    found = mirror_step(w, v, 1.0, 0.1)
    assert not found.requires_grad
    mirror_step_of(w, torch.tensor([0, 1]), v[:2], 1.0, 0.1)
    assert torch.equal(w, before)
    assert mirror_step(w.bfloat16(), v.float(), 1.0, 0.1).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_by_its_index(bad):
    ones, broken = torch.ones(3), torch.tensor([0.5, 0.5, bad])
    for project in PROJECTIONS:
        with pytest.raises(ValueError, match=r"v\[2\] is -?(nan|inf)"):
            project(broken, 1.0)
    with pytest.raises(ValueError, match=r"v\[2\] is"):
        simplex_projection(broken)
    with pytest.raises(ValueError, match=r"v\[2\] is"):
        mirror_step(ones, broken, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"w\[2\] is"):
        mirror_step(broken, ones, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"v\[2\] is"):
        mirror_step_of(numbers([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 1, 2]), broken, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simplex_projection(torch.ones(2), 0.0), "total is 0.0"),
        (lambda: simplex_projection(torch.ones(2), math.inf), "total is inf"),
        (lambda: simplex_projection(torch.empty(0)), r"shape \(0,\)"),
        (lambda: chi_square_projection(torch.ones(2, 2), 1.0), r"shape \(2, 2\)"),
        (lambda: chi_square_projection(torch.ones(2), -0.1), "rho is -0.1"),
        (lambda: kl_projection(torch.ones(2), math.nan), "rho is nan"),
        (lambda: kl_projection(torch.tensor([1.0, -1.0]), 1.0), r"v\[1\] is -1.0"),
        (lambda: kl_projection(torch.zeros(2), 1.0), "v is 0 for all 2 clients"),
        (lambda: released_chi_square_projection(torch.ones(2), 0.0), "rho is 0"),
        (lambda: released_chi_square_projection(torch.ones(2), -1.0), "rho is -1.0"),
        (lambda: mirror_step(torch.ones(2), torch.ones(3), 1.0, 1.0), "2 weights and 3 losses"),
        (lambda: mirror_step(torch.zeros(2), torch.ones(2), 1.0, 1.0), "w is 0 for all 2 clients"),
        (lambda: mirror_step(torch.ones(2), torch.ones(2), -1.0, 1.0), "gamma is -1.0"),
        (lambda: mirror_step(torch.ones(2), torch.ones(2), 1.0, -1.0), "rho is -1.0"),
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
