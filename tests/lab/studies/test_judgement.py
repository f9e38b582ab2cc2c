"""Verdicts: their level, their power, and how many seeds they need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from polyfed.lab.studies.claims import Claim
from polyfed.lab.studies.judgement import Judgement, judge
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, PairedSpreads, Sample

CLAIM = "a > b on c"
DECIDED = ("held", "contradicted")


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def judged(samples: Sequence[Sample | None], looks: Sequence[int], text: str = CLAIM) -> list[Judgement]:
    return judge([Claim.parse(text)] * len(samples), samples, [range(count) for count in looks])


@pytest.mark.parametrize(
    ("text", "values", "verdict"),
    [
        ("a > b on c", (2.0, 2.1, 1.9, 2.0, 2.2), "held"),
        ("a < b on c", (2.0, 2.1, 1.9, 2.0, 2.2), "contradicted"),
        ("a > b on c by 3", (2.0, 2.1, 1.9, 2.0, 2.2), "contradicted"),
        ("a > b on c by 1", (2.0, 2.1, 1.9, 2.0, 2.2), "held"),
        ("a >= b on c by 1", (-0.2, 0.1, -0.1, 0.0, 0.1), "held"),
        ("a <= b on c by 1", (-0.2, 0.1, -0.1, 0.0, 0.1), "held"),
        ("a >= b on c by 1", (-2.0, -2.1, -1.9, -2.0, -2.2), "contradicted"),
        ("a > b on c", (2.0, -2.0, 1.0, 0.0, 0.0), "open"),
        ("a > b on c", (2.0, 2.1, 1.9, 2.0), "open"),  # fewer than five
        ("a > b on c", (2.0, 2.0, 2.0, 2.0, 2.0), "held"),
        ("a > b on c", (), "not run"),
    ],
)
def test_verdicts(text: str, values: tuple[float, ...], verdict: str) -> None:
    (item,) = judged([sample(*values) if values else None], [5], text)
    assert item.verdict == verdict


def test_spreads_are_judged_in_the_direction_of_the_claim() -> None:
    draw = np.random.default_rng(0)
    pair = PairedSpreads(dict(enumerate(draw.normal(0, 9, 10))), dict(enumerate(draw.normal(0, 1, 10))))
    for sign, verdict in ((">", "held"), ("<", "contradicted")):
        assert judged([pair], [10], f"std of a {sign} std of b on c")[0].verdict == verdict


def test_claims_that_were_not_run_stay_in_the_family() -> None:
    """Else a part of the rows would decide what all of them do not."""
    own = sample(1.0, 0.6, 1.4, 0.2, 1.8)
    alone, among = judged([own], [5])[0], judged([own, None, None, None], [5])[0]
    assert (alone.verdict, among.verdict) == ("held", "open")
    assert among.p == pytest.approx(4 * alone.p)


def test_a_look_that_lacks_a_seed_is_none() -> None:
    own = sample(*([2.0, 2.1, 1.9, 2.0, 2.2] * 2)[:9])
    first, both = judged([own], [5, 10])[0], judged([own], [10])[0]
    assert first.p == pytest.approx(2 * own.of(range(5)).p)  # of two looks each has half of the level
    assert first.verdict == "held"
    assert both.verdict == "open"
    assert math.isnan(both.p)


def test_the_second_look_takes_all_seeds() -> None:
    own = sample(2.0, -2.0, 1.0, 3.0, 0.0, 2.0, 3.0, 2.0, 1.0, 2.0)
    (item,) = judged([own], [5, 10])
    assert own.of(range(5)).p > 0.05
    assert item.p == pytest.approx(2 * own.p)
    assert item.verdict == "held"


def test_seeds_to_decide_is_where_the_adjusted_test_first_decides() -> None:
    values = (1.0, 0.4, 1.6, 0.9, 1.3)
    draw = np.random.default_rng(0)
    item = judged([sample(*values), *(sample(*draw.normal(0, 1, 5)) for _ in range(19))], [5])[0]
    assert item.verdict == "open"
    needed = item.seeds_to_decide
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
        ((2.0, 2.0, 2.0), FEWEST_SEEDS),
        ((0.0, 0.0, 0.0, 0.0, 0.0), None),
        ((1.0, 1.0, 0.0, 0.0, 0.0, 1.0), 8),
        ((5.0, 5.1, 5.0, 5.1, 5.0), None),
    ],
    ids=["mean of 0", "one seed", "two close ones", "equal ones", "nothing", "more than were run", "decided"],
)
def test_seeds_to_decide_at_the_edges(values: tuple[float, ...], needed: int | None) -> None:
    assert judged([sample(*values)], [max(5, len(values))])[0].seeds_to_decide == needed


@pytest.mark.parametrize("claims", [1, 3, 10])
@pytest.mark.parametrize("looks", [[5], [5, 10]])
def test_noise_decides_nothing(claims: int, looks: list[int]) -> None:
    """Of studies without any effect about one in twenty decides anything."""
    draw, wrong, studies = np.random.default_rng(1), 0, 300
    for _ in range(studies):
        shared = draw.normal(0, 1, looks[-1])  # the reference is the same in all claims
        samples = [sample(*(draw.normal(0, 1, looks[-1]) - shared)) for _ in range(claims)]
        wrong += any(item.verdict in DECIDED for item in judged(samples, looks))
    assert wrong / studies < 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_clear_effects_are_held_on_five_seeds() -> None:
    draw = np.random.default_rng(3)
    items = [item for _ in range(40) for item in judged([sample(*draw.normal(4, 1, 5)) for _ in range(3)], [5, 10])]
    assert sum(item.verdict == "held" for item in items) / len(items) > 0.9


@pytest.mark.parametrize(("claims", "studies"), [(1, 400), (10, 40)])
def test_few_test_items_hold_nothing_by_chance(claims: int, studies: int) -> None:
    """Accuracies of 20 items over five seeds without a true difference, in steps of 5 points."""
    draw, wrong = np.random.default_rng(2), 0
    for _ in range(studies):
        left, right = draw.binomial(20, 0.5, (2, claims, 5)) * 5.0
        wrong += any(item.verdict in DECIDED for item in judged([sample(*row) for row in left - right], [5]))
    assert wrong / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
