"""Verdicts: one test and one level, two looks, their level and their power."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from polyfed.lab.studies.cells import Chosen
from polyfed.lab.studies.claims import Claim, Judgement, judge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import claims_tables
from polyfed.reporting.statistics import PairedSample, compared

CLAIM = "a > b on c"
FIVE, TEN = range(5), range(10)


def sample(*values: float) -> PairedSample:
    return PairedSample(dict(enumerate(values)))


def judged(samples: Sequence[PairedSample | None], *looks: Sequence[int], text: str = CLAIM) -> list[Judgement]:
    count = len(samples)
    return judge([Claim.parse(text)] * count, samples, [1.0] * count, looks or [FIVE])


@pytest.mark.parametrize(
    ("text", "values", "words", "is_seen"),
    [
        (CLAIM, (2.0, 2.1, 1.9, 2.0, 2.2), "above", True),
        ("a < b on c", (2.0, 2.1, 1.9, 2.0, 2.2), "above", False),
        ("a < b on c", (-2.0, -2.1, -1.9, -2.0, -2.2), "below", True),
        (CLAIM, (0.2, 0.3, 0.2, 0.1, 0.2), "no difference of 1", False),  # sure, and less than matters
        (CLAIM, (2.0, -2.0, 1.0, 0.0, 0.0), "undecided (38 seeds would do)", False),
        (CLAIM, (2.0, 2.1, 1.9, 2.0), "undecided (4 of 5 seeds)", False),
        (CLAIM, (2.0, 2.0, 2.0, 2.0, 2.0), "above", True),
        (CLAIM, (), "not run", False),
    ],
)
def test_verdicts(text: str, values: tuple[float, ...], words: str, is_seen: bool) -> None:
    (item,) = judged([sample(*values) if values else None], text=text)
    assert (item.in_words if values else item.verdict, item.is_seen) == (words, is_seen)


def test_estimate_interval_p_and_verdict_are_of_one_test() -> None:
    """Against scipy: the interval at the shared level excludes 0 just where p, times the tests, is below 0.05."""
    draw = np.random.default_rng(1)
    for tests in (1, 2, 4):
        for mean in (0.0, 1.0, 2.0, 3.0):
            values = draw.normal(mean, 1.4, 5)
            own, test = compared(sample(*values), 1e-9, tests), stats.ttest_1samp(values, 0)
            interval = test.confidence_interval(1 - 0.05 / tests)
            assert own.estimate == pytest.approx(values.mean())
            assert own.interval == pytest.approx((interval.low, interval.high))
            assert own.p == pytest.approx(min(1, test.pvalue * tests))
            assert (own.verdict in ("above", "below")) == (own.p < 0.05)


def test_no_difference_is_two_one_sided_tests() -> None:
    draw = np.random.default_rng(2)
    for scale in (0.3, 0.6, 1.2):
        values, effect = draw.normal(0.1, scale, 10), 1.0
        both = ((-effect, "greater"), (effect, "less"))
        sides = [stats.ttest_1samp(values, bound, alternative=side).pvalue for bound, side in both]
        assert (compared(sample(*values), effect).verdict == "no difference") == (max(sides) < 0.025)


def test_the_seeds_that_are_missing_would_decide_in_four_of_five_tables() -> None:
    draw, spread = np.random.default_rng(3), 1.4
    needed = compared(sample(*(spread * np.array([-1.26, -0.63, 0, 0.63, 1.26]))), 1.0).needed
    for mean in (0.0, 1.0):
        verdicts = [compared(sample(*draw.normal(mean, spread, needed)), 1.0).verdict for _ in range(300)]
        assert np.mean([verdict != "undecided" for verdict in verdicts]) > 0.75


def test_claims_that_were_not_run_share_the_level() -> None:
    """Else a part of the rows would decide what all of them do not."""
    own = sample(1.0, 0.6, 1.4, 0.2, 1.8)
    alone, among = judged([own])[0], judged([own, None, None, None])[0]
    assert (alone.verdict, among.verdict) == ("above", "undecided")
    assert alone.comparison
    assert among.comparison
    assert among.comparison.p == pytest.approx(4 * alone.comparison.p)


def test_the_second_look_is_for_what_the_first_one_left() -> None:
    sure, later = (2.0, 2.1, 1.9, 2.0, 2.2), (1.0, 2.5, 0.2, 1.5, -0.2)
    first = judged([sample(*sure, *later)], FIVE, TEN)[0]
    assert (first.verdict, len(first.sample.seeds)) == ("above", 5)
    second = judged([sample(*later, *sure)], FIVE, TEN)[0]
    assert (second.verdict, len(second.sample.seeds)) == ("above", 10)
    begun = judged([sample(*later, *sure[:3])], FIVE, TEN)[0]  # the number of looks is fixed
    assert (begun.verdict, len(begun.sample.seeds)) == ("undecided", 5)


@pytest.mark.parametrize(
    ("text", "column", "unit", "verdict"),  # the difference is 0.13 units
    [
        *((f"a {sign} b on c", {"metric": "r1_sum"}, 1, "no difference of 1") for sign in "<>"),
        ("a > b on c", {"metric": "r1_sum"}, 12, "above"),
        ("a > b on c", {"metric": "r1_sum", "effect": 0.1}, 1, "above"),
        ("a > b on c", {"name": "seconds"}, 0.1, "no difference of 1"),
    ],
)
def test_what_matters_is_the_columns_effect(
    loaded: Callable[..., Study], text: str, column: dict[str, Any], unit: float, verdict: str
) -> None:
    study = loaded(rows={"a": {}, "b": {}}, columns={"c": column}, claims={"method": [text]}, seeds=5)
    left = {seed: unit * figure for seed, figure in enumerate((5.211, 4.112, 3.110, 2.111, 1.113))}
    right = {seed: unit * figure for seed, figure in enumerate((5.0, 4.0, 3.0, 2.0, 1.0))}
    assert claims_tables(Results(study, {("a", (), "c"): left, ("b", (), "c"): right}))[0].rows[0][2] == verdict


def test_rows_that_were_tuned_once_for_all_seeds_decide_nothing(loaded: Callable[..., Study]) -> None:
    study = loaded(rows={"a": {}, "b": {}}, columns={"c": "r1_sum"}, claims={"method": [CLAIM]}, seeds=5)
    values = {("a", (), "c"): {seed: 9.0 + seed for seed in FIVE}, ("b", (), "c"): {seed: seed for seed in FIVE}}
    chosen = Chosen({"rate": 1.0}, {}, {"as given": 1.0})
    for seeds, words in (((None,), "undecided (tuned once, for all seeds alike)"), (FIVE, "above")):
        own = Results(study, values, {("a", (), seed): chosen for seed in seeds})
        results = Results.from_json(study, own.to_json())
        assert results.judgements()[0].in_words == words
        assert results.against("a", "b", (), "c")[1] == words


def replicate(draw: np.random.Generator, mean: float, noise: float) -> float:
    """Figure of a seed that chose among five candidates by its own noisy validation, one of which is worse."""
    return mean + draw.normal(-1.0 * (draw.normal([0, 0, 0, 0, -1.0], noise).argmax() == 4), noise)


@pytest.mark.parametrize(("effect", "least", "most"), [(0.0, 0.0, 0.05), (2.0, 0.75, 1.0)])
def test_level_and_power_of_the_whole_rule(effect: float, least: float, most: float) -> None:
    """Two looks at one claim, tuning inside each replicate, differences with a standard deviation of about 1.4."""
    draw, studies = np.random.default_rng(4), 400
    result = 0
    for _ in range(studies):
        own = sample(*(replicate(draw, effect, 0.9) - replicate(draw, 0.0, 0.9) for _ in TEN))
        result += judged([own], FIVE, TEN)[0].verdict == "above"
    assert least <= result / studies <= most + 3 * math.sqrt(0.05 * 0.95 / studies)


# ---- paired samples, against scipy


def test_interval_and_p_are_those_of_a_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    for count in (2, 3, 5, 10):
        left, right = draw.normal(1, 2, count), draw.normal(0, 1, count)
        own = sample(*(left - right))
        test = stats.ttest_rel(left, right)
        interval = test.confidence_interval(0.95)
        assert own.p == pytest.approx(test.pvalue)
        assert own.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(("values", "p"), [((2.0, 2.0, 2.0), 0.0513), ((0.0, 0.0), 1.0), ((1.0,), math.nan)])
def test_p_at_the_edges(values: tuple[float, ...], p: float) -> None:
    assert sample(*values).p == pytest.approx(p, abs=1e-4, nan_ok=True)


def test_equal_differences_have_the_spread_of_the_steps_that_figures_move_in() -> None:
    step = 100 / 30  # of an accuracy over 30 items, whose differences differ in their last bits
    own = sample(50 + step - 50, 40 + step - 40, step)
    assert own.std < 1e-12 < own.spread == pytest.approx(step / math.sqrt(6))
    assert own.p > 0.05
    assert sample(10.0, 10.0, 11.0).spread == sample(10.0, 10.0, 11.0).std  # more than the step of 1 has
