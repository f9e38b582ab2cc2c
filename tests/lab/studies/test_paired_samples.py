"""Paired samples, Holm's adjustment and verdicts, against scipy and naive loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from polyfed.lab.studies.claims import Claim, judge
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, holm


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
    ("values", "p"), [((2.0, 2.0, 2.0), 0.0513), ((0.0, 0.0), 1.0), ((1.0,), math.nan)], ids=["same", "none", "one"]
)
def test_p_at_the_edges(values: tuple[float, ...], p: float) -> None:
    assert sample(*values).p == pytest.approx(p, abs=1e-4, nan_ok=True)


def test_equal_differences_have_the_spread_of_the_steps_that_figures_move_in() -> None:
    step = 100 / 30  # of an accuracy over 30 items, whose differences differ in their last bits
    own = sample(50 + step - 50, 40 + step - 40, step)
    assert own.std < 1e-12 < own.spread == pytest.approx(step / math.sqrt(6))
    assert own.p > 0.05
    assert sample(10.0, 10.0, 11.0).spread == sample(10.0, 10.0, 11.0).std  # more than the step of 1 has


def test_seeds_to_decide_is_where_the_adjusted_test_first_decides() -> None:
    values = (1.0, 0.4, 1.6, 0.9, 1.3)
    claims = [Claim.parse("a > b on c")] * 20
    draw = np.random.default_rng(0)
    judged = judge(claims, [sample(*values), *(sample(*draw.normal(0, 1, 5)) for _ in claims[1:])])[0]
    assert judged.verdict == "undecided"
    needed = judged.seeds_to_decide
    assert needed is not None
    own = sample(*values)

    def p(count: int) -> float:
        return 20 * float(2 * stats.t.sf(own.mean / (own.std / math.sqrt(count)), count - 1))

    assert p(needed) < 0.05 <= p(needed - 1)
    assert needed > 5


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ((1.0, -1.0, 0.0), None),
        ((1.0,), None),
        ((5.0, 5.1), FEWEST_SEEDS),
        ((2.0, 2.0, 2.0), 4),
        ((5.0, 5.1, 5.0), None),
    ],
    ids=["mean of 0", "one seed", "two close ones", "equal ones", "decided"],
)
def test_seeds_to_decide_at_the_edges(values: tuple[float, ...], needed: int | None) -> None:
    assert judge([Claim.parse("a > b on c")], [sample(*values)])[0].seeds_to_decide == needed


def test_claims_that_were_not_run_stay_in_the_family() -> None:
    """Else a part of the rows would decide what all of them do not."""
    claims, own = [Claim.parse("a > b on c")] * 4, sample(1.0, 0.6, 1.4)
    alone = judge(claims[:1], [own])[0]
    among = judge(claims, [own, None, None, None])[0]
    assert (alone.verdict, among.verdict) == ("held", "undecided")
    assert among.p == pytest.approx(4 * alone.p)


def test_holm_against_its_definition() -> None:
    values = [0.01, 0.04, 0.03, 0.005, math.nan]

    def naive(number: int) -> float:
        known = sorted(p for p in values if not math.isnan(p))
        place = known.index(values[number])
        return max(min(1.0, (len(values) - k) * known[k]) for k in range(place + 1))

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


@pytest.mark.parametrize(("claims", "studies"), [(1, 400), (20, 40)])
def test_few_test_items_hold_nothing_by_chance(claims: int, studies: int) -> None:
    """Accuracies of 20 items over three seeds without a true difference, in steps of 5 points."""
    draw, wrong = np.random.default_rng(2), 0
    for _ in range(studies):
        left, right = draw.binomial(20, 0.5, (2, claims, 3)) * 5.0
        judged = judge([Claim.parse("a > b on c")] * claims, [sample(*row) for row in left - right])
        wrong += any(item.verdict in ("held", "contradicted") for item in judged)
    assert wrong / studies <= 0.05


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
        ("a > b on c", (2.0, 2.0, 2.0), "undecided"),
        ("a > b on c", (2.0, 2.0, 2.0, 2.0), "held"),
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
