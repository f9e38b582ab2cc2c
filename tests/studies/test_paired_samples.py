"""Paired samples, Holm's adjustment and verdicts, against scipy and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, holm
from polyfed.studies.claims import Claim, judge


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def test_interval_and_p_are_those_of_a_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    for count in (2, 3, 5, 10):
        left, right = draw.normal(1, 2, count), draw.normal(0, 1, count)
        own = sample(*(left - right))
        test = stats.ttest_rel(left, right)
        interval = test.confidence_interval(0.95)
        assert own.p == pytest.approx(test.pvalue)
        assert own.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("values", "p"), [((2.0, 2.0, 2.0), 0.0), ((0.0, 0.0), 1.0), ((1.0,), math.nan)], ids=["same", "none", "one"]
)
def test_p_at_the_edges(values: tuple[float, ...], p: float) -> None:
    assert sample(*values).p == pytest.approx(p, nan_ok=True)


def test_seeds_to_decide_is_where_the_interval_first_leaves_0_out() -> None:
    own = sample(1.0, 3.0, -1.0, 2.0)

    def reach(count: int) -> float:
        return float(stats.t.ppf(0.975, count - 1)) * own.std / math.sqrt(count)

    needed = own.seeds_to_decide()
    assert needed is not None
    assert reach(needed) < own.mean <= reach(needed - 1)
    assert sample(1.0, -1.0, 0.0).seeds_to_decide() is None  # a mean of 0 is never told from 0
    assert sample(1.0).seeds_to_decide() is None
    assert sample(5.0, 5.1).seeds_to_decide() == FEWEST_SEEDS


def test_holm_against_its_definition() -> None:
    values = [0.01, 0.04, 0.03, 0.005, math.nan]

    def naive(number: int) -> float:
        known = sorted(p for p in values if not math.isnan(p))
        place = known.index(values[number])
        return max(min(1.0, (len(known) - k) * known[k]) for k in range(place + 1))

    assert holm(values)[:4] == pytest.approx([naive(number) for number in range(4)])
    assert math.isnan(holm(values)[4])
    assert holm([]) == []


def test_noise_holds_nothing() -> None:
    """Of studies without any effect and ten claims each, about one in twenty holds or contradicts anything."""
    draw, wrong, studies = np.random.default_rng(1), 0, 400
    claims = [Claim.parse("a > b on c")] * 10
    for _ in range(studies):
        judged = judge(claims, [sample(*draw.normal(0, 1, 5)) for _ in claims])
        wrong += any(item.verdict in ("held", "contradicted") for item in judged)
    assert wrong / studies < 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize(
    ("text", "values", "verdict"),
    [
        ("a > b on c", (2.0, 2.1, 1.9), "held"),
        ("a < b on c", (2.0, 2.1, 1.9), "contradicted"),
        ("a > b on c by 3", (2.0, 2.1, 1.9), "contradicted"),
        ("a > b on c by 1", (2.0, 2.1, 1.9), "held"),
        ("a >= b on c by 1", (-0.2, 0.1, -0.1), "held"),
        ("a <= b on c by 1", (-0.2, 0.1, -0.1), "held"),
        ("a >= b on c by 1", (-2.0, -2.1, -1.9), "contradicted"),
        ("a > b on c", (2.0, -2.0, 1.0), "undecided"),
        ("a > b on c", (2.0, 2.0001), "undecided"),
        ("a > b on c", (2.0, 2.0, 2.0), "held"),
        ("a > b on c", (), "not run"),
    ],
)
def test_verdicts(text: str, values: tuple[float, ...], verdict: str) -> None:
    (item,) = judge([Claim.parse(text)], [sample(*values) if values else None])
    assert item.verdict == verdict


@pytest.mark.parametrize(
    ("text", "left", "right", "column", "margin"),
    [
        ("fedcola > fedavg on r1_sum", ("fedcola", ""), ("fedavg", ""), "r1_sum", 0),
        ("a b >= c on x at 0.1 by 2", ("a b", "0.1"), ("c", "0.1"), "x", 2),
        ("a at 1.0 < a at 0.1 on x y", ("a", "1.0"), ("a", "0.1"), "x y", 0),
        ("a at 3, 5 < b on x by .5", ("a", "3, 5"), ("b", ""), "x", 0.5),
    ],
)
def test_forms(text: str, left: tuple[str, str], right: tuple[str, str], column: str, margin: float) -> None:
    claim = Claim.parse(text)
    assert (claim.left, claim.right, claim.column, claim.margin) == (left, right, column, margin)


@pytest.mark.parametrize("text", ["a > b", "a = b on c", "> b on c", ""])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has not the form"):
        Claim.parse(text)
