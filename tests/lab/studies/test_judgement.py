"""Verdicts: their level and their power."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from polyfed.lab.studies.claims import Claim, Judgement, judge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import claims_tables
from polyfed.reporting.statistics import PairedSample, PairedSpreads, Sample

CLAIM = "a > b on c"
DECIDED = ("held", "contradicted")


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def judged(samples: Sequence[Sample | None], seeds: int, text: str = CLAIM) -> list[Judgement]:
    return judge([Claim.parse(text)] * len(samples), samples, range(seeds))


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
    (item,) = judged([sample(*values) if values else None], 5, text)
    assert item.verdict == verdict


def test_spreads_are_judged_in_the_direction_of_the_claim() -> None:
    draw = np.random.default_rng(0)
    pair = PairedSpreads(dict(enumerate(draw.normal(0, 9, 10))), dict(enumerate(draw.normal(0, 1, 10))))
    for sign, verdict in ((">", "held"), ("<", "contradicted")):
        assert judged([pair], 10, f"std of a {sign} std of b on c")[0].verdict == verdict


def test_claims_that_were_not_run_stay_in_the_family() -> None:
    """Else a part of the rows would decide what all of them do not."""
    own = sample(1.0, 0.6, 1.4, 0.2, 1.8)
    alone, among = judged([own], 5)[0], judged([own, None, None, None], 5)[0]
    assert (alone.verdict, among.verdict) == ("held", "open")
    assert among.p == pytest.approx(4 * alone.p)


def test_nothing_is_decided_where_a_seed_is_missing() -> None:
    own = sample(*([2.0, 2.1, 1.9, 2.0, 2.2] * 2)[:9])
    part, whole = judged([own], 10)[0], judged([own], 9)[0]
    assert part.verdict == "open"
    assert math.isnan(part.p)
    assert (whole.verdict, whole.p) == ("held", own.p)


@pytest.mark.parametrize(
    ("text", "step", "differences"),
    [
        ("a >= b on c by 0.1", 2, (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("a >= b on c by 0.5", 5, (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("a > b on c by 4.9", 5, (5.0, 5.0, 5.0, 5.0, 5.0)),
    ],
)
def test_a_margin_is_no_step_that_figures_move_in(text: str, step: int, differences: Sequence[float]) -> None:
    right = {seed: float(step * seed) for seed in range(5)}
    left = {seed: right[seed] + difference for seed, difference in enumerate(differences)}
    assert judged([PairedSample.between(left, right)], 5, text)[0].verdict == "open"
    assert judged([sample(*differences)], 5, text)[0].verdict == "open"


@pytest.mark.parametrize(
    ("text", "step", "share"),  # a difference is the step in this share of seeds, else 0: the margin in the mean
    [("a >= b on c by 0.1", -2, 0.05), ("a >= b on c by 0.5", -5, 0.1), ("a >= b on c by 1", -4, 0.25),
     ("a > b on c by 4.9", 5, 0.98)],
)  # fmt: skip
@pytest.mark.parametrize("from_figures", [True, False])
def test_margins_keep_the_level_where_figures_move_in_steps(
    text: str, step: int, share: float, from_figures: bool
) -> None:
    draw = np.random.default_rng(5)
    differences, right = draw.binomial(1, share, (1000, 5)) * step, draw.integers(0, 20, (1000, 5)) * abs(step)
    samples = [
        PairedSample.between(dict(enumerate(base + own)), dict(enumerate(base))) if from_figures else sample(*own)
        for own, base in zip(differences.astype(float), right.astype(float), strict=True)
    ]
    assert sum(judged([own], 5, text)[0].verdict in DECIDED for own in samples) / len(samples) <= 0.06


@pytest.mark.parametrize(
    ("text", "column", "unit", "verdict"),  # the difference is 0.13 units
    [
        *((f"a {sign} b on c", {"metric": "r1_sum"}, 1, "open (less than 0.5)") for sign in ("<", "<=", ">", ">=")),
        ("a > b on c", {"metric": "r1_sum"}, 4, "held"),
        ("a > b on c", {"metric": "r1_sum", "effect": 1}, 4, "open (less than 1)"),
        ("a < b on c", {"metric": "r1_sum", "effect": 0.1}, 1, "contradicted"),
        ("a >= b on c by 0.01", {"metric": "r1_sum"}, 1, "held"),
        ("a > b on c by 0.01", {"metric": "r1_sum"}, 1, "held"),
        ("a > b on c", {"name": "seconds"}, 0.1, "held"),
        ("a > b on c", {"name": "seconds"}, 0.01, "open (less than 0.005)"),
    ],
)
def test_a_difference_that_does_not_matter_decides_nothing_without_a_margin(
    loaded: Callable[..., Study], text: str, column: dict[str, Any], unit: float, verdict: str
) -> None:
    study = loaded(rows={"a": {}, "b": {}}, columns={"c": column}, claims={"method": [text]}, seeds=5)
    left = {seed: unit * figure for seed, figure in enumerate((5.211, 4.112, 3.110, 2.111, 1.113))}
    right = {seed: unit * figure for seed, figure in enumerate((5.0, 4.0, 3.0, 2.0, 1.0))}
    results = Results(study, {("a", (), "c"): left, ("b", (), "c"): right})
    assert claims_tables(results)[0].rows[0][2] == verdict


def test_clear_effects_are_held_on_five_seeds() -> None:
    draw = np.random.default_rng(3)
    items = [item for _ in range(40) for item in judged([sample(*draw.normal(4, 1, 5)) for _ in range(3)], 5)]
    assert sum(item.verdict == "held" for item in items) / len(items) > 0.9


@pytest.mark.parametrize(("claims", "studies"), [(1, 400), (10, 200)])
@pytest.mark.parametrize("margin", [0.0, 2.5])
def test_few_test_items_hold_nothing_by_chance(claims: int, studies: int, margin: float) -> None:
    """Accuracies of 20 items over five seeds, in steps of 5 points, without a true difference from the margin."""
    draw, wrong = np.random.default_rng(2), 0
    for _ in range(studies):
        figures = draw.binomial(20, (0.5 + margin / 100, 0.5), (claims, 5, 2)) * 5.0
        pairs = [PairedSample.between(*(dict(enumerate(side)) for side in own.T)) for own in figures]
        wrong += any(item.verdict in DECIDED for item in judged(pairs, 5, f"{CLAIM} by {margin}"))
    assert wrong / studies <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)
