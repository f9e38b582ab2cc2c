"""Robust rules against naive loops, cases worked by hand, their properties, and the points at which they break down."""

from __future__ import annotations

import functools
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.privacy.rules import GeometricMedian, RobustRule, scores, squared_distances

BUFFERING = ("median", "trimmed_mean", "geometric_median", "krum", "multi_krum")


def rule(name: str, **settings: Any) -> RobustRule:
    made = RobustRule.named(name).model_validate(settings)
    assert isinstance(made, RobustRule)
    return made


def clients(n: int, seed: int = 0) -> list[list[Tensor]]:
    """Two tensors of each, near a common point."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [[draw(3, 4) + 5, draw(6)] for _ in range(n)]


def flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


# ---- naive loops


def naive_median(rows: list[list[float]]) -> list[float]:
    result = []
    for column in zip(*rows, strict=True):
        ordered, n = sorted(column), len(column)
        result.append(ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2)
    return result


def naive_trimmed(rows: list[list[float]], f: int) -> list[float]:
    return [sum(sorted(column)[f : len(column) - f]) / (len(column) - 2 * f) for column in zip(*rows, strict=True)]


def distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def naive_weiszfeld(rows: list[list[float]], steps: int) -> list[float]:
    point = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    for _ in range(steps):
        weights = [1 / distance(point, row) for row in rows]
        weighted = [[w * x for x in row] for w, row in zip(weights, rows, strict=True)]
        point = [sum(column) / sum(weights) for column in zip(*weighted, strict=True)]
    return point


def naive_krum(rows: list[list[float]], f: int, m: int) -> list[float]:
    seen = []
    for k, row in enumerate(rows):
        others = sorted(distance(row, other) ** 2 for j, other in enumerate(rows) if j != k)
        seen.append((sum(others[: len(rows) - f - 2]), k))
    return [sum(column) / m for column in zip(*[rows[k] for _, k in sorted(seen)[:m]], strict=True)]


@pytest.mark.parametrize("n", [7, 8])
@pytest.mark.parametrize("name", BUFFERING)
def test_rules_are_their_naive_loops(name: str, n: int) -> None:
    values, f = clients(n), 2
    rows = [flat(client).tolist() for client in values]
    naive = {
        "median": lambda: naive_median(rows),
        "trimmed_mean": lambda: naive_trimmed(rows, f),
        "geometric_median": lambda: naive_weiszfeld(rows, 100),
        "krum": lambda: naive_krum(rows, f, 1),
        "multi_krum": lambda: naive_krum(rows, f, n - f - 2),
    }[name]()
    result = rule(name).combined(values, f)
    assert [value.shape for value in result] == [(3, 4), (6,)]
    torch.testing.assert_close(flat(result), torch.tensor(naive, dtype=torch.float64), rtol=1e-7, atol=1e-9)


# ---- by hand


def column(*numbers: float) -> list[list[Tensor]]:
    return [[torch.tensor([float(number)])] for number in numbers]


@pytest.mark.parametrize(
    ("name", "numbers", "f", "expected"),
    [
        ("median", (1, 2, 100), 1, 2.0),
        ("median", (1, 2, 4, 100), 1, 3.0),
        ("trimmed_mean", (0, 3, 5, 7, 100), 1, 5.0),
        ("trimmed_mean", (-9, -8, 3, 7, 100, 101), 2, 5.0),
        # scores of two nearest each: 1 + 4, 1 + 1, 1 + 4, ..., so 2 stands for all
        ("krum", (1, 2, 3, 50, 90), 1, 2.0),
        # n - f - 2 = 2: 2, and of 1 and 3, whose scores are equal, the first
        ("multi_krum", (1, 2, 3, 50, 90), 1, 1.5),
    ],
)
def test_cases_worked_by_hand(name: str, numbers: tuple[float, ...], f: int, expected: float) -> None:
    (result,) = rule(name).combined(column(*numbers), f)
    assert result.tolist() == pytest.approx([expected])


def test_the_geometric_median_of_a_triangle_is_its_fermat_point() -> None:
    corners = [[torch.tensor(corner, dtype=torch.float64)] for corner in ([0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2])]
    (result,) = rule("geometric_median").combined(corners, 1)
    torch.testing.assert_close(result, torch.tensor([0.5, 3**0.5 / 6], dtype=torch.float64))


def test_the_geometric_median_on_a_line_is_the_middle_client() -> None:
    (result,) = rule("geometric_median", steps=5000).combined(column(0.0, 1.0, 7.0), 1)
    assert result.tolist() == pytest.approx([1.0], abs=1e-3)


def test_each_step_comes_nearer_to_the_geometric_median() -> None:
    values = clients(6)
    rows = torch.stack([flat(client) for client in values])
    points = [flat(rule("geometric_median", steps=2**k).combined(values, 1)) for k in range(6)]
    cost = [float((point - rows).norm(dim=1).sum()) for point in points]
    assert all(after <= before + 1e-12 for before, after in pairwise(cost))
    assert cost[-1] < cost[0]


def test_krums_scores_leave_out_the_own_distance() -> None:
    squared = squared_distances(column(1, 2, 3, 50, 90))
    assert scores(squared, 1).tolist() == [1 + 4, 1 + 1, 1 + 4, 47**2 + 40**2, 40**2 + 87**2]


# ---- properties


@pytest.mark.parametrize("name", BUFFERING)
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    values = clients(7)
    first = flat(rule(name).combined(values, 2))
    for order in list(permutations(range(7)))[::777]:
        torch.testing.assert_close(flat(rule(name).combined([values[k] for k in order], 2)), first)


@pytest.mark.parametrize("name", BUFFERING)
def test_rules_follow_shifts_and_scales(name: str) -> None:
    values = clients(7)
    moved = [[3 * value - 2 for value in client] for client in values]
    torch.testing.assert_close(flat(rule(name).combined(moved, 2)), 3 * flat(rule(name).combined(values, 2)) - 2)


@pytest.mark.parametrize("name", BUFFERING)
def test_equal_clients_give_what_they_sent(name: str) -> None:
    (client,) = clients(1)
    result = rule(name).combined([client[:1] for _ in range(7)], 2)
    torch.testing.assert_close(result[0], client[0], rtol=1e-12, atol=1e-12)


def test_distances_keep_the_digits_of_small_updates_of_long_weights() -> None:
    weights = torch.full((1000,), 1e4)
    squared = squared_distances([[weights], [weights + 2**-8], [weights - 2**-8]])
    assert squared[0, 1] == 1000 * 2**-16
    assert squared[1, 2] == 4000 * 2**-16


# ---- breakdown


FAR = 1e6


def attacked(n: int, false: int, *, colluding: bool) -> list[list[Tensor]]:
    """Honest clients within one of 0, and false ones far away, at one point or at points of their own."""
    stream = torch.Generator().manual_seed(1)
    honest = [[torch.rand(20, generator=stream, dtype=torch.float64)] for _ in range(n - false)]
    away = torch.full((20,), FAR, dtype=torch.float64)
    return [*honest, *([away if colluding else away * (k + 1)] for k in range(false))]


@pytest.mark.parametrize("colluding", [True, False])
@pytest.mark.parametrize(
    ("name", "n", "f"),
    [("median", 11, 5), ("trimmed_mean", 11, 5), ("geometric_median", 11, 5), ("krum", 11, 4), ("multi_krum", 11, 4)],
)
def test_rules_hold_at_their_breakdown_point(name: str, n: int, f: int, *, colluding: bool) -> None:
    made = rule(name)
    assert made.required(f) == n
    (result,) = made.combined(attacked(n, f, colluding=colluding), f)
    bound = 20.0 if name == "geometric_median" else 1.0  # C = 2 (n - f) / (n - 2 f) = 12 diameters at most
    assert float(result.abs().max()) <= bound


@pytest.mark.parametrize("name", BUFFERING)
def test_rules_break_when_the_majority_is_false(name: str) -> None:
    (result,) = rule(name).combined(attacked(11, 6, colluding=True), 4)
    assert float(result.abs().max()) > FAR / 10


def test_the_trimmed_mean_breaks_beyond_the_f_that_it_trims() -> None:
    values = attacked(11, 3, colluding=True)
    assert float(rule("trimmed_mean").combined(values, 3)[0].max()) <= 1
    assert float(rule("trimmed_mean").combined(values, 2)[0].max()) > FAR / 10


# ---- settings


@pytest.mark.parametrize(("asked", "f"), [(3, 1), (10, 2), (12, 2), (15, 3)])
def test_a_share_is_rounded_down_but_is_at_least_one_client(asked: int, f: int) -> None:
    assert rule("median").false_clients(asked) == f
    assert rule("median", tolerated=0.3).false_clients(10) == 3
    assert rule("median", tolerated=2).false_clients(asked) == 2


@pytest.mark.parametrize(
    ("given", "output"), [(0, "tolerated is 0"), (0.5, "share of a type's clients"), (-0.1, "share"), (1.0, "share")]
)
def test_what_cannot_be_tolerated_is_refused(given: float, output: str) -> None:
    with pytest.raises(ConfigError, match=f"tolerated.*{output}"):
        parse_settings(GeometricMedian, {"tolerated": given})
